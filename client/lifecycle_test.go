package client_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// Each call asks for what it says.
func TestLifecycleCalls(t *testing.T) {
	t.Parallel()
	var method, path, body, key string
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		method, path, body, key = r.Method, r.URL.String(), string(b), r.Header.Get("Idempotency-Key")
		answer(w, 202, struct{}{})
	}), client.Options{})
	verb := func(f func(context.Context, string) (api.AcceptedSandbox, error)) func(context.Context) error {
		return func(ctx context.Context) error { _, err := f(ctx, "sbx_a"); return err }
	}
	for _, k := range []struct {
		want, body string
		key        bool
		call       func(ctx context.Context) error
	}{
		{"POST /v1/sandboxes/sbx_a/pause", "", true, verb(c.Pause)},
		{"POST /v1/sandboxes/sbx_a/resume", "", true, verb(c.Resume)},
		{"POST /v1/sandboxes/sbx_a/suspend", "", true, verb(c.Suspend)},
		{"POST /v1/sandboxes/sbx_a/restore", "", true, verb(c.Restore)},
		{"POST /v1/sandboxes/sbx_a/start", "", true, verb(c.Start)},
		{"POST /v1/sandboxes/sbx_a/wake", "", true, verb(c.Wake)},
		{"POST /v1/sandboxes/sbx_a/stop", "", true, func(ctx context.Context) error { _, err := c.Stop(ctx, "sbx_a", -1); return err }},
		{"POST /v1/sandboxes/sbx_a/stop?grace_seconds=0", "", true, func(ctx context.Context) error { _, err := c.Stop(ctx, "sbx_a", 0); return err }},
		{"POST /v1/sandboxes/sbx_a/fork", `{"count":2}`, true, func(ctx context.Context) error {
			_, err := c.Fork(ctx, "sbx_a", api.ForkRequest{Count: 2})
			return err
		}},
		{"POST /v1/sandboxes/sbx_a/rollback", `{"snapshot":"snp_a"}`, true, func(ctx context.Context) error {
			_, err := c.Rollback(ctx, "sbx_a", "snp_a")
			return err
		}},
		{"POST /v1/sandboxes/sbx_a/snapshots", `{"kind":"disk","name":"n"}`, true, func(ctx context.Context) error {
			_, err := c.TakeSnapshot(ctx, "sbx_a", api.SnapshotRequest{Name: "n", Kind: api.SnapshotDisk})
			return err
		}},
		{"GET /v1/snapshots?limit=1000&sandbox=sbx_a", "", false, func(ctx context.Context) error { _, err := c.Snapshots(ctx, "sbx_a"); return err }},
		{"GET /v1/snapshots/snp_a", "", false, func(ctx context.Context) error { _, err := c.Snapshot(ctx, "snp_a"); return err }},
		{"DELETE /v1/snapshots/snp_a", "", false, func(ctx context.Context) error { _, err := c.DeleteSnapshot(ctx, "snp_a"); return err }},
		{"GET /v1/usage", "", false, func(ctx context.Context) error { _, err := c.Usage(ctx); return err }},
		{"PUT /v1/projects/prj_a/quotas", `{"running":3}`, false, func(ctx context.Context) error {
			_, err := c.SetQuotas(ctx, "prj_a", api.Quotas{Running: 3})
			return err
		}},
		{"POST /v1/host/drain", `{"within_seconds":90}`, false, func(ctx context.Context) error { _, err := c.Drain(ctx, 90*time.Second); return err }},
		{"PATCH /v1/sandboxes/sbx_a", `{"policy":{"idle":{},"wake_on_access":false}}`, false, func(ctx context.Context) error {
			_, err := c.UpdateSandbox(ctx, "sbx_a", client.Change{Policy: &api.PolicyRequest{WakeOnAccess: new(bool)}})
			return err
		}},
	} {
		if err := k.call(t.Context()); err != nil {
			t.Errorf("%s: %v", k.want, err)
		}
		body = strings.Replace(body, `"idle":{},`, "", 1)
		if got := method + " " + path; got != k.want || body != strings.Replace(k.body, `"idle":{},`, "", 1) || (key != "") != k.key {
			t.Errorf("%s %q (key %q), want %s %q", got, body, key, k.want, k.body)
		}
	}
}

// A suspended sandbox is not a lost one: a stream that only beats outlasts the
// time in which a daemon would be given up.
func TestFollowOutlastsSuspend(t *testing.T) {
	t.Parallel()
	const reconnect = 100 * time.Millisecond
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write(frame(1, 0, []byte("before ")))
		for end := time.Now().Add(5 * reconnect); time.Now().Before(end); time.Sleep(reconnect / 10) {
			_, _ = w.Write(frame(7, 7, nil))
			w.(http.Flusher).Flush()
		}
		_, _ = w.Write(frame(1, 7, []byte("after")))
		_, _ = w.Write(event(4, api.StreamEvent{Offset: 12, Exit: &api.Exit{}}))
	}), client.Options{Reconnect: reconnect})
	var out bytes.Buffer
	broken := func(err error) { t.Errorf("it was told as broken: %v", err) }
	exit, err := c.Session("s", "x").Follow(client.StreamOptions{Interrupted: broken}).Copy(t.Context(), &out, &out, nil)
	if err != nil || exit == nil || out.String() != "before after" {
		t.Errorf("%q %v %v", out.String(), exit, err)
	}
}

// Input waits for a sandbox that stands still, and not for a command that ended.
func TestStdinOutlastsSuspend(t *testing.T) {
	t.Parallel()
	for state, want := range map[api.SessionState]bool{api.SessionRunning: true, api.SessionLost: false} {
		var posts atomic.Int64
		c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				answer(w, 200, api.Session{State: state, Held: true})
				return
			}
			if posts.Add(1) < 4 {
				code := []string{"sandbox_not_running", "machine_held"}[posts.Load()%2]
				answer(w, 409, api.Problem{Class: api.ClassFailedPrecondition, Code: code})
				return
			}
			b, _ := io.ReadAll(r.Body)
			answer(w, 200, api.StdinState{Accepted: int64(len(b))})
		}), client.Options{})
		n, err := c.Session("s", "x").Stdin(t.Context(), 0).Write([]byte("hello"))
		if (err == nil) != want || want && n != 5 || !want && posts.Load() != 1 {
			t.Errorf("%s: %d %v after %d requests", state, n, err, posts.Load())
		}
	}
}
