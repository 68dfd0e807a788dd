package httpapi

import (
	"context"
	"io"
	"net/http"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// Keys verifies API keys (an auth.Verifier).
type Keys interface {
	// Verify returns whose key this is; an error of the class Denied where it
	// is none, or was revoked.
	Verify(ctx context.Context, key string) (sandbox.Caller, error)
}

// Sandboxes are control's verbs on sandboxes.
type Sandboxes interface {
	CreateSandbox(ctx context.Context, who sandbox.Caller, req control.CreateRequest, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error)
	Delete(ctx context.Context, who sandbox.Caller, id string, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error)
	Get(ctx context.Context, who sandbox.Caller, id string) (sandbox.Sandbox, error)
	List(ctx context.Context, who sandbox.Caller, f sandbox.SandboxFilter, p sandbox.Page) ([]sandbox.Sandbox, string, error)
	Changes
}

// Changes are control's verbs that change a sandbox's row and start nothing.
type Changes interface {
	SetPolicy(ctx context.Context, who sandbox.Caller, id string, p control.PolicyPatch) (sandbox.Sandbox, error)
	SetLabels(ctx context.Context, who sandbox.Caller, id string, labels map[string]string) (sandbox.Sandbox, error)
	SetTTL(ctx context.Context, who sandbox.Caller, id string, ttl time.Duration) (sandbox.Sandbox, error)
}

// Lifecycle is control's verbs that move a sandbox through the table of
// transitions.
type Lifecycle interface {
	Do(ctx context.Context, who sandbox.Caller, id string, verb sandbox.Verb, req control.VerbRequest, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error)
	TakeSnapshot(ctx context.Context, who sandbox.Caller, id string, req control.SnapshotRequest, idem sandbox.Idempotency) (sandbox.Snapshot, sandbox.Operation, bool, error)
	Fork(ctx context.Context, who sandbox.Caller, id string, req control.ForkRequest, idem sandbox.Idempotency) ([]sandbox.NewSandbox, sandbox.Operation, bool, error)
	Rollback(ctx context.Context, who sandbox.Caller, id, snapshot string, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error)
}

// Snapshots are control's verbs on snapshots that are there.
type Snapshots interface {
	Snapshot(ctx context.Context, who sandbox.Caller, id string) (sandbox.Snapshot, error)
	Snapshots(ctx context.Context, who sandbox.Caller, f sandbox.SnapshotFilter, p sandbox.Page) ([]sandbox.Snapshot, string, error)
	DeleteSnapshot(ctx context.Context, who sandbox.Caller, id string) (sandbox.Snapshot, error)
}

// Host is control's verbs on projects' shares and on the host, and what
// happened on it.
type Host interface {
	Usage(ctx context.Context, who sandbox.Caller) (sandbox.Usage, sandbox.Quotas, error)
	SetQuotas(ctx context.Context, who sandbox.Caller, project string, q sandbox.Quotas) (sandbox.Project, error)
	Drain(ctx context.Context, who sandbox.Caller, within time.Duration) (control.DrainReport, error)
	Events(ctx context.Context, who sandbox.Caller, after int64, limit int, wait time.Duration) ([]sandbox.Event, error)
}

// Operations are control's look-ups of operations.
type Operations interface {
	Operation(ctx context.Context, who sandbox.Caller, id string, wait time.Duration) (sandbox.Operation, error)
	Operations(ctx context.Context, who sandbox.Caller, f sandbox.OperationFilter, p sandbox.Page) ([]sandbox.Operation, string, error)
}

// Templates are control's verbs on templates.
type Templates interface {
	Import(ctx context.Context, who sandbox.Caller, tar io.Reader, cfg sandbox.RuntimeConfig, release string) (sandbox.Template, sandbox.Built, error)
	Build(ctx context.Context, who sandbox.Caller, req sandbox.BuildRequest, idem sandbox.Idempotency) (sandbox.Operation, bool, error)
	Template(ctx context.Context, who sandbox.Caller, ref string) (sandbox.Template, error)
	Templates(ctx context.Context, who sandbox.Caller) ([]sandbox.Template, error)
	DeleteTemplate(ctx context.Context, who sandbox.Caller, ref string) error
}

// Releases are control's verbs on releases.
type Releases interface {
	Tag(ctx context.Context, who sandbox.Caller, ref, release string) (sandbox.Release, error)
	Untag(ctx context.Context, who sandbox.Caller, release string) error
}

// KeyRing is control's verbs on API keys.
type KeyRing interface {
	CreateKey(ctx context.Context, who sandbox.Caller, project, name string, role sandbox.Role, idem sandbox.Idempotency) (sandbox.Key, string, bool, error)
	Keys(ctx context.Context, who sandbox.Caller, project string) ([]sandbox.Key, error)
	RevokeKey(ctx context.Context, who sandbox.Caller, id string) error
}

// Profiles are control's verbs on egress profiles.
type Profiles interface {
	CreateProfile(ctx context.Context, who sandbox.Caller, p sandbox.EgressProfile, idem sandbox.Idempotency) (sandbox.EgressProfile, bool, error)
	Profile(ctx context.Context, who sandbox.Caller, name string) (sandbox.EgressProfile, error)
	Profiles(ctx context.Context, who sandbox.Caller) ([]sandbox.EgressProfile, error)
	ReplaceProfile(ctx context.Context, who sandbox.Caller, p sandbox.EgressProfile) (sandbox.EgressProfile, error)
	DeleteProfile(ctx context.Context, who sandbox.Caller, name string) error
}

// Secrets are control's verbs on secrets.
type Secrets interface {
	CreateSecret(ctx context.Context, who sandbox.Caller, req control.SecretRequest) (sandbox.Secret, error)
	Secret(ctx context.Context, who sandbox.Caller, name string) (sandbox.Secret, error)
	Secrets(ctx context.Context, who sandbox.Caller) ([]sandbox.Secret, error)
	ReplaceSecret(ctx context.Context, who sandbox.Caller, name string, version int64, value []byte) (sandbox.Secret, error)
	DeleteSecret(ctx context.Context, who sandbox.Caller, name string) error
}

// Egress is which profile a sandbox has, and what the gateway decided.
type Egress interface {
	SetSandboxEgress(ctx context.Context, who sandbox.Caller, id, profile string) (sandbox.Sandbox, error)
	EgressRecords(ctx context.Context, who sandbox.Caller, f sandbox.EgressAuditFilter) (list []sandbox.EgressRecord, last int64, err error)
	FollowEgress(ctx context.Context, who sandbox.Caller, f sandbox.EgressAuditFilter, tell func(sandbox.EgressRecord) error) error
}

// Control is what the control half asks of (a control.Control).
type Control interface {
	Sandboxes
	Lifecycle
	Snapshots
	Host
	Operations
	Templates
	Releases
	KeyRing
	Profiles
	Secrets
	Egress
}

var _ Control = (*control.Control)(nil)

// Options make an API. All are needed but Ready, Driver and Durability.
type Options struct {
	Control Control
	Keys    Keys
	Tokens  *auth.Tokens
	Version string
	Driver  func() string // of new sandboxes, now
	// Durability is what each driver's disks outlive, by the driver's name.
	Durability map[string]sandbox.Durability
	Ready      func(context.Context) error // nil when there is nothing to wait for
}

// API answers the control half.
type API struct {
	o    Options
	pace pace
}

var _ ServerInterface = (*API)(nil)

// New makes an API.
func New(o Options) *API { return &API{o: o, pace: usualPace} }

// Register puts the operations of the control half into the router.
func (a *API) Register(router *rest.Router) {
	HandlerWithOptions(a, StdHTTPServerOptions{BaseRouter: router.Half(a.guard), ErrorHandlerFunc: rest.BadParam})
}

// actions says what a caller must be permitted for each operation. Control
// asks again; here it is asked before a body is read.
var actions = map[string]sandbox.Action{
	"getVersion": sandbox.ActSee, "listSandboxes": sandbox.ActSee, "getSandbox": sandbox.ActSee,
	"createSandbox": sandbox.ActChange, "updateSandbox": sandbox.ActChange, "deleteSandbox": sandbox.ActChange,
	"pauseSandbox": sandbox.ActChange, "resumeSandbox": sandbox.ActChange, "suspendSandbox": sandbox.ActChange, "restoreSandbox": sandbox.ActChange,
	"stopSandbox": sandbox.ActChange, "startSandbox": sandbox.ActChange, "wakeSandbox": sandbox.ActChange,
	"takeSnapshot": sandbox.ActChange, "forkSandbox": sandbox.ActChange, "rollbackSandbox": sandbox.ActChange,
	"listSnapshots": sandbox.ActSee, "getSnapshot": sandbox.ActSee, "deleteSnapshot": sandbox.ActChange,
	"listEvents": sandbox.ActSee, "getUsage": sandbox.ActSee, "setQuotas": sandbox.ActKeys, "drainHost": sandbox.ActKeys,
	"createAccessToken": sandbox.ActData,
	"setSandboxEgress":  sandbox.ActChange, "listEgressProfiles": sandbox.ActSee, "getEgressProfile": sandbox.ActSee,
	"createEgressProfile": sandbox.ActChange, "replaceEgressProfile": sandbox.ActChange, "deleteEgressProfile": sandbox.ActChange,
	"listEgressRecords": sandbox.ActData,
	"listSecrets":       sandbox.ActSee, "getSecret": sandbox.ActSee,
	"createSecret": sandbox.ActChange, "rotateSecret": sandbox.ActChange, "deleteSecret": sandbox.ActChange,
	"listOperations": sandbox.ActSee, "getOperation": sandbox.ActSee,
	"listTemplates": sandbox.ActSee, "getTemplate": sandbox.ActSee,
	"importTemplate": sandbox.ActTemplate, "deleteTemplate": sandbox.ActTemplate,
	"putRelease": sandbox.ActTemplate, "deleteRelease": sandbox.ActTemplate,
	"buildTemplate": sandbox.ActBuildHost,
	"listKeys":      sandbox.ActKeys, "createKey": sandbox.ActKeys, "revokeKey": sandbox.ActKeys,
}

type callerKey struct{}

func callerOf(r *http.Request) sandbox.Caller {
	c, _ := r.Context().Value(callerKey{}).(sandbox.Caller)
	return c
}

// guard lets in API keys, by role.
func (a *API) guard(r *http.Request, operation, token string) (*http.Request, string, error) {
	act, ok := actions[operation]
	if !ok {
		return nil, "", sandbox.Errorf(sandbox.Internal, "no_action", "the operation %s has no action", operation)
	}
	caller, err := a.o.Keys.Verify(r.Context(), token)
	if err != nil {
		return nil, "", err
	}
	return r.WithContext(context.WithValue(r.Context(), callerKey{}, caller)), caller.KeyID, caller.Can(act)
}

// GetHealth answers when the daemon is ready.
func (a *API) GetHealth(w http.ResponseWriter, r *http.Request) {
	if a.o.Ready != nil {
		if err := a.o.Ready(r.Context()); err != nil {
			e := sandbox.Errorf(sandbox.Unavailable, "not_ready", "the daemon is not ready: %s", sandbox.AsError(err).Message)
			rest.Fail(w, r, e)
			return
		}
	}
	rest.JSON(w, r, http.StatusOK, api.Health{Status: "ok"})
}

// GetVersion answers the daemon's version.
func (a *API) GetVersion(w http.ResponseWriter, r *http.Request) {
	v := api.Version{Version: a.o.Version, Api: "v1"}
	if a.o.Driver != nil {
		v.Driver = a.o.Driver()
	}
	rest.JSON(w, r, http.StatusOK, v)
}
