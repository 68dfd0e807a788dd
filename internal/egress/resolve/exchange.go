package resolve

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	upstreamSize = 1232 // of packets; larger answers come over TCP
	maxPacket    = 4 << 10
	maxStray     = 64 // packets that aren't the answer
)

var errAnswer = errors.New("the name server's answer makes no sense")

// askOne asks one server for the addresses of a name.
func (r *Resolver) askOne(ctx context.Context, server netip.AddrPort, name string) (answer, error) {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(name), dns.TypeA)
	q.SetEdns0(upstreamSize, false)
	var id [2]byte
	rand.Read(id[:]) // never fails
	q.Id = binary.BigEndian.Uint16(id[:])
	m, err := exchange(ctx, "udp", server, q)
	if err == nil && m.Truncated {
		m, err = exchange(ctx, "tcp", server, q)
	}
	if err != nil {
		return answer{}, err
	}
	return r.read(m, name)
}

// exchange sends q over a socket of its own, so from a port that the kernel
// chose, and waits for what answers exactly that question.
func exchange(ctx context.Context, network string, server netip.AddrPort, q *dns.Msg) (*dns.Msg, error) {
	var d net.Dialer // the servers are the operator's, who may have them anywhere
	c, err := d.DialContext(ctx, network, server.String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) }) //nolint:errcheck // only a closed connection has none
	defer stop()
	out, err := q.Pack()
	if err != nil {
		return nil, err
	}
	if network == "tcp" {
		out = append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...)
	}
	if _, err := c.Write(out); err != nil {
		return nil, err
	}
	buf := make([]byte, maxPacket)
	for range maxStray {
		b, err := readMessage(c, network, buf)
		if err != nil {
			return nil, err
		}
		if m := answers(b, q); m != nil {
			return m, nil
		}
		if network == "tcp" {
			break
		}
	}
	return nil, errAnswer
}

// readMessage reads into buf, or beyond what it takes if a stream says so.
func readMessage(c net.Conn, network string, buf []byte) ([]byte, error) {
	if network == "udp" {
		n, err := c.Read(buf)
		return buf[:n], err
	}
	if _, err := io.ReadFull(c, buf[:2]); err != nil {
		return nil, err
	}
	if n := int(binary.BigEndian.Uint16(buf)); n <= len(buf) {
		buf = buf[:n]
	} else {
		buf = make([]byte, n)
	}
	_, err := io.ReadFull(c, buf)
	return buf, err
}

// answers returns the message in b if it answers q, else nil.
func answers(b []byte, q *dns.Msg) *dns.Msg {
	if len(b) < 12 || binary.BigEndian.Uint16(b) != q.Id {
		return nil
	}
	m := new(dns.Msg)
	if err := m.Unpack(b); err != nil && !m.Truncated {
		return nil
	}
	if !m.Response || m.Opcode != dns.OpcodeQuery || len(m.Question) != 1 {
		return nil
	}
	got, want := m.Question[0], q.Question[0]
	if got.Qtype != want.Qtype || got.Qclass != want.Qclass || !strings.EqualFold(got.Name, want.Name) {
		return nil
	}
	return m
}

// read takes the addresses from an answer: those of the name, and of what its
// chain of aliases within the answer leads to.
func (r *Resolver) read(m *dns.Msg, name string) (answer, error) {
	switch m.Rcode {
	case dns.RcodeSuccess:
	case dns.RcodeNameError:
		return answer{err: noName(name), until: r.now().Add(negativeTTL)}, nil
	default:
		return answer{}, fmt.Errorf("the name server answered %s", dns.RcodeToString[m.Rcode])
	}
	ttl := uint32(maxTTL / time.Second)
	addrs := follow(m.Answer, dns.Fqdn(name), &ttl)
	if len(addrs) == 0 {
		return answer{err: noName(name), until: r.now().Add(negativeTTL), exists: true}, nil
	}
	a := answer{until: r.now().Add(max(minTTL, time.Duration(ttl)*time.Second))}
	for _, addr := range addrs {
		reason, closed := r.o.Ranges.Closed(addr)
		if !closed {
			a.addrs = append(a.addrs, addr)
		} else if a.err == nil {
			a.err = sandbox.Errorf(sandbox.Denied, CodeClosed, "%q has the address %s in a closed range (%s)", name, addr, reason)
		}
	}
	if len(a.addrs) > 0 {
		a.err = nil
	}
	return a, nil
}

// follow walks from owner to its addresses and lowers ttl to the least that it met.
func follow(records []dns.RR, owner string, ttl *uint32) []netip.Addr {
	for range maxChain {
		var addrs []netip.Addr
		next := ""
		for _, rr := range records {
			if h := rr.Header(); h.Class != dns.ClassINET || !strings.EqualFold(h.Name, owner) {
				continue
			}
			switch rr := rr.(type) {
			case *dns.A:
				addr, ok := netip.AddrFromSlice(rr.A)
				if addr = addr.Unmap(); ok && len(addrs) < maxAddrs && !slices.Contains(addrs, addr) {
					addrs = append(addrs, addr)
				}
			case *dns.CNAME:
				next = rr.Target
			default:
				continue
			}
			*ttl = min(*ttl, rr.Header().Ttl)
		}
		if len(addrs) > 0 || next == "" {
			return addrs
		}
		owner = next
	}
	return nil
}
