package control_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

var source = &sandbox.SecretSource{Kind: "refresh_token", TokenURL: "https://auth.example.com/token", ClientID: "me"}

// Tokens are fetched, renewed before they end, and never without need; a
// credential that rotates is kept.
func TestEgressTokens(t *testing.T) {
	withEgress(t, func(w *world, g *gateway) {
		n := 0
		g.token = func(credential string) (string, time.Time, string, error) {
			if want := fmt.Sprintf("credential %d", n); credential != want {
				return "", time.Time{}, "", fmt.Errorf("asked with %q, not %q", credential, want)
			}
			n++
			return fmt.Sprintf("token %d", n), time.Now().Add(10 * time.Minute), fmt.Sprintf("credential %d", n), nil
		}
		w.profile(injects("TOKEN"))
		w.secret("TOKEN", "credential 0", source)
		time.Sleep(time.Minute)
		if g.fetched() != 0 {
			t.Error("a token was fetched for nobody")
		}
		sb := w.runs("web")
		a := w.node.assignment(sb.ID)
		if valueOf(a, "TOKEN") != "token 1" || a.Secrets[0].ExpiresAt == nil || a.Secrets[0].ExpiresAt.Before(time.Now().Add(9*time.Minute)) {
			t.Errorf("%+v", a.Secrets)
		}
		w.runs("web")
		if g.fetched() != 1 {
			t.Errorf("%d fetches", g.fetched())
		}
		time.Sleep(8*time.Minute + 2*time.Second)
		synctest.Wait()
		if b := w.node.assignment(sb.ID); valueOf(b, "TOKEN") != "token 2" || b.Revision <= a.Revision || g.fetched() != 2 {
			t.Errorf("%+v, %d fetches", b.Secrets, g.fetched())
		}
		if s, err := w.c.Secret(w.t.Context(), w.reader, "TOKEN"); err != nil || s.Version != 3 || s.Sealed != nil {
			t.Errorf("%+v %v", s, err)
		}
		// A new control knows no token and the last credential.
		w.stop()
		w.start()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if b := w.node.assignment(sb.ID); valueOf(b, "TOKEN") != "token 3" {
			t.Errorf("%+v", b.Secrets)
		}
		// A credential that somebody sets is used at once.
		n = 7
		_, err := w.c.ReplaceSecret(w.t.Context(), w.user, "TOKEN", 0, []byte("credential 7"))
		w.must(err)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if b := w.node.assignment(sb.ID); valueOf(b, "TOKEN") != "token 8" {
			t.Errorf("%+v", b.Secrets)
		}
		// Who needs none is fetched none.
		_, err = w.c.SetSandboxEgress(w.t.Context(), w.user, sb.ID, sandbox.PresetNone)
		w.must(err)
		list, _, err := w.c.List(w.t.Context(), w.user, sandbox.SandboxFilter{}, sandbox.Page{})
		w.must(err)
		for _, sb := range list {
			w.ended(w.del(sb.ID))
		}
		had := g.fetched()
		time.Sleep(12 * time.Minute)
		if g.fetched() != had {
			t.Errorf("%d fetches for nobody", g.fetched()-had)
		}
	})
}

// A server that gives no token holds no sandbox up; there is no value until it
// does, and it is not asked all the time.
func TestEgressTokenFails(t *testing.T) {
	withEgress(t, func(w *world, g *gateway) {
		broken := true
		g.token = func(string) (string, time.Time, string, error) {
			if broken {
				return "", time.Time{}, "", errors.New("no")
			}
			return "token", time.Time{}, "", nil
		}
		w.profile(injects("TOKEN"))
		w.secret("TOKEN", "credential", source)
		sb := w.runs("web")
		if a := w.node.assignment(sb.ID); len(a.Secrets) != 0 {
			t.Errorf("%+v", a.Secrets)
		}
		time.Sleep(10 * time.Minute)
		if n := g.fetched(); n < 3 || n > 12 {
			t.Errorf("%d fetches in 10 minutes", n)
		}
		g.mu.Lock()
		broken = false
		g.mu.Unlock()
		time.Sleep(6 * time.Minute)
		synctest.Wait()
		if a := w.node.assignment(sb.ID); valueOf(a, "TOKEN") != "token" || a.Secrets[0].ExpiresAt != nil {
			t.Errorf("%+v", a.Secrets)
		}
	})
}
