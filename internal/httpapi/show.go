package httpapi

import (
	"cmp"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

func (a *API) showSandbox(sb sandbox.Sandbox) api.Sandbox {
	out := api.Sandbox{
		Id: sb.ID, Project: sb.Project, Template: sb.Template, Digest: sb.Digest, Driver: sb.Driver,
		State: api.SandboxState(sb.State), Labels: sb.Labels, Env: sb.Env, Operation: sb.Operation,
		Resources: showResources(sb.Resources), Policy: showPolicy(sb.Policy), Epoch: sb.Epoch,
		Egress:     cmp.Or(sb.Egress, sandbox.PresetNone),
		Durability: api.SandboxDurability(a.o.Durability[sb.Driver]), Source: sb.Source, Parent: sb.Parent, Base: sb.Base,
		CreatedAt: sb.CreatedAt.UTC(), UpdatedAt: sb.UpdatedAt.UTC(), TouchedAt: sb.TouchedAt.UTC(), ExpiresAt: at(sb.ExpiresAt),
	}
	if out.Labels == nil {
		out.Labels = map[string]string{}
	}
	if sb.Image != "" {
		out.RecoveryPoint = &api.RecoveryPoint{Snapshot: sb.Image, At: at(sb.ImageAt)}
	}
	if sb.End != nil {
		end := sb.End.Told(sb.ImageAt)
		out.End = &api.End{Reason: string(end.Reason), Detail: end.Detail, At: end.At.UTC()}
	}
	return out
}

func showResources(r sandbox.Resources) api.Resources {
	return api.Resources{MilliCpu: r.MilliCPU, MemoryMib: r.MemoryMiB, DiskMib: r.DiskMiB}
}

func showPolicy(p sandbox.Policy) api.Policy {
	return api.Policy{
		Idle:     api.IdlePolicy{AfterSeconds: int64(p.Idle.After / time.Second), Action: api.Reaction(p.Idle.Action)},
		OnExpiry: api.Reaction(p.OnExpiry), OnCrash: api.Reaction(p.OnCrash), WakeOnAccess: p.WakeOnAccess,
		CheckpointSeconds: int64(p.Checkpoint / time.Second),
	}
}

// at is the time, or none, which the contract leaves out.
func at(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.UTC()
}

func showOperation(op sandbox.Operation) api.Operation {
	out := api.Operation{
		Id: op.ID, Project: op.Project, Verb: string(op.Verb), Sandbox: op.Sandbox, Template: op.Template,
		Snapshot: op.Snapshot, Children: op.Children,
		State: api.OperationState(op.State), Step: op.Step, Key: op.Key,
		CreatedAt: op.CreatedAt.UTC(), StartedAt: at(op.StartedAt), EndedAt: at(op.EndedAt),
	}
	if op.Delay != nil {
		out.Delay = &api.Delay{Reason: op.Delay.Reason, Since: op.Delay.Since.UTC()}
	}
	if op.Error != nil {
		out.Error = rest.Body(op.Error)
	}
	return out
}

func showTemplate(t sandbox.Template) api.Template {
	out := api.Template{
		Digest: t.Digest, Project: t.Project, SizeBytes: t.SizeBytes, Source: t.Source, CreatedAt: t.CreatedAt.UTC(), Releases: t.Releases,
		Config: api.RuntimeConfig{Env: t.Config.Env, User: t.Config.User, Workdir: t.Config.Workdir, Command: t.Config.Command},
	}
	if out.Releases == nil {
		out.Releases = []string{}
	}
	return out
}

func showKey(k sandbox.Key) api.Key {
	return api.Key{Id: k.ID, Project: k.Project, Name: k.Name, Role: api.Role(k.Role), CreatedAt: k.CreatedAt.UTC(), RevokedAt: at(k.RevokedAt)}
}
