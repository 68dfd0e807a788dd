// Package dial makes the gateway's own connections to the world. It takes
// addresses that the gateway resolved itself, never a name, and connects to the
// first that answers.
//
// Invariants: every address is checked against the closed ranges before the
// connection and once more in the dialer's control hook, with the address that
// the kernel is about to get; no proxy of the environment and no resolver is
// ever asked; IPv4 only, as in the sandboxes. The proxy calls it for spliced
// connections and for requests alike.
package dial

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
)

// maxAddrs bounds how many addresses of one name are tried.
const maxAddrs = 8

// The codes of Dial's errors.
const (
	CodeClosed  = "closed_range"
	CodeRefused = "upstream_refused"
	CodeTimeout = "upstream_timeout"
	CodeFailed  = "upstream_failed"
)

// Dialer connects to addresses that aren't closed.
type Dialer struct {
	ranges  *policy.Ranges
	timeout time.Duration
	checked func(netip.AddrPort) // tests see which addresses got as far as the hook
}

// New returns a dialer that spends at most timeout on one call of Dial.
func New(r *policy.Ranges, timeout time.Duration) *Dialer {
	return &Dialer{ranges: r, timeout: timeout}
}

// Dial tries addrs in turn. Where none of them may be connected to its error
// has the code closed_range and names the range.
func (d *Dialer) Dial(ctx context.Context, addrs []netip.Addr, port uint16) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	var open []netip.Addr
	var closed error = sandbox.Errorf(sandbox.Unavailable, CodeFailed, "there is no address to connect to")
	for _, a := range addrs {
		switch err := d.check(a); {
		case err != nil:
			closed = err
		case len(open) < maxAddrs:
			open = append(open, a.Unmap())
		}
	}
	if len(open) == 0 {
		return nil, closed
	}
	if port == 0 {
		return nil, sandbox.Errorf(sandbox.Unavailable, CodeFailed, "nothing listens on port 0")
	}
	var last error
	for i, a := range open {
		c, err := d.one(ctx, netip.AddrPortFrom(a, port), len(open)-i)
		if err == nil {
			return c, nil
		}
		if last = err; ctx.Err() != nil {
			break
		}
	}
	return nil, explain(ctx, last)
}

// one connects to one address within its share of the time that is left.
func (d *Dialer) one(ctx context.Context, to netip.AddrPort, left int) (*net.TCPConn, error) {
	if end, ok := ctx.Deadline(); ok && left > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(left))
		defer cancel()
	}
	nd := net.Dialer{ControlContext: func(_ context.Context, network, address string, _ syscall.RawConn) error {
		return d.control(to, network, address)
	}}
	c, err := nd.DialContext(ctx, "tcp4", to.String())
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(errors.New("the connection is not TCP"), c.Close())
	}
	if err := d.notOurselves(tcp, to.Addr()); err != nil {
		return nil, errors.Join(err, tcp.Close())
	}
	return tcp, nil
}

// control is the last word before connect(2): the kernel gets address as it is.
func (d *Dialer) control(want netip.AddrPort, network, address string) error {
	got, err := netip.ParseAddrPort(address)
	if err != nil || network != "tcp4" || got != want {
		return sandbox.Errorf(sandbox.Denied, CodeClosed, "%s %s is not what was to be connected to", network, address)
	}
	if d.checked != nil {
		d.checked(got)
	}
	return d.check(got.Addr())
}

// notOurselves refuses a connection from an address to itself: then it is one
// of the host's, and came up after the closed ranges were made.
func (d *Dialer) notOurselves(c *net.TCPConn, to netip.Addr) error {
	local, err := netip.ParseAddrPort(c.LocalAddr().String())
	if err != nil || local.Addr().Unmap() == to && !to.IsLoopback() { // loopback is open in tests only
		return sandbox.Errorf(sandbox.Denied, CodeClosed, "%s is the host's own address", to)
	}
	return nil
}

func (d *Dialer) check(a netip.Addr) error {
	if reason, closed := d.ranges.Closed(a); closed {
		return sandbox.Errorf(sandbox.Denied, CodeClosed, "%s is in a closed range (%s)", a, reason)
	}
	if !a.Unmap().Is4() {
		return sandbox.Errorf(sandbox.Denied, CodeClosed, "%s is not IPv4", a)
	}
	return nil
}

// explain gives err one of the codes.
func explain(ctx context.Context, err error) error {
	var own *sandbox.Error
	var timeout interface{ Timeout() bool }
	switch {
	case errors.As(err, &own):
		return own
	case errors.Is(ctx.Err(), context.Canceled):
		return sandbox.Errorf(sandbox.Unavailable, CodeFailed, "the connection was given up: %w", err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return sandbox.Errorf(sandbox.Unavailable, CodeRefused, "the server refused the connection: %w", err)
	case errors.Is(err, syscall.ETIMEDOUT), errors.As(err, &timeout) && timeout.Timeout():
		return sandbox.Errorf(sandbox.Unavailable, CodeTimeout, "the server did not answer in time: %w", err)
	}
	return sandbox.Errorf(sandbox.Unavailable, CodeFailed, "no connection to the server: %w", err)
}
