package httpapi

import (
	"net/http"
	"strings"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// The bounds of a tar that is imported.
const (
	maxTar  = 64 << 30
	tarWait = 2 * time.Minute // between two pieces
)

// ListTemplates answers the project's templates.
func (a *API) ListTemplates(w http.ResponseWriter, r *http.Request) {
	rows, err := a.o.Control.Templates(r.Context(), callerOf(r))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	list := api.TemplateList{Items: make([]api.Template, 0, len(rows))}
	for _, t := range rows {
		list.Items = append(list.Items, showTemplate(t))
	}
	rest.JSON(w, r, http.StatusOK, list)
}

// ImportTemplate makes a template of the tar in the body.
func (a *API) ImportTemplate(w http.ResponseWriter, r *http.Request, params api.ImportTemplateParams) {
	cfg := sandbox.RuntimeConfig{User: params.User, Workdir: params.Workdir, Command: params.Command}
	for _, e := range params.Env {
		k, v, _ := strings.Cut(e, "=")
		if cfg.Env == nil {
			cfg.Env = map[string]string{}
		}
		cfg.Env[k] = v
	}
	t, _, err := a.o.Control.Import(r.Context(), callerOf(r), rest.Upload(w, r, maxTar, tarWait), cfg, params.Release)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusCreated, showTemplate(t))
}

// BuildTemplate asks for a template of Debian packages.
func (a *API) BuildTemplate(w http.ResponseWriter, r *http.Request, params api.BuildTemplateParams) {
	var body api.BuildRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	req := sandbox.BuildRequest{
		Debian: sandbox.DebianSource{Suite: body.Debian.Suite, Packages: body.Debian.Packages},
		Config: sandbox.RuntimeConfig{
			Env: body.Config.Env, User: body.Config.User, Workdir: body.Config.Workdir, Command: body.Config.Command,
		},
		Release: body.Release,
	}
	for _, u := range body.Debian.Users {
		req.Debian.Users = append(req.Debian.Users, sandbox.TemplateUser{Name: u.Name, Sudo: u.Sudo})
	}
	op, _, err := a.o.Control.Build(r.Context(), callerOf(r), req, rest.Idempotency(r, params.IdempotencyKey, body))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	accepted(w, r, op, showOperation(op))
}

// GetTemplate answers one template.
func (a *API) GetTemplate(w http.ResponseWriter, r *http.Request, ref api.TemplateRef) {
	t, err := a.o.Control.Template(r.Context(), callerOf(r), ref)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, showTemplate(t))
}

// DeleteTemplate deletes a template that nothing uses.
func (a *API) DeleteTemplate(w http.ResponseWriter, r *http.Request, ref api.TemplateRef) {
	if err := a.o.Control.DeleteTemplate(r.Context(), callerOf(r), ref); err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.NoContent(w)
}

// PutRelease makes a release point to a template.
func (a *API) PutRelease(w http.ResponseWriter, r *http.Request, release api.ReleaseName) {
	var body api.PutReleaseRequest
	_, err := rest.Decode(w, r, &body)
	var rel sandbox.Release
	if err == nil {
		rel, err = a.o.Control.Tag(r.Context(), callerOf(r), body.Template, release)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, api.Release{Name: rel.Name, Project: rel.Project, Digest: rel.Digest, UpdatedAt: rel.UpdatedAt.UTC()})
}

// DeleteRelease removes a release.
func (a *API) DeleteRelease(w http.ResponseWriter, r *http.Request, release api.ReleaseName) {
	if err := a.o.Control.Untag(r.Context(), callerOf(r), release); err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.NoContent(w)
}

// ListKeys answers all keys.
func (a *API) ListKeys(w http.ResponseWriter, r *http.Request) {
	rows, err := a.o.Control.Keys(r.Context(), callerOf(r), callerOf(r).Scope())
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	list := api.KeyList{Items: make([]api.Key, 0, len(rows))}
	for _, k := range rows {
		list.Items = append(list.Items, showKey(k))
	}
	rest.JSON(w, r, http.StatusOK, list)
}

// CreateKey makes a key.
func (a *API) CreateKey(w http.ResponseWriter, r *http.Request, params api.CreateKeyParams) {
	var body api.CreateKeyRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	k, secret, _, err := a.o.Control.CreateKey(r.Context(), callerOf(r), body.Project, body.Name, sandbox.Role(body.Role),
		rest.Idempotency(r, params.IdempotencyKey, body))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusCreated, api.CreatedKey{Key: showKey(k), Secret: secret})
}

// RevokeKey ends a key.
func (a *API) RevokeKey(w http.ResponseWriter, r *http.Request, id api.KeyID) {
	if err := a.o.Control.RevokeKey(r.Context(), callerOf(r), id); err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.NoContent(w)
}
