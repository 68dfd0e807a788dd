package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"cloche.dev/cloche/api"
)

// fake is a daemon that has no machines: what runs "in" it is one of a few
// words. It answers just enough for the program's own behaviour to be seen.
type fake struct {
	srv *httptest.Server

	mu        sync.Mutex
	sandboxes []api.Sandbox
	sessions  map[string]*fakeSession
	files     map[string][]byte
	requests  int
	snapshots []api.Snapshot // newest first
	quotas    api.Quotas
	profiles  []api.EgressProfile
	secrets   []api.Secret
	values    map[string]string // of secrets
}

type fakeSession struct {
	api.Session
	mu      sync.Mutex
	changed *sync.Cond
	input   []byte
	closed  bool
	signals []api.SignalName
	size    api.WindowSize
}

func newFake() *fake {
	f := &fake{sessions: map[string]*fakeSession{}, files: map[string][]byte{}, values: map[string]string{}}
	mux := http.NewServeMux()
	box := "/v1/sandboxes/{sandbox}"
	for pattern, h := range map[string]http.HandlerFunc{
		"GET /v1/version":                            f.version,
		"GET /v1/sandboxes":                          f.list,
		"POST /v1/sandboxes":                         f.create,
		"GET " + box:                                 f.get,
		"DELETE " + box:                              f.remove,
		"GET /v1/operations/{op}":                    f.operation,
		"GET /v1/templates/{template}":               f.template,
		"GET " + box + "/sessions":                   f.listSessions,
		"POST " + box + "/sessions":                  f.createSession,
		"POST " + box + "/sessions/{session}/attach": f.attach,
		"GET " + box + "/sessions/{session}/attach":  f.attach,
		"POST " + box + "/sessions/{session}/stdin":  f.stdin,
		"POST " + box + "/sessions/{session}/signal": f.signal,
		"POST " + box + "/sessions/{session}/resize": f.resize,
		"GET " + box + "/files/stat":                 f.stat,
		"GET " + box + "/files":                      f.read,
		"PUT " + box + "/files":                      f.write,
	} {
		mux.HandleFunc(pattern, h)
	}
	f.lifecycle(mux)
	f.srv = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "Bearer wrong" || r.Header.Get("Authorization") == "" {
			problem(w, 401, api.ClassDenied, "no_key", "the key is not known", "")
			return
		}
		mux.ServeHTTP(w, r)
	}))
	return f
}

func (f *fake) url() string { return f.srv.URL }

func (f *fake) close() {
	f.srv.CloseClientConnections()
	f.srv.Close()
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func problem(w http.ResponseWriter, status int, class api.ErrorClass, code, detail, hint string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(api.Problem{Class: class, Code: code, Detail: detail, Hint: hint, Status: status})
}

const idTail = "aaaaaaaaaaaaaaaaaaa" // 19 of an id's 20 characters

func (f *fake) version(w http.ResponseWriter, _ *http.Request) {
	reply(w, 200, api.Version{Version: "v9", Api: "v1", Driver: "fake"})
}

func (f *fake) list(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := api.SandboxList{Items: []api.Sandbox{}}
	for _, s := range f.sandboxes {
		match := true
		for _, want := range r.URL.Query()["label"] {
			k, v, _ := strings.Cut(want, "=")
			match = match && s.Labels[k] == v
		}
		if match {
			l.Items = append(l.Items, s)
		}
	}
	reply(w, 200, l)
}

func (f *fake) create(w http.ResponseWriter, r *http.Request) {
	var req api.CreateSandboxRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	switch req.Template {
	case "none":
		problem(w, 404, api.ClassNotFound, "template_not_found", "there is no template none", "`cloche template ls` lists them")
		return
	case "full":
		problem(w, 429, api.ClassQuota, "quota", "the project has as many sandboxes as it may", "delete one")
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s := api.Sandbox{
		Id: fmt.Sprintf("sbx_%c%s", 'b'+len(f.sandboxes), idTail), Template: req.Template, Digest: "sha256:" + strings.Repeat("0", 64),
		State: api.SandboxRunning, Source: req.Snapshot, Driver: req.Driver, Egress: req.Egress, Policy: policyOf(req.Policy), Labels: req.Labels, Env: req.Env, CreatedAt: time.Now(),
		Resources: api.Resources{MilliCpu: max(2000, req.Resources.MilliCpu), MemoryMib: max(1024, req.Resources.MemoryMib), DiskMib: 8192},
	}
	f.sandboxes = append(f.sandboxes, s)
	op := api.Operation{Id: "op_" + s.Id[4:], State: api.OperationRunning, Sandbox: s.Id}
	if req.Template == "broken" {
		op.Id = "op_broken"
	}
	reply(w, 202, api.AcceptedSandbox{Sandbox: s, Operation: op})
}

func (f *fake) find(w http.ResponseWriter, r *http.Request) (api.Sandbox, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.sandboxes {
		if s.Id == r.PathValue("sandbox") {
			return s, true
		}
	}
	problem(w, 404, api.ClassNotFound, "sandbox_not_found", "there is no such sandbox", "")
	return api.Sandbox{}, false
}

func (f *fake) get(w http.ResponseWriter, r *http.Request) {
	if s, ok := f.find(w, r); ok {
		reply(w, 200, s)
	}
}

func (f *fake) remove(w http.ResponseWriter, r *http.Request) {
	s, ok := f.find(w, r)
	if !ok {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.sandboxes {
		if f.sandboxes[i].Id == s.Id {
			f.sandboxes[i].State = api.SandboxDeleted
		}
	}
	reply(w, 202, api.Operation{Id: "op_" + s.Id[4:], State: api.OperationRunning})
}

func (f *fake) operation(w http.ResponseWriter, r *http.Request) {
	op := api.Operation{Id: r.PathValue("op"), State: api.OperationSucceeded, EndedAt: time.Now()}
	if op.Id == "op_broken" {
		op.State, op.Error = api.OperationFailed, &api.ErrorBody{Class: api.ClassInternal, Code: "create_failed", Message: "the agent never said hello"}
	}
	reply(w, 200, op)
}

func (f *fake) template(w http.ResponseWriter, _ *http.Request) {
	reply(w, 200, api.Template{Config: api.RuntimeConfig{User: "user", Command: []string{"print", "from the template"}}})
}

func (f *fake) createSession(w http.ResponseWriter, r *http.Request) {
	if _, ok := f.find(w, r); !ok {
		return
	}
	var p api.ProcessSpec
	_ = json.NewDecoder(r.Body).Decode(&p)
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &fakeSession{Session: api.Session{
		Id: fmt.Sprintf("ses_%c%s", 'b'+len(f.sessions), idTail), Sandbox: r.PathValue("sandbox"), Args: p.Args, Env: p.Env, Stdin: p.Stdin, Tty: p.Tty,
		State: api.SessionCreated, CreatedAt: time.Now(),
	}}
	s.changed = sync.NewCond(&s.mu)
	if p.Tty != nil {
		s.size = *p.Tty
	}
	f.sessions[s.Id] = s
	reply(w, 201, api.CreatedSession{Session: s.Session, Token: "cst_x"})
}

func (f *fake) session(r *http.Request) *fakeSession {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sessions[r.PathValue("session")]
}

func (f *fake) listSessions(w http.ResponseWriter, _ *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := api.SessionList{Items: []api.Session{}}
	for _, s := range f.sessions {
		l.Items = append(l.Items, s.Session)
	}
	reply(w, 200, l)
}

// frames writes a session's log from an offset on.
type frames struct {
	w      http.ResponseWriter
	from   int64
	offset int64
}

func (o *frames) raw(kind byte, offset int64, b []byte) {
	head := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64([]byte{kind}, uint64(offset)), uint32(len(b)))
	_, _ = o.w.Write(append(head, b...))
	o.w.(http.Flusher).Flush()
}

func (o *frames) output(kind byte, s string) {
	b, at := []byte(s), o.offset
	o.offset += int64(len(b))
	if skip := o.from - at; skip > 0 {
		b, at = b[min(skip, int64(len(b))):], o.from
	}
	if len(b) > 0 {
		o.raw(kind, at, b)
	}
}

func (o *frames) event(kind byte, e api.StreamEvent) {
	b, _ := json.Marshal(e)
	o.raw(kind, o.offset, b)
}

func (o *frames) exit(code int) {
	o.event(4, api.StreamEvent{Exit: &api.Exit{Code: code, Reason: "exited"}})
}

// attach "runs" a session's command.
func (f *fake) attach(w http.ResponseWriter, r *http.Request) {
	s := f.session(r)
	if strings.HasPrefix(r.Header.Get("Accept"), "application/json") {
		reply(w, 200, s.Session)
		return
	}
	from, _ := strconv.ParseInt(r.URL.Query().Get("offset"), 10, 64)
	o := &frames{w: w, from: from}
	o.event(3, api.StreamEvent{At: time.Now()})
	arg := ""
	if len(s.Args) > 1 {
		arg = strings.Join(s.Args[1:], " ")
	}
	switch s.Args[0] {
	case "print":
		o.output(1, arg+"\n")
		o.exit(0)
	case "fail":
		code, _ := strconv.Atoi(arg)
		o.output(2, "failing\n")
		o.exit(code)
	case "cut": // the connection goes away in the middle of the output
		f.mu.Lock()
		f.requests++
		first := f.requests == 1
		f.mu.Unlock()
		o.output(1, "before ")
		if first {
			panic(http.ErrAbortHandler)
		}
		o.output(1, "after\n")
		o.exit(0)
	case "gap":
		o.raw(5, 0, []byte(`{"to":100,"reason":"quota"}`))
		o.offset = 100
		o.output(1, "rest\n")
		o.exit(0)
	case "lose":
		o.event(6, api.StreamEvent{Reason: "the machine was killed"})
	case "missing":
		o.event(4, api.StreamEvent{Exit: &api.Exit{Code: 127, Reason: "start_failed", Message: "missing: command not found"}})
	case "spew":
		for range 10_000 {
			o.output(1, strings.Repeat("y\n", 1000))
		}
		o.exit(0)
	case "cat", "signal", "size":
		s.interact(r, o)
	}
}

// interact echoes input, or waits for a signal or a size.
func (s *fakeSession) interact(r *http.Request, o *frames) {
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-r.Context().Done():
			s.changed.Broadcast()
		case <-stop:
		}
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	said := 0
	for r.Context().Err() == nil {
		switch {
		case s.Args[0] == "signal" && len(s.signals) > 0:
			o.output(1, "got "+string(s.signals[0])+"\n")
			o.exit(9)
			return
		case s.Args[0] == "size" && s.size.Cols != s.Tty.Cols:
			o.output(1, fmt.Sprintf("%dx%d\r\n", s.size.Rows, s.size.Cols))
			o.exit(0)
			return
		case s.Args[0] == "cat" && said < len(s.input):
			o.output(1, string(s.input[said:]))
			said = len(s.input)
			if bytes.Contains(s.input, []byte{3}) { // Ctrl-C came as a key
				o.exit(42)
				return
			}
			continue
		case s.Args[0] == "cat" && s.closed:
			o.exit(0)
			return
		}
		s.changed.Wait()
	}
}

func (s *fakeSession) change(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
	s.changed.Broadcast()
}

func (f *fake) stdin(w http.ResponseWriter, r *http.Request) {
	s := f.session(r)
	b, _ := io.ReadAll(r.Body)
	offset, _ := strconv.Atoi(r.URL.Query().Get("offset"))
	var st api.StdinState
	s.change(func() {
		if skip := len(s.input) - offset; skip >= 0 && skip <= len(b) {
			s.input = append(s.input, b[skip:]...)
		}
		s.closed = s.closed || r.URL.Query().Get("close") == "true"
		st = api.StdinState{Accepted: int64(len(s.input)), Closed: s.closed}
	})
	reply(w, 200, st)
}

func (f *fake) signal(w http.ResponseWriter, r *http.Request) {
	var req api.SignalRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	s := f.session(r)
	s.change(func() { s.signals = append(s.signals, req.Signal) })
	w.WriteHeader(204)
}

func (f *fake) resize(w http.ResponseWriter, r *http.Request) {
	s := f.session(r)
	s.change(func() { _ = json.NewDecoder(r.Body).Decode(&s.size) })
	w.WriteHeader(204)
}

func (f *fake) stat(w http.ResponseWriter, r *http.Request) {
	p := r.URL.Query().Get("path")
	f.mu.Lock()
	b, ok := f.files[p]
	f.mu.Unlock()
	switch {
	case ok:
		reply(w, 200, api.FileInfo{Name: path.Base(p), Type: api.TypeFile, Size: int64(len(b)), Mode: "0644"})
	case p == "/tmp":
		reply(w, 200, api.FileInfo{Name: "tmp", Type: api.TypeDir, Mode: "1777"})
	default:
		problem(w, 404, api.ClassNotFound, "no_such_file", "there is no "+p, "")
	}
}

func (f *fake) read(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, _ = w.Write(f.files[r.URL.Query().Get("path")])
}

func (f *fake) write(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.files[r.URL.Query().Get("path")] = b
	reply(w, 200, api.FileWritten{Written: int64(len(b))})
}
