package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/test/harness"
)

// life is one sandbox that the parts of TestAPI share.
type life struct {
	caller
	d   *harness.Daemon
	box string
}

func (l life) path(rest string) string { return "/v1/sandboxes/" + l.box + rest }

// session makes a session and returns it with its token.
func (l life) session(spec api.ProcessSpec) (api.Session, string) {
	l.t.Helper()
	var made api.CreatedSession
	l.want(201, &made, "POST", l.path("/sessions"), spec)
	return made.Session, made.Token
}

// TestAPI goes through a sandbox's whole life over HTTP, as the contract
// documents it.
func TestAPI(t *testing.T) {
	d := harness.Start(t)
	l := life{caller: caller{t: t, url: d.URL, key: d.Key}, d: d}
	t.Run("create", func(t *testing.T) { l.t = t; l.box = apiCreate(t, l) })
	if t.Failed() {
		return
	}
	for _, c := range []struct {
		name string
		run  func(*testing.T, life)
	}{
		{"refusals", apiRefusals},
		{"roles", apiRoles},
		{"session token", apiToken},
		{"stream", apiStream},
		{"exec", apiExec},
		{"files", apiFiles},
		{"archive", apiArchive},
		{"tunnel", apiTunnel},
		{"pty", apiPty},
		{"templates", apiTemplates},
		{"TTL", apiTTL},
		{"delete", apiDelete},
	} {
		t.Run(c.name, func(t *testing.T) { l.t = t; c.run(t, l) })
	}
}

func apiCreate(t *testing.T, l life) string {
	l.want(200, nil, "GET", "/healthz", nil)
	req := map[string]any{"template": "base", "labels": map[string]string{"a": "1", "b": "x"}, "env": map[string]string{"FROM": "sandbox"}, "resources": map[string]int{"memory_mib": 512}}
	var first, again api.AcceptedSandbox
	r := l.want(202, &first, "POST", "/v1/sandboxes", req, "Idempotency-Key", "one")
	if loc := r.header.Get("Location"); loc != "/v1/operations/"+first.Operation.Id {
		t.Errorf("Location: %q", loc)
	}
	l.want(202, &again, "POST", "/v1/sandboxes", req, "Idempotency-Key", "one")
	if again.Sandbox.Id != first.Sandbox.Id || again.Operation.Id != first.Operation.Id {
		t.Errorf("the replay made another: %+v, %+v", first, again)
	}
	l.refused(409, api.ClassConflict, "POST", "/v1/sandboxes", map[string]any{"template": "base"}, "Idempotency-Key", "one")
	var op api.Operation
	l.want(200, &op, "GET", "/v1/operations/"+first.Operation.Id+"?wait_seconds=60", nil)
	if op.State != api.OperationSucceeded || op.Verb != "create" || op.Key == "" {
		t.Fatalf("the operation: %+v", op)
	}
	var s api.Sandbox
	l.want(200, &s, "GET", "/v1/sandboxes/"+first.Sandbox.Id, nil)
	if s.State != api.SandboxRunning || !strings.HasPrefix(s.Digest, "sha256:") || s.Resources.MemoryMib != 512 || s.Driver != "gvisor" {
		t.Errorf("the sandbox: %+v", s)
	}
	for query, n := range map[string]int{"": 1, "?label=a%3D1&label=b%3Dx": 1, "?label=a%3D2": 0, "?state=running": 1, "?state=failed": 0, "?limit=1": 1} {
		var list api.SandboxList
		if l.want(200, &list, "GET", "/v1/sandboxes"+query, nil); len(list.Items) != n {
			t.Errorf("list %q: %d rows instead of %d", query, len(list.Items), n)
		}
	}
	id := s.Id
	s = api.Sandbox{}
	l.want(200, &s, "PATCH", "/v1/sandboxes/"+id, map[string]any{"labels": map[string]string{"c": "3"}, "ttl_seconds": 3600})
	if len(s.Labels) != 1 || s.Labels["c"] != "3" || s.ExpiresAt.IsZero() {
		t.Errorf("after the change: %+v", s)
	}
	var cleared api.Sandbox
	l.want(200, &cleared, "PATCH", "/v1/sandboxes/"+s.Id, map[string]any{"ttl_seconds": nil})
	if !cleared.ExpiresAt.IsZero() {
		t.Errorf("the TTL was not cleared: %+v", cleared)
	}
	return s.Id
}

func apiRefusals(t *testing.T, l life) {
	l.as("").refused(401, api.ClassDenied, "GET", "/v1/sandboxes", nil)
	l.as("cloche_nonsense").refused(401, api.ClassDenied, "GET", "/v1/sandboxes", nil)
	l.refused(404, api.ClassNotFound, "GET", "/v1/sandboxes/sbx_aaaaaaaaaaaaaaaaaaaa", nil)
	l.refused(400, api.ClassInvalid, "GET", "/v1/sandboxes/nonsense", nil)
	l.refused(400, api.ClassInvalid, "GET", "/v1/sandboxes?nonsense=1", nil)
	l.refused(400, api.ClassInvalid, "POST", "/v1/sandboxes", map[string]any{"template": "base", "nonsense": 1})
	l.refused(400, api.ClassInvalid, "POST", "/v1/sandboxes", map[string]any{"template": "base", "resources": map[string]int{"memory_mib": 1}})
	l.refused(404, api.ClassNotFound, "POST", "/v1/sandboxes", map[string]any{"template": "no-such"})
	l.refused(415, api.ClassInvalid, "POST", "/v1/sandboxes", []byte(`{"template":"base"}`))
	l.refused(413, api.ClassInvalid, "POST", "/v1/sandboxes", map[string]any{"template": strings.Repeat("x", 2<<20)})
	l.refused(404, api.ClassNotFound, "GET", "/v1/no/such/path", nil)
}

func (l life) newKey(role api.Role) string {
	var k api.CreatedKey
	l.want(201, &k, "POST", "/v1/keys", api.CreateKeyRequest{Name: "t-" + string(role), Role: role})
	return k.Secret
}

func apiRoles(t *testing.T, l life) {
	read, project := l.as(l.newKey(api.RoleRead)), l.as(l.newKey(api.RoleProject))
	ses, _ := l.session(api.ProcessSpec{Args: []string{"env"}, Env: api.Env{"SECRET": "hidden"}})
	var s api.Sandbox
	if r := read.want(200, &s, "GET", l.path(""), nil); len(s.Env) != 0 || bytes.Contains(r.body, []byte("FROM")) {
		t.Errorf("a read key sees the environment: %s", r.body)
	}
	if r := read.want(200, nil, "GET", l.path("/sessions/")+ses.Id, nil); bytes.Contains(r.body, []byte("hidden")) {
		t.Errorf("a read key sees a session's environment: %s", r.body)
	}
	for _, c := range []struct {
		method, path string
		body         any
	}{
		{"POST", l.path("/sessions/" + ses.Id + "/attach"), nil},
		{"GET", l.path("/sessions/" + ses.Id + "/attach"), nil},
		{"POST", l.path("/exec"), api.ExecRequest{Args: []string{"id"}}},
		{"POST", l.path("/sessions"), api.ProcessSpec{Args: []string{"id"}}},
		{"GET", l.path("/files?path=/etc/passwd"), nil},
		{"GET", l.path("/files/archive?path=/etc"), nil},
		{"PUT", l.path("/files?path=/tmp/x"), []byte("x")},
		{"DELETE", l.path(""), nil},
		{"POST", "/v1/sandboxes", map[string]any{"template": "base"}},
		{"POST", "/v1/keys", api.CreateKeyRequest{Name: "x", Role: api.RoleAdmin}},
	} {
		read.refused(403, api.ClassDenied, c.method, c.path, c.body)
	}
	project.refused(403, api.ClassDenied, "POST", "/v1/keys", api.CreateKeyRequest{Name: "x", Role: api.RoleRead})
	project.refused(403, api.ClassDenied, "POST", "/v1/template-builds", map[string]any{"debian": map[string]any{}})
	project.want(200, nil, "POST", l.path("/exec"), api.ExecRequest{Args: []string{"true"}})
}

func apiToken(t *testing.T, l life) {
	ses, token := l.session(api.ProcessSpec{Args: []string{"echo", "mine"}})
	other, _ := l.session(api.ProcessSpec{Args: []string{"echo", "not mine"}})
	with := l.as(token)
	with.want(200, nil, "GET", l.path("/sessions/"+ses.Id), nil)
	for _, c := range [][2]string{{"GET", "/sessions/" + other.Id}, {"POST", "/sessions/" + other.Id + "/attach"}, {"GET", "/sessions"}, {"GET", ""}, {"GET", "/files?path=/etc/passwd"}} {
		if r := with.do(c[0], l.path(c[1]), nil); r.status != 401 && r.status != 403 && r.status != 404 {
			t.Errorf("a session's token may %s %s: %d", c[0], c[1], r.status)
		}
	}
	if r := with.want(200, nil, "POST", l.path("/sessions/"+ses.Id+"/attach"), nil, "Accept", "text/event-stream"); !bytes.Contains(r.body, []byte(base64.StdEncoding.EncodeToString([]byte("mine\n")))) {
		t.Errorf("the stream: %s", r.body)
	}
	var files, ports api.AccessToken
	l.want(201, &files, "POST", l.path("/tokens"), api.CreateAccessTokenRequest{Purpose: api.PurposeFiles, TtlSeconds: 60})
	l.want(201, &ports, "POST", l.path("/tokens"), api.CreateAccessTokenRequest{Purpose: api.PurposePorts, TtlSeconds: 60})
	l.as(files.Token).want(200, nil, "GET", l.path("/files?path=/etc/passwd"), nil)
	for _, tok := range []string{ports.Token, token} {
		if r := l.as(tok).do("GET", l.path("/files?path=/etc/passwd"), nil); r.status != 403 && r.status != 401 {
			t.Errorf("another purpose's token reads files: %d", r.status)
		}
	}
}

// events parses a whole event stream.
func events(t *testing.T, body []byte) (ids []string, out []api.StreamEvent) {
	t.Helper()
	for block := range strings.SplitSeq(string(body), "\n\n") {
		var e api.StreamEvent
		id := ""
		for l := range strings.SplitSeq(block, "\n") {
			if v, ok := strings.CutPrefix(l, "id: "); ok {
				id = v
			}
			if v, ok := strings.CutPrefix(l, "data: "); ok {
				if err := json.Unmarshal([]byte(v), &e); err != nil {
					t.Errorf("%q: %v", v, err)
				}
			}
		}
		if e.Type != "" && e.Type != api.EventHeartbeat {
			ids, out = append(ids, id), append(out, e)
		}
	}
	return ids, out
}

func apiStream(t *testing.T, l life) {
	odd := "\x01\xff\xfe\x80\r\n\x1b[31m"
	ses, _ := l.session(api.ProcessSpec{Args: []string{"python3", "-c", "import os,time,sys\nos.write(1, sys.argv[1].encode('latin1'))\ntime.sleep(.3)\nos.write(2, b'err')\ntime.sleep(.3)\nos.write(1, b'end')\nsys.exit(11)", latin1(odd)}})
	at := l.path("/sessions/" + ses.Id + "/attach")
	var got api.Session
	if l.want(200, &got, "GET", l.path("/sessions/"+ses.Id), nil); got.State != api.SessionCreated {
		t.Errorf("a session that was not attached is %s", got.State)
	}
	r := l.want(200, nil, "POST", at, nil, "Accept", "text/event-stream")
	ids, all := events(t, r.body)
	var stdout, stderr []byte
	for _, e := range all {
		switch e.Type {
		case api.EventStdout:
			stdout = append(stdout, e.Data...)
		case api.EventStderr:
			stderr = append(stderr, e.Data...)
		}
	}
	if string(stdout) != odd+"end" || string(stderr) != "err" {
		t.Errorf("stdout %q, stderr %q", stdout, stderr)
	}
	if n := len(all); n < 4 || all[0].Type != api.EventStarted || all[n-1].Type != api.EventExit || all[n-1].Exit.Code != 11 {
		t.Fatalf("events: %+v", all)
	}
	// From each id on the rest comes, and nothing twice.
	for i, id := range ids {
		if all[i].Type != api.EventStdout && all[i].Type != api.EventStderr {
			continue
		}
		_, rest := events(t, l.want(200, nil, "GET", at, nil, "Accept", "text/event-stream", "Last-Event-ID", id).body)
		var a, b []byte
		for _, e := range rest {
			b = append(b, e.Data...)
		}
		for _, e := range all[i+1:] {
			a = append(a, e.Data...)
		}
		if !bytes.Equal(a, b) || rest[len(rest)-1].Type != api.EventExit {
			t.Errorf("from id %s: %q instead of %q", id, b, a)
		}
	}
	l.refused(406, api.ClassInvalid, "GET", at, nil, "Accept", "image/png")
	in, _ := l.session(api.ProcessSpec{Args: []string{"cat"}, Stdin: true})
	l.want(200, nil, "POST", l.path("/sessions/"+in.Id+"/attach"), nil, "Accept", "application/json")
	var state api.StdinState
	l.want(200, &state, "POST", l.path("/sessions/"+in.Id+"/stdin?offset=0"), []byte("abc"))
	l.want(200, &state, "POST", l.path("/sessions/"+in.Id+"/stdin?offset=0"), []byte("abcdef"))
	l.want(200, &state, "POST", l.path("/sessions/"+in.Id+"/stdin?offset=6&close=true"), []byte("g"))
	if state.Accepted != 7 || !state.Closed {
		t.Errorf("stdin: %+v", state)
	}
	_, all = events(t, l.want(200, nil, "GET", l.path("/sessions/"+in.Id+"/attach"), nil, "Accept", "text/event-stream").body)
	stdout = nil
	for _, e := range all {
		stdout = append(stdout, e.Data...)
	}
	if string(stdout) != "abcdefg" {
		t.Errorf("input that was repeated came out as %q", stdout)
	}
}

// latin1 makes text whose code points are the bytes of s.
func latin1(s string) string {
	r := make([]rune, 0, len(s))
	for i := range len(s) {
		r = append(r, rune(s[i]))
	}
	return string(r)
}

func apiExec(t *testing.T, l life) {
	var x api.ExecResult
	l.want(200, &x, "POST", l.path("/exec"), api.ExecRequest{Args: []string{"bash", "-c", "cat; echo $FROM $MORE >&2; exit 5"}, Stdin: []byte("\xffin"), Env: api.Env{"MORE": "2"}})
	if !x.Exited || x.Exit.Code != 5 || string(x.Stdout) != "\xffin" || string(x.Stderr) != "sandbox 2\n" {
		t.Errorf("exec: %+v", x)
	}
	begin := time.Now()
	l.want(200, &x, "POST", l.path("/exec"), map[string]any{"args": []string{"sleep", "20"}, "wait_seconds": 1})
	if x.Exited || time.Since(begin) > 10*time.Second {
		t.Errorf("exec with a bounded wait: %+v after %v", x, time.Since(begin))
	}
	l.want(204, nil, "POST", l.path("/sessions/"+x.Session+"/signal"), map[string]any{"signal": "SIGKILL"})
	l.want(200, &x, "POST", l.path("/exec"), map[string]any{"args": []string{"head", "-c", "100000", "/dev/zero"}, "max_output_bytes": 1000})
	if len(x.Stdout) != 1000 || !x.StdoutTruncated || x.StderrTruncated {
		t.Errorf("exec with bounded output: %d bytes, %v", len(x.Stdout), x.StdoutTruncated)
	}
	one := l.want(200, nil, "POST", l.path("/exec"), map[string]any{"args": []string{"bash", "-c", "echo $RANDOM$RANDOM$RANDOM"}}, "Idempotency-Key", "e")
	two := l.want(200, nil, "POST", l.path("/exec"), map[string]any{"args": []string{"bash", "-c", "echo $RANDOM$RANDOM$RANDOM"}}, "Idempotency-Key", "e")
	if !bytes.Equal(one.body, two.body) {
		t.Errorf("a repeated exec ran again: %s, %s", one.body, two.body)
	}
}

func apiTemplates(t *testing.T, l life) {
	var s api.Sandbox
	l.want(200, &s, "GET", l.path(""), nil)
	p := l.refused(409, api.ClassFailedPrecondition, "DELETE", "/v1/templates/"+s.Digest, nil)
	t.Logf("a template in use: %s %s", p.Code, p.Hint)
	var one, two api.Template
	l.want(201, &one, "POST", "/v1/templates?release=hand:1&user=guest&env=A%3Db", smallRoot(t), "Content-Type", "application/x-tar")
	l.want(201, &two, "POST", "/v1/templates?release=hand:2&user=guest&env=A%3Db", smallRoot(t), "Content-Type", "application/x-tar")
	if one.Digest != two.Digest || one.Config.User != "guest" {
		t.Errorf("the same tar twice: %s, %s", one.Digest, two.Digest)
	}
	var got api.Template
	if l.want(200, &got, "GET", "/v1/templates/hand:1", nil); len(got.Releases) != 2 {
		t.Errorf("releases: %+v", got)
	}
	l.want(204, nil, "DELETE", "/v1/releases/hand:2", nil)
	l.want(204, nil, "DELETE", "/v1/templates/"+one.Digest, nil)
	l.refused(404, api.ClassNotFound, "GET", "/v1/templates/hand:1", nil)
	l.refused(400, api.ClassInvalid, "POST", "/v1/templates", []byte("this is no tar, is it"), "Content-Type", "application/x-tar")
}

func apiTTL(t *testing.T, l life) {
	var a api.AcceptedSandbox
	l.want(202, &a, "POST", "/v1/sandboxes", map[string]any{"template": "base", "ttl_seconds": 4})
	begin := time.Now()
	eventually(t, "the TTL deletes the sandbox", 60*time.Second, func() bool {
		r := l.do("GET", "/v1/sandboxes/"+a.Sandbox.Id, nil)
		var s api.Sandbox
		if r.status == http.StatusNotFound {
			return true
		}
		_ = json.Unmarshal(r.body, &s)
		return s.State == api.SandboxDeleted
	})
	t.Logf("a TTL of 4 s deleted after %.1f s", time.Since(begin).Seconds())
	var ops api.OperationList
	l.want(200, &ops, "GET", "/v1/operations?sandbox="+a.Sandbox.Id, nil)
	if len(ops.Items) != 2 || ops.Items[0].Verb != "delete" || ops.Items[0].Key != "system" {
		t.Errorf("its operations: %+v", ops.Items)
	}
}

func apiDelete(t *testing.T, l life) {
	var op, again api.Operation
	l.want(202, &op, "DELETE", l.path(""), nil, "Idempotency-Key", "del")
	l.want(202, &again, "DELETE", l.path(""), nil, "Idempotency-Key", "del")
	if op.Id != again.Id {
		t.Errorf("the replay of a delete is another operation: %s, %s", op.Id, again.Id)
	}
	l.want(200, &op, "GET", "/v1/operations/"+op.Id+"?wait_seconds=60", nil)
	if op.State != api.OperationSucceeded {
		t.Errorf("the delete: %+v", op)
	}
	if r := l.do("POST", l.path("/exec"), api.ExecRequest{Args: []string{"true"}}); r.status != 404 && r.status != 409 {
		t.Errorf("exec in a deleted sandbox: %d %s", r.status, r.body)
	}
}
