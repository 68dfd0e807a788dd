package httpapi

import (
	"net/http"
	"strings"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// ListSandboxes answers one page of sandboxes.
func (a *API) ListSandboxes(w http.ResponseWriter, r *http.Request, params api.ListSandboxesParams) {
	filter := sandbox.SandboxFilter{Labels: map[string]string{}}
	for _, s := range params.State {
		filter.States = append(filter.States, sandbox.State(s))
	}
	for _, l := range params.Label {
		k, v, _ := strings.Cut(l, "=")
		if other, ok := filter.Labels[k]; ok && other != v {
			rest.Fail(w, r, sandbox.Errorf(sandbox.Invalid, "invalid_parameter", "the label %q can't have two values", k))
			return
		}
		filter.Labels[k] = v
	}
	rows, next, err := a.o.Control.List(r.Context(), callerOf(r), filter, rest.Page(params.Limit, params.PageToken))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	list := api.SandboxList{Items: make([]api.Sandbox, 0, len(rows)), NextPageToken: next}
	for _, sb := range rows {
		list.Items = append(list.Items, a.showSandbox(sb))
	}
	rest.JSON(w, r, http.StatusOK, list)
}

// CreateSandbox asks for a sandbox.
func (a *API) CreateSandbox(w http.ResponseWriter, r *http.Request, params api.CreateSandboxParams) {
	var body api.CreateSandboxRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	sb, op, _, err := a.o.Control.CreateSandbox(r.Context(), callerOf(r), control.CreateRequest{
		Template: body.Template, Snapshot: body.Snapshot, Driver: body.Driver, Labels: body.Labels, Env: body.Env, TTL: seconds(body.TtlSeconds),
		Policy: policyPatch(body.Policy), Egress: body.Egress,
		Resources: sandbox.Resources{
			MilliCPU: body.Resources.MilliCpu, MemoryMiB: body.Resources.MemoryMib, DiskMiB: body.Resources.DiskMib,
		},
	}, rest.Idempotency(r, params.IdempotencyKey, body))
	a.begun(w, r, sb, op, err)
}

func seconds(n int64) time.Duration { return time.Duration(n) * time.Second }

// accepted answers 202 and where the operation is.
func accepted(w http.ResponseWriter, r *http.Request, op sandbox.Operation, body any) {
	w.Header().Set("Location", "/v1/operations/"+op.ID)
	rest.JSON(w, r, http.StatusAccepted, body)
}

// GetSandbox answers one sandbox.
func (a *API) GetSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam) {
	sb, err := a.o.Control.Get(r.Context(), callerOf(r), id)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, a.showSandbox(sb))
}

// UpdateSandbox replaces labels, sets or clears the TTL and changes the policy;
// a field that is missing changes nothing.
func (a *API) UpdateSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam) {
	var body api.UpdateSandboxRequest
	present, err := rest.Decode(w, r, &body)
	var sb sandbox.Sandbox
	if err == nil && present["labels"] {
		sb, err = a.o.Control.SetLabels(r.Context(), callerOf(r), id, body.Labels)
	}
	if err == nil && present["ttl_seconds"] {
		var ttl time.Duration
		if body.TtlSeconds != nil {
			ttl = seconds(*body.TtlSeconds)
		}
		sb, err = a.o.Control.SetTTL(r.Context(), callerOf(r), id, ttl)
	}
	if err == nil && present["policy"] {
		sb, err = a.o.Control.SetPolicy(r.Context(), callerOf(r), id, policyPatch(body.Policy))
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, a.showSandbox(sb))
}

// DeleteSandbox asks for a sandbox to be deleted.
func (a *API) DeleteSandbox(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.DeleteSandboxParams) {
	_, op, _, err := a.o.Control.Delete(r.Context(), callerOf(r), id, rest.Idempotency(r, params.IdempotencyKey, nil))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	accepted(w, r, op, showOperation(op))
}

// defaultTokenTTL is the contract's default of an access token's ttl_seconds.
const defaultTokenTTL = 3600

// CreateAccessToken makes a token for a sandbox's files or ports.
func (a *API) CreateAccessToken(w http.ResponseWriter, r *http.Request, id api.SandboxParam) {
	var body api.CreateAccessTokenRequest
	_, err := rest.Decode(w, r, &body)
	var sb sandbox.Sandbox
	if err == nil {
		sb, err = a.o.Control.Get(r.Context(), callerOf(r), id)
	}
	if err == nil && (sb.State == sandbox.StateDeleted || sb.State == sandbox.StateDeleting) {
		err = sandbox.Errorf(sandbox.FailedPrecondition, "sandbox_deleted", "sandbox %s is %s", id, sb.State)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	ttl := body.TtlSeconds
	if ttl == 0 {
		ttl = defaultTokenTTL
	}
	expires := time.Now().Add(seconds(ttl)).UTC().Truncate(time.Second)
	token := a.o.Tokens.Access(auth.Access{Purpose: auth.Purpose(body.Purpose), Project: sb.Project, Sandbox: sb.ID, Expires: expires})
	rest.JSON(w, r, http.StatusCreated, api.AccessToken{Token: token, Purpose: body.Purpose, ExpiresAt: expires})
}

// ListOperations answers one page of operations.
func (a *API) ListOperations(w http.ResponseWriter, r *http.Request, params api.ListOperationsParams) {
	filter := sandbox.OperationFilter{Sandbox: params.Sandbox}
	for _, s := range params.State {
		filter.States = append(filter.States, sandbox.OperationState(s))
	}
	rows, next, err := a.o.Control.Operations(r.Context(), callerOf(r), filter, rest.Page(params.Limit, params.PageToken))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	list := api.OperationList{Items: make([]api.Operation, 0, len(rows)), NextPageToken: next}
	for _, op := range rows {
		list.Items = append(list.Items, showOperation(op))
	}
	rest.JSON(w, r, http.StatusOK, list)
}

// GetOperation answers one operation, waiting for its end within the bound.
func (a *API) GetOperation(w http.ResponseWriter, r *http.Request, id api.OperationID, params api.GetOperationParams) {
	op, err := a.o.Control.Operation(r.Context(), callerOf(r), id, time.Duration(params.WaitSeconds)*time.Second)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, showOperation(op))
}
