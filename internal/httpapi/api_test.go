package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/httpapi/rest/resttest"
	"cloche.dev/cloche/internal/sandbox"
)

// roles is a verifier whose keys are their roles, until all are revoked.
type roles struct{ revoked *atomic.Bool }

func (r roles) Verify(_ context.Context, key string) (sandbox.Caller, error) {
	if !sandbox.Role(key).Valid() || r.revoked != nil && r.revoked.Load() {
		return sandbox.Caller{}, sandbox.Errorf(sandbox.Denied, "unauthenticated", "no such key")
	}
	return sandbox.Caller{KeyID: "key_" + key, Project: project, Role: sandbox.Role(key)}, nil
}

type bench struct {
	t      *testing.T
	fake   *fake
	tokens *auth.Tokens
	url    string
	client *http.Client

	api     *API
	revoked atomic.Bool
	stop    context.CancelFunc // ends the daemon's streams
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{t: t, fake: newFake(), tokens: auth.NewTokens(make([]byte, 32))}
	router, err := rest.NewRouter(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	b.api = New(Options{
		Control: b.fake, Keys: roles{&b.revoked}, Tokens: b.tokens, Version: "v0", Driver: func() string { return "gvisor" },
		Durability: map[string]sandbox.Durability{"gvisor": sandbox.DurabilitySnapshot},
	})
	b.api.Register(router)
	srv := httptest.NewUnstartedServer(router)
	base, stop := context.WithCancel(context.Background())
	b.stop = stop
	srv.Config = NewServer(base, router, slog.New(slog.DiscardHandler))
	srv.Start()
	t.Cleanup(func() { stop(); srv.CloseClientConnections(); srv.Close() })
	b.url, b.client = srv.URL, srv.Client()
	return b
}

func (b *bench) do(key, method, path, contentType, body string, header ...string) resttest.Answer {
	b.t.Helper()
	r, err := http.NewRequest(method, b.url+path, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return resttest.Do(b.t, b.client, r)
}

// request is a good request of each operation of the control half.
type request struct {
	path, contentType, body string
	status                  int
}

func (b *bench) requests() map[string]request {
	const js = "application/json"
	sbx := "/v1/sandboxes/" + b.fake.sb.ID
	return map[string]request{
		"getHealth":         {"/healthz", "", "", 200},
		"getVersion":        {"/v1/version", "", "", 200},
		"listSandboxes":     {"/v1/sandboxes?limit=7&state=running&label=a=b&label=c=&page_token=abc", "", "", 200},
		"createSandbox":     {"/v1/sandboxes", js, `{"template":"base:latest","env":{"A":"1"},"labels":{"x/y":"z"},"resources":{"memory_mib":128},"ttl_seconds":60}`, 202},
		"getSandbox":        {sbx, "", "", 200},
		"updateSandbox":     {sbx, js, `{"ttl_seconds":null}`, 200},
		"deleteSandbox":     {sbx, "", "", 202},
		"pauseSandbox":      {sbx + "/pause", "", "", 202},
		"resumeSandbox":     {sbx + "/resume", "", "", 202},
		"suspendSandbox":    {sbx + "/suspend", "", "", 202},
		"restoreSandbox":    {sbx + "/restore", "", "", 202},
		"stopSandbox":       {sbx + "/stop?grace_seconds=0", "", "", 202},
		"startSandbox":      {sbx + "/start", "", "", 202},
		"wakeSandbox":       {sbx + "/wake", "", "", 202},
		"forkSandbox":       {sbx + "/fork", js, `{"count":3,"labels":{"a":"b"},"wait_seconds":5}`, 202},
		"rollbackSandbox":   {sbx + "/rollback", js, `{"snapshot":"` + b.fake.snap.ID + `"}`, 202},
		"takeSnapshot":      {sbx + "/snapshots", js, `{"name":"before","kind":"disk"}`, 202},
		"listSnapshots":     {"/v1/snapshots?sandbox=" + b.fake.sb.ID + "&limit=3", "", "", 200},
		"getSnapshot":       {"/v1/snapshots/" + b.fake.snap.ID, "", "", 200},
		"deleteSnapshot":    {"/v1/snapshots/" + b.fake.snap.ID, "", "", 202},
		"listEvents":        {"/v1/events?after=0&limit=5", "", "", 200},
		"getUsage":          {"/v1/usage", "", "", 200},
		"setQuotas":         {"/v1/projects/" + project + "/quotas", js, `{"running":5,"disk_mib":1024}`, 200},
		"drainHost":         {"/v1/host/drain", js, `{"within_seconds":60}`, 200},
		"createAccessToken": {sbx + "/tokens", js, `{"purpose":"files"}`, 201},
		"listOperations":    {"/v1/operations?sandbox=" + b.fake.sb.ID + "&state=failed", "", "", 200},
		"getOperation":      {"/v1/operations/" + b.fake.op.ID + "?wait_seconds=60", "", "", 200},
		"listTemplates":     {"/v1/templates", "", "", 200},
		"importTemplate":    {"/v1/templates?release=x/y:1&user=user&workdir=/w&env=A=1&env=B=a=b&command=sh&command=-c", "application/x-tar", "tar", 201},
		"getTemplate":       {"/v1/templates/team%2Fbase:latest", "", "", 200},
		"deleteTemplate":    {"/v1/templates/" + digest, "", "", 204},
		"buildTemplate":     {"/v1/template-builds", js, `{"debian":{"suite":"bookworm","packages":["git"],"users":[{"name":"user","sudo":true}]},"release":"base:latest"}`, 202},
		"putRelease":        {"/v1/releases/base:latest", js, `{"template":"` + digest + `"}`, 200},
		"deleteRelease":     {"/v1/releases/base:latest", "", "", 204},
		"listKeys":          {"/v1/keys", "", "", 200},
		"createKey":         {"/v1/keys", js, `{"name":"ci","role":"read"}`, 201},
		"revokeKey":         {"/v1/keys/" + b.fake.key.ID, "", "", 204},

		"setSandboxEgress":     {sbx + "/egress", js, `{"profile":"public"}`, 200},
		"listEgressProfiles":   {"/v1/egress/profiles", "", "", 200},
		"createEgressProfile":  {"/v1/egress/profiles", js, `{"name":"web",` + profileBody, 201},
		"getEgressProfile":     {"/v1/egress/profiles/web", "", "", 200},
		"replaceEgressProfile": {"/v1/egress/profiles/web", js, `{"version":4,` + profileBody, 200},
		"deleteEgressProfile":  {"/v1/egress/profiles/web", "", "", 204},
		"listEgressRecords": {
			"/v1/egress/audit?after=0&sandbox=" + b.fake.sb.ID + "&kind=http&verdict=denied&would_deny=true&since=2026-01-02T03:04:05Z&limit=7", "", "", 200,
		},
		"listSecrets":  {"/v1/secrets", "", "", 200},
		"createSecret": {"/v1/secrets", js, `{"name":"KEY","hosts":["api.example.com"],"value":"the value",` + sourceBody, 201},
		"getSecret":    {"/v1/secrets/KEY", "", "", 200},
		"rotateSecret": {"/v1/secrets/KEY", js, `{"value":"another","version":2}`, 200},
		"deleteSecret": {"/v1/secrets/KEY", "", "", 204},
	}
}

// TestRoles is the golden table of who may call what of the control half.
func TestRoles(t *testing.T) {
	b := newBench(t)
	requests := b.requests()
	const everyone, see, change, admin = "+ + + + +", "401 401 + + +", "401 401 403 + +", "401 401 403 403 +"
	want := map[string]string{
		"getHealth": everyone, "getVersion": see, "listSandboxes": see, "getSandbox": see, "listOperations": see, "getOperation": see,
		"listTemplates": see, "getTemplate": see, "createSandbox": change, "updateSandbox": change, "deleteSandbox": change,
		"createAccessToken": change, "importTemplate": change, "deleteTemplate": change, "putRelease": change, "deleteRelease": change,
		"pauseSandbox": change, "resumeSandbox": change, "suspendSandbox": change, "restoreSandbox": change, "stopSandbox": change,
		"startSandbox": change, "wakeSandbox": change, "forkSandbox": change, "rollbackSandbox": change, "takeSnapshot": change,
		"listSnapshots": see, "getSnapshot": see, "deleteSnapshot": change, "listEvents": see, "getUsage": see,
		"setQuotas": admin, "drainHost": admin,
		"setSandboxEgress": change, "listEgressProfiles": see, "getEgressProfile": see, "createEgressProfile": change, "replaceEgressProfile": change,
		"deleteEgressProfile": change, "listEgressRecords": change, "listSecrets": see, "getSecret": see, "createSecret": change,
		"rotateSecret": change, "deleteSecret": change,
		"buildTemplate": admin, "listKeys": admin, "createKey": admin, "revokeKey": admin,
	}
	for _, op := range resttest.Operations(t) {
		row, ok := want[op.ID]
		if _, mine := actions[op.ID]; (mine || op.ID == "getHealth") != ok {
			t.Errorf("%s: in the table %v, in actions %v", op.ID, ok, mine)
		}
		if !ok {
			continue
		}
		q := requests[op.ID]
		for i, status := range strings.Fields(row) {
			key := []string{"", "nonsense", "read", "project", "admin"}[i]
			a := b.do(key, op.Method, q.path, q.contentType, q.body, "Accept", "application/json")
			good := a.Status == q.status && status == "+" || status == map[int]string{401: "401", 403: "403"}[a.Status]
			if !good {
				t.Errorf("%s with key %q: %d, want %s: %s", op.ID, key, a.Status, status, a.Body)
			}
		}
	}
}

// TestEveryClassOfEveryOperation: whatever control refuses, the answer is
// documented.
func TestEveryClassOfEveryOperation(t *testing.T) {
	b := newBench(t)
	documented := map[sandbox.Class]bool{sandbox.Internal: true, sandbox.Unavailable: true, sandbox.NoCapacity: true, sandbox.Invalid: true, sandbox.Denied: true}
	for _, op := range resttest.Operations(t) {
		q, ok := b.requests()[op.ID]
		if !ok || op.ID == "getHealth" || op.ID == "getVersion" {
			continue
		}
		for class := range documented {
			b.fake.err = sandbox.Errorf(class, "x", "y")
			if a := b.do("admin", op.Method, q.path, q.contentType, q.body, "Accept", "application/json"); a.Status < 400 {
				t.Errorf("%s: %s answered %d", op.ID, class, a.Status)
			}
		}
	}
}

func TestTranslation(t *testing.T) {
	b := newBench(t)
	q := b.requests()
	call := func(method, op string) resttest.Answer {
		t.Helper()
		a := b.do("admin", method, q[op].path, q[op].contentType, q[op].body, "Idempotency-Key", "k")
		if a.Status != q[op].status {
			t.Fatalf("%s: %d %s", op, a.Status, a.Body)
		}
		return a
	}
	a := call("POST", "createSandbox")
	req, idem := b.fake.asked[0].(control.CreateRequest), b.fake.asked[1].(sandbox.Idempotency)
	if req.Template != "base:latest" || req.TTL != time.Minute || req.Resources.MemoryMiB != 128 || req.Resources.DiskMiB != 0 || req.Labels["x/y"] != "z" {
		t.Errorf("%+v", req)
	}
	if idem.Key != "k" || idem.Request == [32]byte{} || a.Header.Get("Location") != "/v1/operations/"+b.fake.op.ID {
		t.Errorf("%+v %v", idem, a.Header)
	}
	var accepted api.AcceptedSandbox
	if err := json.Unmarshal(a.Body, &accepted); err != nil || accepted.Operation.Error == nil || accepted.Operation.Error.Code != "no_memory" ||
		accepted.Operation.Delay == nil || accepted.Sandbox.End.Reason != "oom" {
		t.Errorf("%v %s", err, a.Body)
	}
	call("GET", "listSandboxes")
	if f := b.fake.asked[0].(sandbox.SandboxFilter); f.Labels["a"] != "b" || f.Labels["c"] != "" || len(f.Labels) != 2 || f.States[0] != sandbox.StateRunning {
		t.Errorf("%+v", f)
	}
	if p := b.fake.asked[1].(sandbox.Page); p.Limit != 7 || p.Token != "abc" {
		t.Errorf("%+v", p)
	}
	call("POST", "importTemplate")
	if cfg := b.fake.asked[1].(sandbox.RuntimeConfig); b.fake.asked[0] != "tar" || cfg.Env["B"] != "a=b" || len(cfg.Command) != 2 || b.fake.asked[2] != "x/y:1" {
		t.Errorf("%+v", b.fake.asked)
	}
	call("GET", "getTemplate")
	if b.fake.asked[0] != "team/base:latest" {
		t.Errorf("%+v", b.fake.asked)
	}
	call("GET", "getOperation")
	if b.fake.asked[1] != time.Minute {
		t.Errorf("%+v", b.fake.asked)
	}
}

// TestPatch tells null from nothing.
func TestPatch(t *testing.T) {
	b := newBench(t)
	path := "/v1/sandboxes/" + b.fake.sb.ID
	for _, c := range []struct {
		body string
		want any
	}{
		{`{"ttl_seconds":null}`, time.Duration(0)},
		{`{"ttl_seconds":5}`, 5 * time.Second},
		{`{"labels":{"ttl_seconds":"1"}}`, map[string]string{"ttl_seconds": "1"}},
		{`{"labels":{}}`, map[string]string{}},
		{`{}`, nil},
		{`{"ttl_seconds":0}`, nil},
		{`{"labels":null}`, nil},
	} {
		b.fake.asked = nil
		a := b.do("project", "PATCH", path, "application/json", c.body)
		if c.want == nil {
			if a.Status != 400 || b.fake.asked != nil {
				t.Errorf("%s: %d", c.body, a.Status)
			}
			continue
		}
		var got any
		if m, ok := b.fake.asked[1].(map[string]string); ok {
			got = len(m)
			c.want = len(c.want.(map[string]string))
		} else {
			got = b.fake.asked[1]
		}
		if a.Status != 200 || got != c.want {
			t.Errorf("%s: %d %v", c.body, a.Status, b.fake.asked)
		}
	}
}

func TestAccessToken(t *testing.T) {
	b := newBench(t)
	path := "/v1/sandboxes/" + b.fake.sb.ID + "/tokens"
	var tok api.AccessToken
	a := b.do("project", "POST", path, "application/json", `{"purpose":"ports","ttl_seconds":60}`)
	if err := json.Unmarshal(a.Body, &tok); err != nil || a.Status != 201 {
		t.Fatalf("%d %s", a.Status, a.Body)
	}
	claim, err := b.tokens.VerifyAccess(tok.Token, auth.PurposePorts, time.Now())
	if err != nil || claim.Sandbox != b.fake.sb.ID || claim.Project != project || !claim.Expires.Equal(tok.ExpiresAt) {
		t.Errorf("%+v %v", claim, err)
	}
	b.fake.sb.State = sandbox.StateDeleted
	if a := b.do("project", "POST", path, "application/json", `{"purpose":"ports"}`); a.Status != 409 {
		t.Errorf("%d", a.Status)
	}
}

func TestHealthTellsWhyNot(t *testing.T) {
	router, err := rest.NewRouter(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	New(Options{Control: newFake(), Keys: roles{}, Ready: func(context.Context) error {
		return sandbox.Errorf(sandbox.Unavailable, "x", "still adopting")
	}}).Register(router)
	w := httptest.NewRecorder()
	router.ServeHTTP(w, httptest.NewRequest("GET", "/healthz", nil))
	if w.Code != 503 || !bytes.Contains(w.Body.Bytes(), []byte("still adopting")) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestIdempotencyHash: the same request has the same hash, another has not.
func TestIdempotencyHash(t *testing.T) {
	b := newBench(t)
	hash := func(path, body string) [32]byte {
		t.Helper()
		b.do("project", "POST", path, "application/json", body, "Idempotency-Key", "k")
		return b.fake.asked[1].(sandbox.Idempotency).Request
	}
	one := hash("/v1/sandboxes", `{"template":"base","env":{"A":"1","B":"2"}}`)
	if hash("/v1/sandboxes", `{ "env":{"B":"2","A":"1"}, "template":"base" }`) != one {
		t.Error("spelling changed the hash")
	}
	if hash("/v1/sandboxes", `{"template":"base","env":{"A":"1","B":"3"}}`) == one {
		t.Error("another request has the same hash")
	}
	if a := b.do("project", "POST", "/v1/sandboxes", "application/json", `{"template":"base"}`, "Idempotency-Key", "with space"); a.Status != 400 {
		t.Errorf("%d", a.Status)
	}
}
