package server

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/egress/ca"
	"cloche.dev/cloche/internal/egress/dial"
	"cloche.dev/cloche/internal/egress/oauth"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/egress/resolve"
	"cloche.dev/cloche/internal/metrics"
	"cloche.dev/cloche/internal/node/egress"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
	"cloche.dev/cloche/internal/vault"
)

// EgressOptions are what an operator decides about what may leave sandboxes.
type EgressOptions struct {
	// Open are closed ranges (private ones only) that are open nevertheless.
	Open []netip.Prefix
	// Resolvers are the name servers that are asked; none: the host's.
	Resolvers []netip.AddrPort
	// RootsFile holds the authorities (PEM) that servers are verified by; "": the
	// host's.
	RootsFile string
	// KeyCommand wraps and unwraps the data keys of secrets; none: a key file in
	// the state directory.
	KeyCommand []string
	// Gateway starts a gateway process; its own flags follow.
	Gateway []string
}

// The names of what egress keeps in the state directory.
const (
	secretKeyFile = "secret.key"
	auditBytes    = 256 << 20
)

// newEgress makes the gateway's manager and what control needs for it.
func (h *host) newEgress(o Options, networks *netns.Manager) (err error) {
	e := o.Egress
	if len(e.Resolvers) == 0 {
		// A host without one can do all but look names up.
		if e.Resolvers, err = resolve.HostServers("/etc/resolv.conf"); err != nil {
			o.Log.Warn("sandboxes can reach nothing by name", "err", err, "what_to_do", "name the servers with --egress-resolver, or mend resolv.conf and restart")
		}
	}
	h.egress, err = egress.New(egress.Options{
		RunDir: o.RunDir, StateDir: o.StateDir, Program: e.Gateway, Networks: networks, Open: e.Open,
		Resolvers: e.Resolvers, RootsFile: e.RootsFile, AuditBytes: auditBytes, Build: o.Version, Log: o.Log,
	})
	if err != nil {
		return err
	}
	secrets, err := vault.Open(vault.Options{KeyFile: filepath.Join(o.StateDir, secretKeyFile), Command: e.KeyCommand})
	if err != nil {
		return err
	}
	tokens := tokenClient(e)
	h.rules = &control.Egress{
		Vault: secrets, Preset: policy.Preset, Audit: h.egress.Audit(),
		Check: func(p sandbox.EgressProfile) error { _, err := policy.Compile(p); return err },
		NewCA: func(project string) (sandbox.Authority, error) { return ca.Generate("Cloche egress of " + project) },
		Token: func(ctx context.Context, s sandbox.SecretSource, credential []byte) ([]byte, time.Time, []byte, error) {
			return oauth.Fetch(ctx, tokens, s, credential)
		},
	}
	return nil
}

// tokenWait bounds each step of fetching a token.
const tokenWait = 10 * time.Second

// tokenClient fetches tokens under the rules that sandboxes' connections have:
// a token's address is a user's text, and must not lead into closed ranges.
func tokenClient(e EgressOptions) *http.Client {
	return &http.Client{
		Timeout:       3 * tokenWait,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			TLSHandshakeTimeout: tokenWait, DisableKeepAlives: true, ForceAttemptHTTP2: true,
			DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) { return e.dial(ctx, addr) },
		},
	}
}

// dial connects to a name as the gateway does.
func (e EgressOptions) dial(ctx context.Context, addr string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, err
	}
	if host, err = policy.CanonicalHost(host); err != nil {
		return nil, err
	}
	ranges, err := e.ranges()
	if err != nil {
		return nil, err
	}
	names := resolve.New(resolve.Options{Servers: e.Resolvers, Ranges: ranges, Timeout: tokenWait})
	addrs, err := names.Lookup(ctx, host)
	if err != nil {
		return nil, err
	}
	return dial.New(ranges, tokenWait).Dial(ctx, addrs, uint16(number))
}

// ranges are what is closed now: the host's own addresses change.
func (e EgressOptions) ranges() (*policy.Ranges, error) {
	own, err := sys.OwnAddresses()
	if err != nil {
		return nil, err
	}
	return policy.NewRanges(e.Open, own)
}

// check tells whether EgressOptions can be served.
func (e EgressOptions) check() error {
	if _, err := policy.NewRanges(e.Open, nil); err != nil {
		return err
	}
	if e.RootsFile == "" {
		return nil
	}
	if _, err := os.Stat(e.RootsFile); errors.Is(err, os.ErrNotExist) {
		return sandbox.Errorf(sandbox.Invalid, "no_roots", "there is no file %s", e.RootsFile)
	}
	return nil
}

// gatewayState is what metrics tell of the gateway.
func (h *host) gatewayState(ctx context.Context) (metrics.Egress, error) {
	state := metrics.Egress{Decisions: map[metrics.Decision]uint64{}}
	for t, n := range h.egress.Audit().Totals() {
		state.Decisions[metrics.Decision{Kind: string(t.Kind), Verdict: string(t.Verdict)}] = n
	}
	now, err := h.egress.Stats(ctx)
	state.Connections, state.Sandboxes = now.Open, now.Sandboxes
	return state, err
}
