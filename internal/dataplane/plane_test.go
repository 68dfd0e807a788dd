package dataplane

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/httpapi/rest/resttest"
	"cloche.dev/cloche/internal/sandbox"
)

// req makes a request on the bench's sandbox with a project's key; what and
// value pairs of header follow.
func (b *bench) req(method, path string, body any, header ...string) *http.Request {
	b.t.Helper()
	var r io.Reader
	kind := ""
	switch v := body.(type) {
	case nil:
	case []byte:
		r, kind = bytes.NewReader(v), "application/octet-stream"
	case string:
		r, kind = strings.NewReader(v), "application/json"
	default:
		j, err := json.Marshal(v)
		if err != nil {
			b.t.Fatal(err)
		}
		r, kind = bytes.NewReader(j), "application/json"
	}
	q, err := http.NewRequest(method, b.url+"/v1/sandboxes/"+b.box+path, r)
	if err != nil {
		b.t.Fatal(err)
	}
	q.Header.Set("Authorization", "Bearer project")
	if kind != "" {
		q.Header.Set("Content-Type", kind)
	}
	for i := 0; i < len(header); i += 2 {
		q.Header.Set(header[i], header[i+1])
	}
	return q
}

// call wants a status and decodes JSON into v where it is not nil.
func (b *bench) call(want int, v any, method, path string, body any, header ...string) resttest.Answer {
	b.t.Helper()
	a := resttest.Do(b.t, b.client, b.req(method, path, body, header...))
	if a.Status != want {
		b.t.Fatalf("%s %s: %d, want %d: %s", method, path, a.Status, want, a.Body)
	}
	if v != nil {
		if err := json.Unmarshal(a.Body, v); err != nil {
			b.t.Fatal(err)
		}
	}
	return a
}

func (b *bench) session(stdin bool, args ...string) api.CreatedSession {
	b.t.Helper()
	var s api.CreatedSession
	b.call(201, &s, "POST", "/sessions", api.ProcessSpec{Args: args, Stdin: stdin})
	return s
}

func TestSessionLife(t *testing.T) {
	b := newBench(t)
	s := b.session(false, "both")
	path := "/sessions/" + s.Session.Id
	var got api.Session
	b.call(200, &got, "GET", path, nil)
	if got.State != api.SessionCreated || got.StartedAt.IsZero() == false {
		t.Fatalf("%+v", got)
	}
	// Attaching with JSON starts it; attaching again changes nothing.
	b.call(200, &got, "POST", path+"/attach", nil, "Accept", "application/json")
	b.call(200, &got, "POST", path+"/attach", nil, "Accept", "application/json")
	a := b.call(200, nil, "GET", path+"/attach", nil, "Accept", "text/event-stream")
	events := parseSSE(t, a.Body)
	var kinds []string
	for _, e := range events {
		kinds = append(kinds, e.kind)
	}
	if strings.Join(kinds, " ") != "started stdout stderr exit" {
		t.Fatalf("%v", kinds)
	}
	if string(events[1].data.Data) != "to stdout\n" || string(events[2].data.Data) != "to stderr\n" || events[3].data.Exit.Code != 3 {
		t.Fatalf("%+v", events)
	}
	if events[1].id != "10" || events[2].id != "20" || events[2].data.Offset != 10 {
		t.Fatalf("%+v", events)
	}
	// Last-Event-ID wins over offset.
	a = b.call(200, nil, "GET", path+"/attach?offset=0", nil, "Last-Event-ID", "10")
	if events = parseSSE(t, a.Body); len(events) != 2 || events[0].kind != "stderr" || events[1].kind != "exit" {
		t.Fatalf("%+v", events)
	}
	b.call(400, nil, "GET", path+"/attach?offset=9999", nil)
	b.call(400, nil, "GET", path+"/attach", nil, "Last-Event-ID", "x")
	b.call(406, nil, "GET", path+"/attach", nil, "Accept", "application/json")
	b.call(406, nil, "POST", path+"/attach", nil, "Accept", "image/png")
	b.call(200, &got, "GET", path, nil)
	if got.State != api.SessionExited || got.OffsetNext != 20 || got.Exit == nil || got.Exit.Code != 3 || got.EndedAt.IsZero() {
		t.Fatalf("%+v", got)
	}
	var list api.SessionList
	b.call(200, &list, "GET", "/sessions?limit=5", nil)
	if len(list.Items) != 1 {
		t.Fatalf("%+v", list)
	}
	b.call(409, nil, "POST", path+"/signal", `{"signal":"SIGTERM"}`)
	b.call(400, nil, "POST", path+"/signal", `{"signal":"SIGODD"}`)
	b.call(404, nil, "GET", "/sessions/"+sandbox.NewID(sandbox.KindSession), nil)
}

func TestSessionIsIdempotent(t *testing.T) {
	b := newBench(t)
	var one, two api.CreatedSession
	body := api.ProcessSpec{Args: []string{"both"}, Env: map[string]string{"B": "1", "A": "2"}}
	b.call(201, &one, "POST", "/sessions", body, "Idempotency-Key", "k1")
	b.call(201, &two, "POST", "/sessions", body, "Idempotency-Key", "k1")
	if one.Session.Id != two.Session.Id || one.Token != two.Token {
		t.Fatalf("%+v %+v", one, two)
	}
	if one.Session.Env["A"] != "2" {
		t.Fatalf("%+v", one.Session)
	}
}

func TestStdin(t *testing.T) {
	b := newBench(t)
	s := b.session(true, "cat")
	path := "/sessions/" + s.Session.Id
	b.call(409, nil, "POST", path+"/stdin", []byte("early"))
	b.call(200, nil, "POST", path+"/attach", nil, "Accept", "application/json")
	var st api.StdinState
	b.call(200, &st, "POST", path+"/stdin?offset=0", []byte("hello "))
	b.call(200, &st, "POST", path+"/stdin?offset=0", []byte("hello there")) // repeats six bytes
	if st.Accepted != 11 || st.Closed {
		t.Fatalf("%+v", st)
	}
	b.call(200, &st, "POST", path+"/stdin", []byte(" end")) // appends
	b.call(200, &st, "POST", path+"/stdin", nil)
	if st.Accepted != 15 {
		t.Fatalf("%+v", st)
	}
	if p := b.call(409, nil, "POST", path+"/stdin?offset=99", []byte("x")).Problem(t); p.Code != "stdin_gap" {
		t.Fatalf("%+v", p)
	}
	b.call(413, nil, "POST", path+"/stdin", make([]byte, maxStdin+1))
	big := bytes.Repeat([]byte("0123456789abcdef"), 20_000) // many pieces
	b.call(200, &st, "POST", path+"/stdin?close=true", big)
	if st.Accepted != 15+int64(len(big)) || !st.Closed {
		t.Fatalf("%+v", st)
	}
	a := b.call(200, nil, "POST", path+"/attach", nil, "Accept", octets)
	frames := parseFrames(t, a.Body)
	var got []byte
	for _, f := range frames {
		if f.kind == 1 {
			got = append(got, f.payload...)
		}
	}
	if want := "hello there end" + string(big); string(got) != want {
		t.Fatalf("%d bytes, want %d", len(got), len(want))
	}
	b.call(409, nil, "POST", path+"/stdin", []byte("late"))
}

func TestSignalAndResize(t *testing.T) {
	b := newBench(t)
	s := b.session(false, "hang")
	path := "/sessions/" + s.Session.Id
	b.call(200, nil, "POST", path+"/attach", nil, "Accept", "application/json")
	b.call(204, nil, "POST", path+"/resize", `{"rows":30,"cols":100}`)
	b.call(400, nil, "POST", path+"/resize", `{"rows":0,"cols":100}`)
	b.call(204, nil, "POST", path+"/signal", `{"signal":"SIGINT"}`)
	events := parseSSE(t, b.call(200, nil, "GET", path+"/attach", nil).Body)
	last := events[len(events)-1]
	if string(events[1].data.Data) != "30x100\n" || last.data.Exit == nil || last.data.Exit.Signal != 2 || last.data.Exit.Code != 130 {
		t.Fatalf("%+v", events)
	}
}

func TestExec(t *testing.T) {
	b := newBench(t)
	var r api.ExecResult
	b.call(200, &r, "POST", "/exec", api.ExecRequest{Args: []string{"both"}})
	if !r.Exited || r.Exit.Code != 3 || string(r.Stdout) != "to stdout\n" || string(r.Stderr) != "to stderr\n" || r.StdoutTruncated {
		t.Fatalf("%+v", r)
	}
	b.call(200, &r, "POST", "/exec", api.ExecRequest{Args: []string{"cat"}, Stdin: []byte{0, 255, 10, 128}})
	if !r.Exited || !bytes.Equal(r.Stdout, []byte{0, 255, 10, 128}) {
		t.Fatalf("%+v", r)
	}
	most, wait := 1000, 1
	r = api.ExecResult{}
	b.call(200, &r, "POST", "/exec", api.ExecRequest{Args: []string{"flood", "3000000"}, MaxOutputBytes: &most})
	if !r.Exited || len(r.Stdout) != most || !r.StdoutTruncated || r.StderrTruncated {
		t.Fatalf("%d bytes, %v %v", len(r.Stdout), r.StdoutTruncated, r.Exited)
	}
	r = api.ExecResult{}
	b.call(200, &r, "POST", "/exec", api.ExecRequest{Args: []string{"hang"}, WaitSeconds: &wait})
	if r.Exited || r.Exit != nil || r.Session == "" {
		t.Fatalf("%+v", r)
	}
	b.call(400, nil, "POST", "/exec", `{"args":[]}`)
	b.call(400, nil, "POST", "/exec", `{"args":["x"],"stdin":"%%%"}`)
	b.rows.boxes[b.box] = sandbox.Sandbox{ID: b.box, Project: b.project, State: sandbox.StatePaused}
	if p := b.call(409, nil, "POST", "/exec", api.ExecRequest{Args: []string{"both"}}).Problem(t); p.Code != "sandbox_not_running" {
		t.Fatalf("%+v", p)
	}
}

// TestScopes is the golden table of who may call what of the data half: 401,
// 403, or (+) past the guard.
func TestScopes(t *testing.T) {
	b := newBench(t)
	s := b.session(true, "cat")
	other := b.session(true, "cat")
	access := func(p auth.Purpose, box string, ttl time.Duration) string {
		return b.tokens.Access(auth.Access{Purpose: p, Project: b.project, Sandbox: box, Expires: time.Now().Add(ttl)})
	}
	who := []struct{ name, token string }{
		{"none", ""},
		{"bad", "nonsense"},
		{"read", "read"},
		{"project", "project"},
		{"admin", "admin"},
		{"session", s.Token},
		{"files", access(auth.PurposeFiles, b.box, time.Hour)},
		{"ports", access(auth.PurposePorts, b.box, time.Hour)},
		{"other session", other.Token},
		{"stale", b.tokens.Session(auth.Session{Project: b.project, Session: s.Session.Id, Generation: 2})},
		{"expired", access(auth.PurposeFiles, b.box, -time.Hour)},
		{"other box", access(auth.PurposeFiles, sandbox.NewID(sandbox.KindSandbox), time.Hour)},
	}
	const (
		meta, sessions, data = "401 401 + + + 403 403 403 403 403 403 403", "401 401 403 + + + 403 403 401 401 403 403", "401 401 403 + + 403 403 403 403 403 403 403"
		files, ports         = "401 401 403 + + 403 + 401 403 403 401 401", "401 401 403 + + 403 401 + 403 403 401 401"
	)
	want := map[string]string{
		"listSessions": meta, "getSession": "401 401 + + + + 403 403 401 401 403 403", "createSession": data, "execCommand": data,
		"followSession": sessions, "attachSession": sessions, "writeStdin": sessions, "signalSession": sessions, "resizeSession": sessions, "openPty": sessions,
		"readFile": files, "writeFile": files, "removeFile": files, "statFile": files, "listFiles": files, "makeDirectory": files, "moveFile": files,
		"readArchive": files, "writeArchive": files, "openTunnel": ports,
	}
	for _, op := range resttest.Operations(t) {
		row, ok := want[op.ID]
		if _, mine := scopes[op.ID]; mine != ok {
			t.Errorf("%s: in the table %v, in scopes %v", op.ID, ok, mine)
		}
		if !ok {
			continue
		}
		for i, status := range strings.Fields(row) {
			path := strings.NewReplacer("{sandbox}", b.box, "{session}", s.Session.Id, "{port}", "7").Replace(op.Path)
			// An unknown parameter is refused just behind the guard.
			r, _ := http.NewRequest(op.Method, b.url+path+"?nonsense=1", nil)
			if who[i].token != "" {
				r.Header.Set("Authorization", "Bearer "+who[i].token)
			}
			a := resttest.Do(t, b.client, r)
			got := map[int]string{401: "401", 403: "403", 400: "+"}[a.Status]
			if got != status {
				t.Errorf("%s by %s: %d, want %s", op.ID, who[i].name, a.Status, status)
			}
		}
	}
}

func TestOtherProjectsAreNotFound(t *testing.T) {
	b := newBench(t)
	s := b.session(false, "both")
	foreign := "Bearer project@" + sandbox.NewID(sandbox.KindProject)
	for _, path := range []string{"/sessions", "/sessions/" + s.Session.Id, "/sessions/" + s.Session.Id + "/attach", "/files?path=/a", "/files/list?path=/dir"} {
		b.call(404, nil, "GET", path, nil, "Authorization", foreign)
	}
	b.call(404, nil, "POST", "/exec", `{"args":["both"]}`, "Authorization", foreign)
}

func TestReadKeySeesNoEnvironment(t *testing.T) {
	b := newBench(t)
	var made api.CreatedSession
	b.call(201, &made, "POST", "/sessions", api.ProcessSpec{Args: []string{"both"}, Env: map[string]string{"SECRET": "x"}})
	a := b.call(200, nil, "GET", "/sessions/"+made.Session.Id, nil, "Authorization", "Bearer read")
	if strings.Contains(string(a.Body), "SECRET") {
		t.Errorf("%s", a.Body)
	}
}
