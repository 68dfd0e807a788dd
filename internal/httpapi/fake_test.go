package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

// fake is a control that has one of everything and notes what it was asked.
type fake struct {
	err    error // of every verb
	asked  []any
	caller sandbox.Caller
	sb     sandbox.Sandbox
	op     sandbox.Operation
	tpl    sandbox.Template
	key    sandbox.Key
	snap   sandbox.Snapshot
	log    *eventLog // of Events

	last     int64                          // of the audit
	records  chan sandbox.EgressRecord      // what FollowEgress tells
	followed chan sandbox.EgressAuditFilter // how it was asked
}

var (
	project = sandbox.NewID(sandbox.KindProject)
	digest  = "sha256:" + strings.Repeat("0a", 32)
)

func newFake() *fake {
	now := time.Now()
	return &fake{
		records: make(chan sandbox.EgressRecord), followed: make(chan sandbox.EgressAuditFilter, 10),
		sb: sandbox.Sandbox{
			ID: sandbox.NewID(sandbox.KindSandbox), Project: project, Template: "base", Digest: digest, State: sandbox.StateRunning,
			CreatedAt: now, UpdatedAt: now, TouchedAt: now, End: &sandbox.End{Reason: sandbox.EndOOM, At: now}, ExpiresAt: &now,
			Driver: "gvisor", Policy: sandbox.DefaultPolicy, Epoch: 3, Generation: 4, Image: sandbox.NewID(sandbox.KindSnapshot), ImageAt: &now,
		},
		snap: sandbox.Snapshot{
			ID: sandbox.NewID(sandbox.KindSnapshot), Project: project, Sandbox: sandbox.NewID(sandbox.KindSandbox), Kind: sandbox.SnapshotDisk,
			Purpose: sandbox.PurposeNamed, State: sandbox.SnapshotReady, Template: "base", Digest: digest, Driver: "gvisor", SizeBytes: 5,
			Needs: sandbox.Needs{Format: 1, Driver: "gvisor", Digest: digest}, CreatedAt: now, TakenAt: &now,
		},
		log: &eventLog{},
		op: sandbox.Operation{
			ID: sandbox.NewID(sandbox.KindOperation), Project: project, Verb: sandbox.VerbCreate, State: sandbox.OpFailed, Key: "system",
			CreatedAt: now, StartedAt: &now, Delay: &sandbox.Delay{Reason: "busy", Since: now},
			Error: sandbox.Errorf(sandbox.NoCapacity, "no_memory", "the host is full"),
		},
		tpl: sandbox.Template{Digest: digest, Project: project, CreatedAt: now, Source: "tar"},
		key: sandbox.Key{ID: sandbox.NewID(sandbox.KindKey), Project: project, Name: "k", Role: sandbox.RoleRead, CreatedAt: now},
	}
}

func (f *fake) note(who sandbox.Caller, asked ...any) error {
	f.caller, f.asked = who, asked
	return f.err
}

func (f *fake) CreateSandbox(_ context.Context, who sandbox.Caller, req control.CreateRequest, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error) {
	return f.sb, f.op, false, f.note(who, req, idem)
}

func (f *fake) Delete(_ context.Context, who sandbox.Caller, id string, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error) {
	return f.sb, f.op, false, f.note(who, id, idem)
}

func (f *fake) Get(_ context.Context, who sandbox.Caller, id string) (sandbox.Sandbox, error) {
	return f.sb, f.note(who, id)
}

func (f *fake) List(_ context.Context, who sandbox.Caller, filter sandbox.SandboxFilter, p sandbox.Page) ([]sandbox.Sandbox, string, error) {
	return []sandbox.Sandbox{f.sb}, "next", f.note(who, filter, p)
}

func (f *fake) SetLabels(_ context.Context, who sandbox.Caller, id string, labels map[string]string) (sandbox.Sandbox, error) {
	return f.sb, f.note(who, id, labels)
}

func (f *fake) SetTTL(_ context.Context, who sandbox.Caller, id string, ttl time.Duration) (sandbox.Sandbox, error) {
	return f.sb, f.note(who, id, ttl)
}

func (f *fake) Operation(_ context.Context, who sandbox.Caller, id string, wait time.Duration) (sandbox.Operation, error) {
	return f.op, f.note(who, id, wait)
}

func (f *fake) Operations(_ context.Context, who sandbox.Caller, filter sandbox.OperationFilter, p sandbox.Page) ([]sandbox.Operation, string, error) {
	return []sandbox.Operation{f.op}, "", f.note(who, filter, p)
}

func (f *fake) Import(_ context.Context, who sandbox.Caller, tar io.Reader, cfg sandbox.RuntimeConfig, release string) (sandbox.Template, sandbox.Built, error) {
	b, err := io.ReadAll(tar)
	return f.tpl, sandbox.Built{}, errors.Join(err, f.note(who, string(b), cfg, release))
}

func (f *fake) Build(_ context.Context, who sandbox.Caller, req sandbox.BuildRequest, _ sandbox.Idempotency) (sandbox.Operation, bool, error) {
	return f.op, false, f.note(who, req)
}

func (f *fake) Template(_ context.Context, who sandbox.Caller, ref string) (sandbox.Template, error) {
	return f.tpl, f.note(who, ref)
}

func (f *fake) Templates(_ context.Context, who sandbox.Caller) ([]sandbox.Template, error) {
	return []sandbox.Template{f.tpl}, f.note(who)
}

func (f *fake) DeleteTemplate(_ context.Context, who sandbox.Caller, ref string) error {
	return f.note(who, ref)
}

func (f *fake) Tag(_ context.Context, who sandbox.Caller, ref, release string) (sandbox.Release, error) {
	return sandbox.Release{Project: project, Name: release, Digest: digest}, f.note(who, ref, release)
}

func (f *fake) Untag(_ context.Context, who sandbox.Caller, release string) error {
	return f.note(who, release)
}

func (f *fake) CreateKey(_ context.Context, who sandbox.Caller, project, name string, role sandbox.Role, _ sandbox.Idempotency) (sandbox.Key, string, bool, error) {
	return f.key, "cloche_secret", false, f.note(who, project, name, role)
}

func (f *fake) Keys(_ context.Context, who sandbox.Caller, project string) ([]sandbox.Key, error) {
	return []sandbox.Key{f.key}, f.note(who, project)
}

func (f *fake) RevokeKey(_ context.Context, who sandbox.Caller, id string) error {
	return f.note(who, id)
}

func (f *fake) SetPolicy(_ context.Context, who sandbox.Caller, id string, p control.PolicyPatch) (sandbox.Sandbox, error) {
	return f.sb, f.note(who, id, p)
}

func (f *fake) Do(_ context.Context, who sandbox.Caller, id string, verb sandbox.Verb, req control.VerbRequest, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error) {
	return f.sb, f.op, false, f.note(who, id, verb, req, idem)
}

func (f *fake) TakeSnapshot(_ context.Context, who sandbox.Caller, id string, req control.SnapshotRequest, idem sandbox.Idempotency) (sandbox.Snapshot, sandbox.Operation, bool, error) {
	return f.snap, f.op, false, f.note(who, id, req, idem)
}

func (f *fake) Fork(_ context.Context, who sandbox.Caller, id string, req control.ForkRequest, idem sandbox.Idempotency) ([]sandbox.NewSandbox, sandbox.Operation, bool, error) {
	return []sandbox.NewSandbox{{Sandbox: f.sb, Operation: f.op}}, f.op, false, f.note(who, id, req, idem)
}

func (f *fake) Rollback(_ context.Context, who sandbox.Caller, id, snapshot string, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error) {
	return f.sb, f.op, false, f.note(who, id, snapshot, idem)
}

func (f *fake) Snapshot(_ context.Context, who sandbox.Caller, id string) (sandbox.Snapshot, error) {
	return f.snap, f.note(who, id)
}

func (f *fake) Snapshots(_ context.Context, who sandbox.Caller, filter sandbox.SnapshotFilter, p sandbox.Page) ([]sandbox.Snapshot, string, error) {
	return []sandbox.Snapshot{f.snap}, "next", f.note(who, filter, p)
}

func (f *fake) DeleteSnapshot(_ context.Context, who sandbox.Caller, id string) (sandbox.Snapshot, error) {
	return f.snap, f.note(who, id)
}

func (f *fake) Usage(_ context.Context, who sandbox.Caller) (sandbox.Usage, sandbox.Quotas, error) {
	return sandbox.Usage{Running: 1, DiskMiB: 7}, sandbox.Quotas{Running: 2}, f.note(who)
}

func (f *fake) SetQuotas(_ context.Context, who sandbox.Caller, project string, q sandbox.Quotas) (sandbox.Project, error) {
	return sandbox.Project{ID: project, Name: "p", Quotas: q, CreatedAt: time.Now()}, f.note(who, project, q)
}

func (f *fake) Drain(_ context.Context, who sandbox.Caller, within time.Duration) (control.DrainReport, error) {
	return control.DrainReport{Left: map[string]string{f.sb.ID: "it took too long"}}, f.note(who, within)
}

func (f *fake) Events(ctx context.Context, _ sandbox.Caller, after int64, limit int, wait time.Duration) ([]sandbox.Event, error) {
	if f.err != nil {
		return nil, f.err
	}
	return f.log.after(ctx, after, limit, wait)
}

// eventLog is a store's events.
type eventLog struct {
	mu    sync.Mutex
	rows  []sandbox.Event
	asked int
	moved chan struct{}
}

func (l *eventLog) add(seqs ...int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range seqs {
		l.rows = append(l.rows, sandbox.Event{
			Seq: s, Project: project, At: time.Now(), Type: "sandbox.state", Data: json.RawMessage(`{"to":"running"}`),
		})
	}
	if l.moved != nil {
		close(l.moved)
		l.moved = nil
	}
}

func (l *eventLog) after(ctx context.Context, after int64, limit int, wait time.Duration) (list []sandbox.Event, err error) {
	for timer := time.After(wait); ; {
		l.mu.Lock()
		l.asked++
		for _, e := range l.rows {
			if e.Seq > after && len(list) < limit {
				list = append(list, e)
			}
		}
		if l.moved == nil {
			l.moved = make(chan struct{})
		}
		moved := l.moved
		l.mu.Unlock()
		if len(list) > 0 || wait == 0 {
			return list, nil
		}
		select {
		case <-moved:
		case <-timer:
			return nil, nil
		case <-ctx.Done():
			return nil, sandbox.AsError(ctx.Err())
		}
	}
}
