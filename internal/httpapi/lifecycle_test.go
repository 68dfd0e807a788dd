package httpapi

import (
	"encoding/json"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

// TestVerbs: each call asks for its own verb, with its key.
func TestVerbs(t *testing.T) {
	b := newBench(t)
	path := "/v1/sandboxes/" + b.fake.sb.ID
	for call, want := range map[string]struct {
		verb  sandbox.Verb
		grace time.Duration
	}{
		"/pause": {sandbox.VerbPause, 0}, "/resume": {sandbox.VerbResume, 0}, "/suspend": {sandbox.VerbSuspend, 0}, "/restore": {sandbox.VerbRestore, 0},
		"/stop": {sandbox.VerbStop, 10 * time.Second}, "/stop?grace_seconds=0": {sandbox.VerbStop, 0}, "/start": {sandbox.VerbStart, 0},
		"/wake": {sandbox.VerbWake, 0},
	} {
		a := b.do("project", "POST", path+call, "", "", "Idempotency-Key", "k")
		var got api.AcceptedSandbox
		if err := json.Unmarshal(a.Body, &got); err != nil || a.Status != 202 || got.Sandbox.Id != b.fake.sb.ID || got.Operation.Id != b.fake.op.ID {
			t.Fatalf("%s: %d %v %s", call, a.Status, err, a.Body)
		}
		if b.fake.asked[0] != b.fake.sb.ID || b.fake.asked[1] != want.verb || b.fake.asked[2] != (control.VerbRequest{Grace: want.grace}) {
			t.Errorf("%s: %+v", call, b.fake.asked)
		}
		if b.fake.asked[3].(sandbox.Idempotency).Key != "k" || a.Header.Get("Location") != "/v1/operations/"+b.fake.op.ID {
			t.Errorf("%s: %+v %v", call, b.fake.asked, a.Header)
		}
	}
	for _, bad := range []string{"/stop?grace_seconds=601", "/stop?grace_seconds=-1", "/pause?grace_seconds=1"} {
		if a := b.do("project", "POST", path+bad, "", ""); a.Status != 400 {
			t.Errorf("%s: %d", bad, a.Status)
		}
	}
	if a := b.do("project", "POST", path+"/pause", "application/json", "{}"); a.Status != 400 {
		t.Errorf("a body of a call that has none: %d", a.Status)
	}
}

func TestSnapshotsAndForks(t *testing.T) {
	b := newBench(t)
	path := "/v1/sandboxes/" + b.fake.sb.ID
	b.do("project", "POST", path+"/snapshots", "application/json", `{}`)
	if got := b.fake.asked[1].(control.SnapshotRequest); got != (control.SnapshotRequest{Kind: sandbox.SnapshotMemory}) {
		t.Errorf("%+v", got)
	}
	b.do("project", "POST", path+"/snapshots", "application/json", `{"name":"a.b","kind":"disk","wait_seconds":300}`)
	if got := b.fake.asked[1].(control.SnapshotRequest); got != (control.SnapshotRequest{Name: "a.b", Kind: sandbox.SnapshotDisk, Wait: 5 * time.Minute}) {
		t.Errorf("%+v", got)
	}
	a := b.do("project", "POST", path+"/fork", "application/json", `{}`)
	if got := b.fake.asked[1].(control.ForkRequest); got.Count != 1 || got.Labels != nil || got.Env != nil {
		t.Errorf("%+v", got)
	}
	var forked api.Forked
	if err := json.Unmarshal(a.Body, &forked); err != nil || len(forked.Children) != 1 || forked.Children[0].Operation.Id == "" {
		t.Errorf("%v %s", err, a.Body)
	}
	b.do("project", "POST", path+"/fork", "application/json", `{"labels":{},"env":{"A":"1"},"count":20}`)
	if got := b.fake.asked[1].(control.ForkRequest); got.Count != 20 || got.Labels == nil || got.Env["A"] != "1" {
		t.Errorf("%+v", got)
	}
	for _, bad := range []string{`{"count":0}`, `{"count":21}`, `{"wait_seconds":301}`, `{"odd":1}`, `[]`} {
		if a := b.do("project", "POST", path+"/fork", "application/json", bad); a.Status != 400 {
			t.Errorf("%s: %d", bad, a.Status)
		}
	}
	for _, bad := range []string{`{"name":""}`, `{"name":"a b"}`, `{"kind":"both"}`, `{"name":"-x"}`} {
		if a := b.do("project", "POST", path+"/snapshots", "application/json", bad); a.Status != 400 {
			t.Errorf("%s: %d", bad, a.Status)
		}
	}
	var snap api.Snapshot
	a = b.do("read", "GET", "/v1/snapshots/"+b.fake.snap.ID, "", "")
	if err := json.Unmarshal(a.Body, &snap); err != nil || snap.Needs == nil || snap.Needs.Format != 1 || snap.SizeBytes != 5 || snap.TakenAt.IsZero() {
		t.Errorf("%v %s", err, a.Body)
	}
	b.do("read", "GET", "/v1/snapshots?sandbox="+b.fake.sb.ID, "", "")
	if f := b.fake.asked[0].(sandbox.SnapshotFilter); f.Sandbox != b.fake.sb.ID {
		t.Errorf("%+v", f)
	}
}

// TestPolicy: what a request names is told, and nothing else.
func TestPolicy(t *testing.T) {
	b := newBench(t)
	path := "/v1/sandboxes/" + b.fake.sb.ID
	patch := func(body string) control.PolicyPatch {
		t.Helper()
		b.fake.asked = nil
		if a := b.do("project", "PATCH", path, "application/json", `{"policy":`+body+`}`); a.Status != 200 {
			t.Fatalf("%s: %d %s", body, a.Status, a.Body)
		}
		return b.fake.asked[1].(control.PolicyPatch)
	}
	if got := patch(`{}`); got != (control.PolicyPatch{}) {
		t.Errorf("%+v", got)
	}
	got := patch(`{"wake_on_access":false,"checkpoint_seconds":0,"idle":{"after_seconds":10}}`)
	if got.WakeOnAccess == nil || *got.WakeOnAccess || got.Checkpoint == nil || *got.Checkpoint != 0 || *got.IdleAfter != 10*time.Second ||
		got.IdleAction != nil || got.OnCrash != nil || got.OnExpiry != nil {
		t.Errorf("%+v", got)
	}
	got = patch(`{"on_expiry":"stop","on_crash":"start","idle":{"action":"none"}}`)
	if *got.OnExpiry != sandbox.ReactStop || *got.OnCrash != sandbox.ReactStart || *got.IdleAction != sandbox.ReactNone || got.IdleAfter != nil {
		t.Errorf("%+v", got)
	}
	for _, bad := range []string{`{"idle":{"after_seconds":9}}`, `{"on_crash":"delete"}`, `{"on_expiry":"none"}`, `{"checkpoint_seconds":604801}`, `null`, `{"idle":{"action":"start"}}`} {
		if a := b.do("project", "PATCH", path, "application/json", `{"policy":`+bad+`}`); a.Status != 400 {
			t.Errorf("%s: %d", bad, a.Status)
		}
	}
	a := b.do("project", "POST", "/v1/sandboxes", "application/json", `{"snapshot":"`+b.fake.snap.ID+`","policy":{"wake_on_access":true}}`)
	req := b.fake.asked[0].(control.CreateRequest)
	if a.Status != 202 || req.Snapshot != b.fake.snap.ID || req.Template != "" || req.Policy.WakeOnAccess == nil || !*req.Policy.WakeOnAccess {
		t.Errorf("%d %+v", a.Status, req)
	}
}

// TestSandboxFacts: what the rows know is shown; what fences is not.
func TestSandboxFacts(t *testing.T) {
	b := newBench(t)
	a := b.do("read", "GET", "/v1/sandboxes/"+b.fake.sb.ID, "", "")
	var got api.Sandbox
	if err := json.Unmarshal(a.Body, &got); err != nil {
		t.Fatal(err)
	}
	if got.Epoch != 3 || got.Durability != api.DurabilitySnapshot || got.RecoveryPoint == nil || got.RecoveryPoint.Snapshot != b.fake.sb.Image ||
		got.RecoveryPoint.At.IsZero() || got.Policy.Idle.AfterSeconds != 6*3600 || got.Policy.CheckpointSeconds != 300 || got.TouchedAt.IsZero() {
		t.Errorf("%+v", got)
	}
	var raw map[string]any
	if err := json.Unmarshal(a.Body, &raw); err != nil || raw["generation"] != nil {
		t.Errorf("%v %v", err, raw)
	}
	b.fake.sb.Image, b.fake.sb.Driver = "", "other"
	a = b.do("read", "GET", "/v1/sandboxes/"+b.fake.sb.ID, "", "")
	got = api.Sandbox{}
	if err := json.Unmarshal(a.Body, &got); err != nil || got.RecoveryPoint != nil || got.Durability != "" {
		t.Errorf("%+v", got)
	}
}

func TestQuotasAndDrain(t *testing.T) {
	b := newBench(t)
	quotas := "/v1/projects/" + project + "/quotas"
	a := b.do("admin", "PUT", quotas, "application/json", `{"running":5,"disk_mib":1024}`)
	if b.fake.asked[0] != project || b.fake.asked[1] != (sandbox.Quotas{Running: 5, DiskMiB: 1024}) || a.Status != 200 {
		t.Errorf("%d %+v", a.Status, b.fake.asked)
	}
	for _, bad := range []string{`{"running":-1}`, `{"odd":1}`, ``} {
		if a := b.do("admin", "PUT", quotas, "application/json", bad); a.Status != 400 {
			t.Errorf("%s: %d", bad, a.Status)
		}
	}
	a = b.do("admin", "POST", "/v1/host/drain", "application/json", `{"within_seconds":90}`)
	var report api.DrainReport
	if err := json.Unmarshal(a.Body, &report); err != nil || report.Done == nil || report.Left[b.fake.sb.ID] == "" || b.fake.asked[0] != 90*time.Second {
		t.Errorf("%v %s", err, a.Body)
	}
	b.fake.err = sandbox.Errorf(sandbox.Quota, "quota_running", "the project has 5 running sandboxes").WithRetry(90 * time.Second)
	a = b.do("project", "POST", "/v1/sandboxes/"+b.fake.sb.ID+"/wake", "", "")
	if a.Status != 429 || a.Header.Get("Retry-After") != "90" {
		t.Errorf("%d %v", a.Status, a.Header)
	}
}
