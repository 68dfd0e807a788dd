package proxy

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"
)

const (
	upstreamHandshake  = 10 * time.Second
	upstreamIdle       = 60 * time.Second
	maxUpstreamIdle    = 128
	maxUpstreamHost    = 16
	maxUpstreamHeaders = 256 << 10
	continueTimeout    = 2 * time.Second
	upstreamBuffer     = 1 << 20 // of an answer over HTTP/2 that the sandbox doesn't read
)

// plan is where a request goes: to one of these addresses, as this host.
type plan struct {
	scheme, host string
	port         uint16
	addrs        []netip.Addr
	onlyH1       bool
}

// pool names the plan for http.Transport, which keeps connections by the URL's
// host: two plans share connections only if each of them could have made
// either's. Names of one address are never on one connection.
func (p *plan) pool() string {
	addrs := slices.Clone(p.addrs)
	slices.SortFunc(addrs, netip.Addr.Compare)
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %v %v", p.scheme, p.host, p.onlyH1, addrs))
	return hex.EncodeToString(sum[:16]) + ":" + strconv.Itoa(int(p.port))
}

// authority is the Host that the server gets.
func (p *plan) authority() string {
	if p.scheme == "http" && p.port == 80 || p.scheme == "https" && p.port == 443 {
		return p.host
	}
	return net.JoinHostPort(p.host, strconv.Itoa(int(p.port)))
}

type planKey struct{}

// upstreams are the connections to servers of HTTP.
type upstreams struct {
	dialer Dialer
	roots  *x509.CertPool
	rt     *http.Transport

	mu   sync.Mutex
	open map[*upstreamConn]struct{}
}

func newUpstreams(d Dialer, roots *x509.CertPool) *upstreams {
	u := &upstreams{dialer: d, roots: roots, open: map[*upstreamConn]struct{}{}}
	u.rt = &http.Transport{
		Proxy:                  nil, // whatever the environment says
		DialContext:            u.dialPlain,
		DialTLSContext:         u.dialTLS,
		ForceAttemptHTTP2:      true,
		DisableCompression:     true, // what the sandbox asked for is what it gets
		MaxIdleConns:           maxUpstreamIdle,
		MaxIdleConnsPerHost:    maxUpstreamHost,
		IdleConnTimeout:        upstreamIdle,
		ExpectContinueTimeout:  continueTimeout,
		MaxResponseHeaderBytes: maxUpstreamHeaders,
		HTTP2:                  &http.HTTP2Config{MaxReceiveBufferPerStream: upstreamBuffer},
		WriteBufferSize:        32 << 10,
		ReadBufferSize:         32 << 10,
	}
	return u
}

// dialPlain and dialTLS take their plan from the request's context. The
// transport's address is its pool's name, and nothing that could be dialled.
func (u *upstreams) dialPlain(ctx context.Context, _, _ string) (net.Conn, error) {
	p, ok := ctx.Value(planKey{}).(*plan)
	if !ok || p.scheme != "http" {
		return nil, errors.New("a request without a plan")
	}
	return u.dial(ctx, p)
}

func (u *upstreams) dialTLS(ctx context.Context, _, _ string) (net.Conn, error) {
	p, ok := ctx.Value(planKey{}).(*plan)
	if !ok || p.scheme != "https" {
		return nil, errors.New("a request without a plan")
	}
	c, err := u.dial(ctx, p)
	if err != nil {
		return nil, err
	}
	conf := &tls.Config{ServerName: p.host, RootCAs: u.roots, MinVersion: tls.VersionTLS12, NextProtos: []string{alpnH2, alpnHTTP1}}
	if p.onlyH1 {
		conf.NextProtos = []string{alpnHTTP1}
	}
	ctx, cancel := context.WithTimeout(ctx, upstreamHandshake)
	defer cancel()
	tc := tls.Client(c, conf)
	if err := tc.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		var bad *tls.CertificateVerificationError
		if errors.As(err, &bad) {
			return nil, failed(reasonUpstreamCertificate)
		}
		return nil, failed(reasonUpstreamTLS)
	}
	return tc, nil
}

func (u *upstreams) dial(ctx context.Context, p *plan) (*upstreamConn, error) {
	tcp, err := u.dialer.Dial(ctx, p.addrs, p.port)
	if err != nil {
		return nil, err
	}
	c := &upstreamConn{Conn: tcp, tcp: tcp, owner: u}
	u.mu.Lock()
	u.open[c] = struct{}{}
	u.mu.Unlock()
	return c, nil
}

// upstreamConn is a connection to a server, known until it is closed.
type upstreamConn struct {
	net.Conn
	tcp   *net.TCPConn
	owner *upstreams
}

// Close implements net.Conn.
func (c *upstreamConn) Close() error {
	c.owner.mu.Lock()
	delete(c.owner.open, c)
	c.owner.mu.Unlock()
	return c.Conn.Close()
}

// cutAll resets every connection.
func (u *upstreams) cutAll() {
	u.mu.Lock()
	open := make([]*upstreamConn, 0, len(u.open))
	for c := range u.open {
		open = append(open, c)
	}
	u.mu.Unlock()
	for _, c := range open {
		abort(c.tcp)
	}
	u.closeIdle()
}

func (u *upstreams) closeIdle() { u.rt.CloseIdleConnections() }
