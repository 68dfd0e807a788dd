package redteam

import (
	"bytes"
	"encoding/base64"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cloche.dev/cloche/test/harness"
)

// withSecret is a profile that injects.
const withSecret = `{"name": "inject", "default": "deny", "rules": [
 {"name": "api", "action": "inject", "hosts": ["allowed.test"], "inject": [{"secret": "api-key", "kind": "header", "name": "X-Api-Key", "prefix": "Key "}]},
 {"name": "plain", "action": "allow", "hosts": ["front.test"]}
]}`

const canary = "canary-that-must-be-found-2f9c"

// TestSecretIsNowhere has a sandbox use a secret and looks for it in every place
// where it could have stayed; that it looks well is shown by a canary that is
// planted in each.
func TestSecretIsNowhere(t *testing.T) {
	a := newArena(t)
	secret := "s3cr3t-" + token() + "/+=x"
	a.secret(t, "api-key", secret, "allowed.test")
	a.profile(t, withSecret)
	box := a.box("inject")
	req := "GET /" + canary + " HTTP/1.1\r\nHost: allowed.test\r\nX-Api-Key: mine\r\nConnection: close\r\n\r\n"

	t.Run("injected", func(t *testing.T) {
		got := a.doIn(t, box, secure(allowed, "allowed.test", req)(a, ""))[0]
		if len(a.arrived("Key "+secret)) == 0 {
			t.Fatalf("the server did not get the secret: %+v\n%s", got, got.Got)
		}
		if len(a.arrived("X-Api-Key: mine")) > 0 {
			t.Error("the guest's own value arrived as well")
		}
		// The server echoes every header.
		for how, form := range forms(secret) {
			if bytes.Contains(got.Got, []byte(form)) {
				t.Errorf("the answer holds the secret %s:\n%s", how, got.Got)
			}
		}
		if !bytes.Contains(got.Got, []byte("served allowed.test")) {
			t.Errorf("the answer is not the server's:\n%s", got.Got)
		}
	})
	t.Run("not in clear", func(t *testing.T) {
		a.doIn(t, box, plain(allowed, req)(a, ""))
		a.mu.Lock()
		defer a.mu.Unlock()
		if b := a.seen["10:80"]; b != nil && bytes.Contains(b.Bytes(), []byte(secret)) {
			t.Error("the secret crossed port 80")
		}
	})
	t.Run("not to others", func(t *testing.T) {
		tok := token()
		a.doIn(t, box, secure(allowed, "front.test", "GET /"+tok+" HTTP/1.1\r\nHost: front.test\r\nX-Api-Key: mine\r\nConnection: close\r\n\r\n")(a, ""))
		if len(a.arrived(tok)) == 0 {
			t.Error("what another rule allows did not arrive")
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		if all := a.seen["10:443"].String(); strings.Count(all, secret) != 1 {
			t.Errorf("the secret arrived %d times", strings.Count(all, secret))
		}
	})
	t.Run("scan", func(t *testing.T) { a.scan(t, box, secret) })
}

// forms are how a secret may be spelled.
func forms(secret string) map[string]string {
	return map[string]string{
		"as it is": secret, "in base64": base64.StdEncoding.EncodeToString([]byte(secret)), "percent-encoded": url.QueryEscape(secret),
	}
}

// scan looks for the secret and for the canary on the host and in the guest.
func (a *arena) scan(t *testing.T, box, secret string) {
	t.Helper()
	inside := "printf %s \"$1\" > /root/planted; (exec -a \"$1\" sleep 1000) & " // on disk, and in memory
	if r := a.d.For(t).CLI("exec", box, "--", "bash", "-c", inside+"sync", "x", canary); r.Code != 0 {
		t.Fatalf("plant the canary: %s", r.Stderr)
	}
	a.d.For(t).Must("suspend", box)
	planted, leaked := map[string]bool{}, []string{}
	for _, root := range []string{a.d.State, a.d.Run, filepath.Dir(a.d.State)} {
		_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return nil //nolint:nilerr // sockets, and what is gone by now
			}
			found, err := holds(path, canary, secret, base64.StdEncoding.EncodeToString([]byte(secret)))
			if err != nil {
				return nil //nolint:nilerr // gone by now
			}
			if found[0] {
				planted[place(a.d, path)] = true
			}
			if found[1] || found[2] {
				leaked = append(leaked, path)
			}
			return nil
		})
	}
	if len(leaked) > 0 {
		t.Errorf("the secret lies in %q", leaked)
	}
	for _, where := range []string{"snapshots", "egress"} {
		if !planted[where] {
			t.Errorf("the scan doesn't find what was planted in %s, so that it proves nothing there (it found it in %v)", where, planted)
		}
	}
	for _, answer := range []string{a.d.For(t).Must("inspect", "--json", box), a.d.For(t).Must("secret", "ls", "--json"), a.d.For(t).Must("events", "--json"), a.d.For(t).Log()} {
		if strings.Contains(answer, secret) {
			t.Errorf("the secret stands in an answer: %.300s", answer)
		}
	}
}

// place is the first folder of a path below the state directory.
func place(d *harness.Daemon, path string) string {
	rel, err := filepath.Rel(d.State, path)
	if err != nil || strings.HasPrefix(rel, "..") {
		return "outside"
	}
	return strings.SplitN(rel, string(filepath.Separator), 2)[0]
}

// holds tells which of the texts a file has.
func holds(path string, texts ...string) ([]bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	found := make([]bool, len(texts))
	const chunk, overlap = 4 << 20, 4 << 10
	b := make([]byte, 0, chunk+overlap)
	for {
		n, err := f.Read(b[len(b) : len(b)+chunk])
		b = b[:len(b)+n]
		for i, text := range texts {
			found[i] = found[i] || bytes.Contains(b, []byte(text))
		}
		if err != nil {
			return found, nil //nolint:nilerr // its end
		}
		if len(b) > overlap {
			b = append(b[:0], b[len(b)-overlap:]...)
		}
	}
}
