package httpapi

import (
	"net/http"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// defaultGrace is the contract's default of grace_seconds.
const defaultGrace = 10

// PauseSandbox asks for a sandbox to stand still.
func (a *API) PauseSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.PauseSandboxParams) {
	a.do(w, r, id, sandbox.VerbPause, control.VerbRequest{}, params.IdempotencyKey)
}

// ResumeSandbox asks for a paused sandbox to go on.
func (a *API) ResumeSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.ResumeSandboxParams) {
	a.do(w, r, id, sandbox.VerbResume, control.VerbRequest{}, params.IdempotencyKey)
}

// SuspendSandbox asks for a sandbox's memory and disk to be saved and the rest
// to be freed.
func (a *API) SuspendSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.SuspendSandboxParams) {
	a.do(w, r, id, sandbox.VerbSuspend, control.VerbRequest{}, params.IdempotencyKey)
}

// RestoreSandbox asks for a suspended sandbox to go on.
func (a *API) RestoreSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.RestoreSandboxParams) {
	a.do(w, r, id, sandbox.VerbRestore, control.VerbRequest{}, params.IdempotencyKey)
}

// StopSandbox asks for a sandbox's disk to be saved and its machine to end.
func (a *API) StopSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.StopSandboxParams) {
	grace := defaultGrace
	if params.GraceSeconds != nil {
		grace = *params.GraceSeconds
	}
	a.do(w, r, id, sandbox.VerbStop, control.VerbRequest{Grace: time.Duration(grace) * time.Second}, params.IdempotencyKey)
}

// StartSandbox asks for a stopped or failed sandbox to boot.
func (a *API) StartSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.StartSandboxParams) {
	a.do(w, r, id, sandbox.VerbStart, control.VerbRequest{}, params.IdempotencyKey)
}

// WakeSandbox asks for whichever of resume, restore and start its state needs.
func (a *API) WakeSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.WakeSandboxParams) {
	a.do(w, r, id, sandbox.VerbWake, control.VerbRequest{}, params.IdempotencyKey)
}

// do asks for a verb that needs nothing but its sandbox.
func (a *API) do(w http.ResponseWriter, r *http.Request, id string, verb sandbox.Verb, req control.VerbRequest, key string) {
	sb, op, _, err := a.o.Control.Do(r.Context(), callerOf(r), id, verb, req, rest.Idempotency(r, key, req))
	a.begun(w, r, sb, op, err)
}

// begun answers a sandbox and the operation that was begun on it.
func (a *API) begun(w http.ResponseWriter, r *http.Request, sb sandbox.Sandbox, op sandbox.Operation, err error) {
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	accepted(w, r, op, api.AcceptedSandbox{Sandbox: a.showSandbox(sb), Operation: showOperation(op)})
}

// RollbackSandbox asks for a sandbox to go back to an earlier snapshot.
func (a *API) RollbackSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.RollbackSandboxParams) {
	var body api.RollbackRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	sb, op, _, err := a.o.Control.Rollback(r.Context(), callerOf(r), id, body.Snapshot, rest.Idempotency(r, params.IdempotencyKey, body))
	a.begun(w, r, sb, op, err)
}

// ForkSandbox asks for children of a running sandbox.
func (a *API) ForkSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.ForkSandboxParams) {
	var body api.ForkRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	children, op, _, err := a.o.Control.Fork(r.Context(), callerOf(r), id, control.ForkRequest{
		Count: max(1, body.Count), Labels: body.Labels, Env: body.Env, Egress: body.Egress, Wait: time.Duration(body.WaitSeconds) * time.Second,
	}, rest.Idempotency(r, params.IdempotencyKey, body))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	answer := api.Forked{Operation: showOperation(op), Children: make([]api.AcceptedSandbox, 0, len(children))}
	for _, c := range children {
		answer.Children = append(answer.Children, api.AcceptedSandbox{Sandbox: a.showSandbox(c.Sandbox), Operation: showOperation(c.Operation)})
	}
	accepted(w, r, op, answer)
}

// policyPatch is what a request names of a policy; nil names nothing.
func policyPatch(p *api.PolicyRequest) control.PolicyPatch {
	var out control.PolicyPatch
	if p == nil {
		return out
	}
	if p.Idle.AfterSeconds != 0 {
		d := seconds(p.Idle.AfterSeconds)
		out.IdleAfter = &d
	}
	if p.CheckpointSeconds != nil {
		d := seconds(*p.CheckpointSeconds)
		out.Checkpoint = &d
	}
	for _, f := range []struct {
		from api.Reaction
		to   **sandbox.Reaction
	}{{p.Idle.Action, &out.IdleAction}, {p.OnExpiry, &out.OnExpiry}, {p.OnCrash, &out.OnCrash}} {
		if f.from != "" {
			v := sandbox.Reaction(f.from)
			*f.to = &v
		}
	}
	out.WakeOnAccess = p.WakeOnAccess
	return out
}
