package httpapi

import (
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

func showSandbox(sb sandbox.Sandbox) api.Sandbox {
	out := api.Sandbox{
		Id: sb.ID, Project: sb.Project, Template: sb.Template, Digest: sb.Digest, Driver: sb.Driver,
		State: api.SandboxState(sb.State), Labels: sb.Labels, Env: sb.Env, Operation: sb.Operation,
		Resources: api.Resources{MilliCpu: sb.Resources.MilliCPU, MemoryMib: sb.Resources.MemoryMiB, DiskMib: sb.Resources.DiskMiB},
		CreatedAt: sb.CreatedAt.UTC(), UpdatedAt: sb.UpdatedAt.UTC(), ExpiresAt: at(sb.ExpiresAt),
	}
	if out.Labels == nil {
		out.Labels = map[string]string{}
	}
	if sb.End != nil {
		out.End = &api.End{Reason: string(sb.End.Reason), Detail: sb.End.Detail, At: sb.End.At.UTC()}
	}
	return out
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
