package redteam

import (
	"bytes"
	"encoding/base64"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
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
	a := newArena(t, 0)
	box, secret := a.inject, a.secret
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
	t.Run("scan", func(t *testing.T) { a.scan(t, box, secret) })
}

// forms are how a secret may be spelled.
func forms(secret string) map[string]string {
	return map[string]string{
		"as it is": secret, "in base64": base64.StdEncoding.EncodeToString([]byte(secret)), "percent-encoded": url.QueryEscape(secret),
	}
}

// plant leaves the canary on the guest's disk, in a process's memory and in
// its environment.
const plant = `printf %s "$1" >/root/planted && CANARY="$1-in-env" setsid sh -c 'kept=$(cat /root/planted)-in-memory; while :; do sleep 1; done' >/dev/null 2>&1 </dev/null & sync`

// scan looks for the secret and for the canary on the host and in the guest.
func (a *arena) scan(t *testing.T, box, secret string) {
	t.Helper()
	d := a.d.For(t)
	if r := d.CLI("exec", "-u", "0", box, "--", "sh", "-c", plant, "x", canary); r.Code != 0 {
		t.Fatalf("plant the canary: %s", r.Stderr)
	}
	texts := []string{canary, canary + "-in-env", canary + "-in-memory", secret}
	for _, form := range forms(secret) {
		texts = append(texts, form)
	}
	env := d.Must("exec", "-u", "0", box, "--", "sh", "-c", "cat /proc/[0-9]*/environ | tr '\\0' '\\n'")
	if !strings.Contains(env, canary+"-in-env") || strings.Contains(env, secret) {
		t.Errorf("the guest's environment lacks the canary, or has the secret:\n%s", env)
	}
	d.Must("suspend", box)
	planted := map[string]bool{}
	_ = filepath.WalkDir(filepath.Dir(a.d.State), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil //nolint:nilerr // sockets, and what is gone by now
		}
		found, err := holds(path, texts...)
		if err != nil {
			return nil //nolint:nilerr // gone by now
		}
		for i, text := range texts {
			switch {
			case !found[i]:
			case i < 3:
				planted[place(a.d, path)+strings.TrimPrefix(text, canary)] = true
			default:
				t.Errorf("the secret lies in %s", path)
			}
		}
		return nil
	})
	t.Logf("the canary was found in %v", slices.Sorted(maps.Keys(planted)))
	for _, where := range []string{"snapshots", "snapshots-in-env", "snapshots-in-memory", "audit"} {
		if !planted[where] {
			t.Errorf("the scan doesn't find what was planted in %s, so that it proves nothing there", where)
		}
	}
	a.answers(t, box, secret)
}

// answers looks for the secret in what the API and the CLI say, and in logs.
func (a *arena) answers(t *testing.T, box, secret string) {
	t.Helper()
	d := a.d.For(t)
	d.Must("create", "--name", canary, "--egress", "none", "base")
	said := map[string]string{"log": d.Log(), "events": d.Must("events", "--json"), "list": d.Must("ls", "--json"), "audit": d.Must("egress", "tail")}
	for what, answer := range said {
		mark := canary
		if what == "log" || what == "events" {
			mark = box // they quote nothing of a sandbox but its id
		}
		if !strings.Contains(answer, mark) {
			t.Errorf("the scan doesn't find %q in the answer to %s:\n%.500s", mark, what, answer)
		}
	}
	said["inspect"], said["secrets"] = d.Must("inspect", "--json", box), d.Must("secret", "ls", "--json")
	said["profile"] = d.Must("egress", "profile", "get", "inject")
	if !strings.Contains(said["secrets"], "api-key") || !strings.Contains(said["profile"], "api-key") {
		t.Error("an answer isn't the one that was asked for")
	}
	for what, answer := range said {
		for how, form := range forms(secret) {
			if strings.Contains(answer, form) {
				t.Errorf("the secret stands %s in %s: %.300s", how, what, answer)
			}
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
