package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"cloche.dev/cloche/api"
)

// lifecycle is the fake daemon's part for verbs, snapshots and events.
func (f *fake) lifecycle(mux *http.ServeMux) {
	box := "/v1/sandboxes/{sandbox}"
	for verb, to := range map[string]api.SandboxState{
		"pause": api.SandboxPaused, "resume": api.SandboxRunning, "suspend": api.SandboxSuspended, "restore": api.SandboxRunning,
		"stop": api.SandboxStopped, "start": api.SandboxRunning, "wake": api.SandboxRunning,
	} {
		mux.HandleFunc("POST "+box+"/"+verb, f.verb(verb, to))
	}
	for pattern, h := range map[string]http.HandlerFunc{
		"PATCH " + box:                 f.patch,
		"POST " + box + "/fork":        f.fork,
		"POST " + box + "/rollback":    f.rollback,
		"POST " + box + "/snapshots":   f.snap,
		"GET /v1/snapshots":            f.listSnaps,
		"GET /v1/snapshots/{id}":       f.oneSnap,
		"DELETE /v1/snapshots/{id}":    f.oneSnap,
		"GET /v1/events":               f.events,
		"GET /v1/usage":                f.usage,
		"PUT /v1/projects/{id}/quotas": f.setQuotas,
	} {
		mux.HandleFunc(pattern, h)
	}
	f.egress(mux)
}

func policyOf(r *api.PolicyRequest) api.Policy {
	p := api.Policy{Idle: api.IdlePolicy{AfterSeconds: 21600, Action: api.ReactSuspend}, OnExpiry: api.ReactDelete, OnCrash: api.ReactNone, CheckpointSeconds: 300}
	if r == nil {
		return p
	}
	if r.Idle.AfterSeconds != 0 {
		p.Idle.AfterSeconds = r.Idle.AfterSeconds
	}
	if r.Idle.Action != "" {
		p.Idle.Action = r.Idle.Action
	}
	if r.OnCrash != "" {
		p.OnCrash = r.OnCrash
	}
	if r.OnExpiry != "" {
		p.OnExpiry = r.OnExpiry
	}
	if r.WakeOnAccess != nil {
		p.WakeOnAccess = *r.WakeOnAccess
	}
	if r.CheckpointSeconds != nil {
		p.CheckpointSeconds = *r.CheckpointSeconds
	}
	return p
}

// change changes a sandbox and returns it.
func (f *fake) change(id string, do func(*api.Sandbox)) api.Sandbox {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.sandboxes {
		if f.sandboxes[i].Id == id {
			do(&f.sandboxes[i])
			return f.sandboxes[i]
		}
	}
	return api.Sandbox{}
}

func (f *fake) op(s api.Sandbox) api.Operation {
	return api.Operation{Id: "op_" + s.Id[4:], State: api.OperationRunning, Sandbox: s.Id}
}

func (f *fake) verb(verb string, to api.SandboxState) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s, ok := f.find(w, r)
		if !ok {
			return
		}
		if s.State == to {
			problem(w, 409, api.ClassFailedPrecondition, "wrong_state", fmt.Sprintf("a sandbox that is %s can't be asked to %s", s.State, verb), "")
			return
		}
		s = f.change(s.Id, func(s *api.Sandbox) {
			s.State = to
			if grace := r.URL.Query().Get("grace_seconds"); grace != "" {
				labels := map[string]string{"grace": grace}
				maps.Copy(labels, s.Labels)
				labels["grace"], s.Labels = grace, labels
			}
		})
		reply(w, 202, api.AcceptedSandbox{Sandbox: s, Operation: f.op(s)})
	}
}

func (f *fake) patch(w http.ResponseWriter, r *http.Request) {
	var req api.UpdateSandboxRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	if s, ok := f.find(w, r); ok {
		reply(w, 200, f.change(s.Id, func(s *api.Sandbox) { s.Policy = policyOf(req.Policy) }))
	}
}

func (f *fake) fork(w http.ResponseWriter, r *http.Request) {
	s, ok := f.find(w, r)
	if !ok {
		return
	}
	var req api.ForkRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	f.mu.Lock()
	defer f.mu.Unlock()
	answer := api.Forked{Operation: f.op(s)}
	for range req.Count {
		c := s
		c.Id, c.Parent = fmt.Sprintf("sbx_%c%s", 'b'+len(f.sandboxes), idTail), s.Id
		if req.Labels != nil {
			c.Labels = req.Labels
		}
		f.sandboxes = append(f.sandboxes, c)
		answer.Children = append(answer.Children, api.AcceptedSandbox{Sandbox: c, Operation: f.op(c)})
	}
	reply(w, 202, answer)
}

func (f *fake) rollback(w http.ResponseWriter, r *http.Request) {
	var req api.RollbackRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	if s, ok := f.find(w, r); ok {
		s = f.change(s.Id, func(s *api.Sandbox) {
			s.Base, s.RecoveryPoint = req.Snapshot, &api.RecoveryPoint{Snapshot: req.Snapshot, At: time.Now().Add(-5 * time.Minute)}
		})
		reply(w, 202, api.AcceptedSandbox{Sandbox: s, Operation: f.op(s)})
	}
}

func (f *fake) snap(w http.ResponseWriter, r *http.Request) {
	s, ok := f.find(w, r)
	if !ok {
		return
	}
	var req api.SnapshotRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	f.mu.Lock()
	snap := api.Snapshot{
		Id: fmt.Sprintf("snp_%c%s", 'b'+len(f.snapshots), idTail), Sandbox: s.Id, Name: req.Name, Kind: req.Kind, Purpose: "named", Parent: s.Base,
		State: api.SnapshotReady, Template: s.Template, Digest: s.Digest, SizeBytes: 3 << 20, CreatedAt: time.Now(),
	}
	f.snapshots = slices.Insert(f.snapshots, 0, snap)
	f.mu.Unlock()
	f.change(s.Id, func(s *api.Sandbox) { s.Base = snap.Id })
	reply(w, 202, api.AcceptedSnapshot{Snapshot: snap, Operation: f.op(s)})
}

func (f *fake) listSnaps(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := api.SnapshotList{Items: []api.Snapshot{}}
	for _, s := range f.snapshots {
		if of := r.URL.Query().Get("sandbox"); of == "" || of == s.Sandbox {
			l.Items = append(l.Items, s)
		}
	}
	reply(w, 200, l)
}

func (f *fake) oneSnap(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.snapshots, func(s api.Snapshot) bool { return s.Id == r.PathValue("id") })
	if i < 0 {
		problem(w, 404, api.ClassNotFound, "snapshot_not_found", "there is no such snapshot", "")
		return
	}
	s := f.snapshots[i]
	if r.Method == http.MethodDelete {
		f.snapshots = slices.Delete(f.snapshots, i, i+1)
		reply(w, 202, s)
		return
	}
	reply(w, 200, s)
}

func (f *fake) events(w http.ResponseWriter, r *http.Request) {
	one := api.Event{Seq: 7, Type: "sandbox.state", Sandbox: "sbx_b" + idTail, Data: json.RawMessage(`{"from":"running","to":"failed","end":{"reason":"oom"}}`)}
	two := api.Event{Seq: 8, Type: "template.release", Data: json.RawMessage(`{"name":"base:latest"}`)}
	if strings.HasPrefix(r.Header.Get("Accept"), "application/json") {
		l := api.EventList{Items: []api.Event{one, two}, NextAfter: 8}
		switch r.URL.Query().Get("after") {
		case "8":
			l.Items = nil
		case "3":
			l.Gap = &api.EventsGap{After: 3, Oldest: 7}
		}
		reply(w, 200, l)
		return
	}
	b, _ := json.Marshal(one)
	fmt.Fprintf(w, "retry: 1000\n\nevent: change\nid: 7\ndata: %s\n\n", b)
	fmt.Fprint(w, "event: error\nid: 7\ndata: {\"class\":\"denied\",\"code\":\"x\",\"message\":\"the key was revoked\"}\n\n")
}

func (f *fake) usage(w http.ResponseWriter, _ *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	reply(w, 200, api.ProjectUsage{Project: "prj_b" + idTail, Usage: api.Usage{Running: 3, MilliCpu: 1500, MemoryMib: 2048}, Quotas: f.quotas})
}

func (f *fake) setQuotas(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.quotas = api.Quotas{}
	_ = json.NewDecoder(r.Body).Decode(&f.quotas)
	reply(w, 200, api.Project{Id: r.PathValue("id"), Quotas: f.quotas})
}
