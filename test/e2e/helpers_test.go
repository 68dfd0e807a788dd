package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

// create makes a sandbox of the template base and returns its id.
func create(t testing.TB, d *harness.Daemon, flags ...string) string {
	t.Helper()
	return d.For(t).Must(append(append([]string{"create"}, flags...), "base")...)
}

// script runs a shell script in a sandbox, as a user.
func script(t testing.TB, d *harness.Daemon, box, user, text string) harness.Result {
	t.Helper()
	return d.For(t).CLI("exec", "-u", user, box, "--", "bash", "-c", text)
}

// mustScript is script with exit code 0 demanded.
func mustScript(t testing.TB, d *harness.Daemon, box, user, text string) string {
	t.Helper()
	r := script(t, d, box, user, text)
	if r.Code != 0 {
		t.Fatalf("%s: exit code %d\nstdout: %.2000s\nstderr: %.2000s", text, r.Code, r.Stdout, r.Stderr)
	}
	return strings.TrimSpace(r.Stdout)
}

func newClient(t testing.TB, d *harness.Daemon, key string) *client.Client {
	t.Helper()
	c, err := client.New(client.Options{URL: d.URL, Key: key})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// reply is an HTTP answer, read to its end.
type reply struct {
	status int
	header http.Header
	body   []byte
}

func (r reply) into(t testing.TB, v any) {
	t.Helper()
	if err := json.Unmarshal(r.body, v); err != nil {
		t.Fatalf("the answer is not JSON: %v\n%.500s", err, r.body)
	}
}

// caller makes raw HTTP calls with one credential.
type caller struct {
	t   testing.TB
	url string
	key string
}

func (c caller) as(key string) caller { c.key = key; return c }

// do sends a request. A body that is no []byte is sent as JSON. header holds
// pairs of names and values.
func (c caller) do(method, path string, body any, header ...string) reply {
	c.t.Helper()
	var r io.Reader
	kind := ""
	switch b := body.(type) {
	case nil:
	case []byte:
		r, kind = bytes.NewReader(b), "application/octet-stream"
	default:
		enc, err := json.Marshal(b)
		if err != nil {
			c.t.Fatal(err)
		}
		r, kind = bytes.NewReader(enc), "application/json"
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, r)
	if err != nil {
		c.t.Fatal(err)
	}
	if kind != "" {
		req.Header.Set("Content-Type", kind)
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	return reply{resp.StatusCode, resp.Header, b}
}

// want is do with a status demanded, and the answer decoded into v.
func (c caller) want(status int, v any, method, path string, body any, header ...string) reply {
	c.t.Helper()
	r := c.do(method, path, body, header...)
	if r.status != status {
		c.t.Fatalf("%s %s: %d instead of %d: %.800s", method, path, r.status, status, r.body)
	}
	if v != nil {
		r.into(c.t, v)
	}
	return r
}

// refused demands a problem document of a status and a class.
func (c caller) refused(status int, class api.ErrorClass, method, path string, body any, header ...string) api.Problem {
	c.t.Helper()
	r := c.do(method, path, body, header...)
	var p api.Problem
	if r.status != status || r.header.Get("Content-Type") != "application/problem+json" {
		c.t.Errorf("%s %s: %d %s instead of %d with a problem: %.500s", method, path, r.status, r.header.Get("Content-Type"), status, r.body)
		return p
	}
	r.into(c.t, &p)
	if p.Class != class || p.Code == "" || p.Detail == "" || p.Status != status || !strings.HasSuffix(p.Type, p.Code) {
		c.t.Errorf("%s %s: the problem %s is not a whole one of class %s", method, path, r.body, class)
	}
	return p
}

// digest is the length and SHA-256 of what is read, as the generator writes it.
func digest(r io.Reader) (string, error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	return fmt.Sprintf("%d %s", n, hex.EncodeToString(h.Sum(nil))), err
}

// logDigest follows a session's log to its end and returns its digest and exit.
func logDigest(t testing.TB, s *client.Session) (string, *api.Exit) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	st := s.Follow(client.StreamOptions{})
	defer st.Close()
	h := sha256.New()
	n := 0
	for {
		e, err := st.Next(ctx)
		if err != nil {
			t.Errorf("session %s, at offset %d: %v", s.ID, n, err)
			return "", nil
		}
		switch e.Type {
		case api.EventStdout, api.EventStderr:
			h.Write(e.Data)
			n += len(e.Data)
		case api.EventGap, api.EventLost:
			t.Errorf("session %s: %s at offset %d: %s", s.ID, e.Type, e.Offset, e.Reason)
		case api.EventExit:
			return fmt.Sprintf("%d %s", n, hex.EncodeToString(h.Sum(nil))), e.Exit
		}
	}
}

// eventually polls until ok or the time is over.
func eventually(t testing.TB, what string, patience time.Duration, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("not within %v: %s", patience, what)
}

// load is the machine's load average, to judge a figure by.
func load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	f := strings.Fields(string(b))
	return strings.Join(f[:min(3, len(f))], " ")
}
