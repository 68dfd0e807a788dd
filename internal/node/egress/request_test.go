package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// TestARequestThroughEverything is a request of a real process's gateway: the
// name is resolved in the world, the connection ended by the project's
// authority, a secret put in, the server verified, the secret taken out of the
// answer, and all of it recorded.
func TestARequestThroughEverything(t *testing.T) {
	s := newSite(t)
	s.spec.RootsFile = s.world.RootsFile()
	m, _, _ := s.manager()
	id := s.box()
	const host, value = "api.test", "correct horse battery staple"
	addr := s.world.Addr(20)
	s.world.Name(host, 60, addr)
	got := make(chan string, 1)
	s.world.Site(addr, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got <- r.Header.Get("Authorization")
		_, _ = io.WriteString(w, "you said "+r.Header.Get("Authorization"))
	}))
	a := sandbox.EgressAssignment{
		Sandbox: id, Project: "prj_test", Revision: 1, CA: s.ca, Secrets: []sandbox.SecretValue{{Name: "key", Hosts: []string{host}, Value: []byte(value)}},
		Profile: sandbox.EgressProfile{Name: "api", Version: 1, Default: sandbox.EgressDeny, Rules: []sandbox.EgressRule{{
			Name: "api", Action: sandbox.EgressInject, Hosts: []string{host}, Schemes: []string{"https"}, Paths: []string{"/v1/"},
			Inject: []sandbox.Injection{{Secret: "key", Kind: sandbox.InjectHeader, Prefix: "Bearer "}},
		}}},
	}
	must(t, m.Set(background, a))
	must(t, m.Attach(background, id))
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(m.CA(id))
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := s.dial(id, netip.AddrPortFrom(netip.MustParseAddr("192.0.2.77"), 443)) // what a guest believes a name to be is nothing to us
			if err != nil {
				return nil, err
			}
			over := tls.Client(c, &tls.Config{RootCAs: roots, ServerName: host, MinVersion: tls.VersionTLS12})
			return over, over.HandshakeContext(ctx)
		},
	}}
	ask := func(path string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(background, http.MethodGet, "https://"+host+path, nil)
		must(t, err)
		req.Header.Set("Authorization", "the guest's own")
		resp, err := client.Do(req)
		must(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		must(t, err)
		return resp.StatusCode, string(body)
	}
	status, body := ask("/v1/x?q=1")
	if heard := <-got; status != http.StatusOK || heard != "Bearer "+value || body == "" || body == "you said "+heard {
		t.Errorf("status %d, the server heard %q, the guest %q", status, heard, body)
	}
	if status, body := ask("/v2/x"); status != http.StatusForbidden {
		t.Errorf("a path that no rule has: status %d, %q", status, body)
	}
	tell, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	enough := errors.New("enough")
	var records []sandbox.EgressRecord
	err := m.Audit().FollowEgress(tell, sandbox.EgressAuditFilter{Sandbox: id, Kind: "http"}, func(r sandbox.EgressRecord) error {
		if records = append(records, r); len(records) == 2 {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) {
		t.Fatalf("the audit: %v, %+v", err, records)
	}
	if r := records[0]; r.Verdict != "allowed" || r.Host != host || r.Path != "/v1/x" || r.Rule != "api" || r.Status != 200 || len(r.Injected) != 1 || r.Injected[0] != "key" || r.Upstream != netip.AddrPortFrom(addr, 443) {
		t.Errorf("the first: %+v", r)
	}
	if r := records[1]; r.Verdict != "denied" || r.Path != "/v2/x" || r.Reason == "" {
		t.Errorf("the second: %+v", r)
	}
	// A secret that is gone: nothing goes out bare.
	a.Revision, a.Secrets = 2, nil
	must(t, m.Set(background, a))
	if status, body := ask("/v1/x"); status == http.StatusOK {
		t.Errorf("without its secret: status %d, %q", status, body)
	}
	select {
	case heard := <-got:
		t.Errorf("the server heard %q", heard)
	default:
	}
}
