package httpapi

import (
	"net/http"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// SetSandboxEgress gives a sandbox another egress profile.
func (a *API) SetSandboxEgress(w http.ResponseWriter, r *http.Request, id api.SandboxParam) {
	var body api.SetEgressRequest
	_, err := rest.Decode(w, r, &body)
	var sb sandbox.Sandbox
	if err == nil {
		sb, err = a.o.Control.SetSandboxEgress(r.Context(), callerOf(r), id, body.Profile)
	}
	answer(w, r, http.StatusOK, sb, err, a.showSandbox)
}

// answer answers v as it is shown, or the error.
func answer[T, S any](w http.ResponseWriter, r *http.Request, status int, v T, err error, show func(T) S) {
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, status, show(v))
}

// ListEgressProfiles answers the presets and the project's profiles.
func (a *API) ListEgressProfiles(w http.ResponseWriter, r *http.Request) {
	rows, err := a.o.Control.Profiles(r.Context(), callerOf(r))
	answer(w, r, http.StatusOK, rows, err, func(rows []sandbox.EgressProfile) api.EgressProfileList {
		list := api.EgressProfileList{Items: make([]api.EgressProfile, 0, len(rows))}
		for _, p := range rows {
			list.Items = append(list.Items, showProfile(p))
		}
		return list
	})
}

// CreateEgressProfile makes a profile.
func (a *API) CreateEgressProfile(w http.ResponseWriter, r *http.Request, params api.CreateEgressProfileParams) {
	var body api.CreateEgressProfileRequest
	_, err := rest.Decode(w, r, &body)
	var p sandbox.EgressProfile
	if err == nil {
		p, _, err = a.o.Control.CreateProfile(r.Context(), callerOf(r), sandbox.EgressProfile{
			Name: body.Name, Rules: readRules(body.Rules), Default: sandbox.EgressAction(body.Default), DryRun: body.DryRun, Limits: readLimits(body.Limits),
		}, rest.Idempotency(r, params.IdempotencyKey, body))
	}
	answer(w, r, http.StatusCreated, p, err, showProfile)
}

// GetEgressProfile answers one profile or preset.
func (a *API) GetEgressProfile(w http.ResponseWriter, r *http.Request, name api.EgressProfileParam) {
	p, err := a.o.Control.Profile(r.Context(), callerOf(r), name)
	answer(w, r, http.StatusOK, p, err, showProfile)
}

// ReplaceEgressProfile changes a profile.
func (a *API) ReplaceEgressProfile(w http.ResponseWriter, r *http.Request, name api.EgressProfileParam) {
	var body api.ReplaceEgressProfileRequest
	_, err := rest.Decode(w, r, &body)
	var p sandbox.EgressProfile
	if err == nil {
		p, err = a.o.Control.ReplaceProfile(r.Context(), callerOf(r), sandbox.EgressProfile{
			Name: name, Version: body.Version, Rules: readRules(body.Rules), Default: sandbox.EgressAction(body.Default),
			DryRun: body.DryRun, Limits: readLimits(body.Limits),
		})
	}
	answer(w, r, http.StatusOK, p, err, showProfile)
}

// DeleteEgressProfile deletes a profile that no sandbox has.
func (a *API) DeleteEgressProfile(w http.ResponseWriter, r *http.Request, name api.EgressProfileParam) {
	if err := a.o.Control.DeleteProfile(r.Context(), callerOf(r), name); err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.NoContent(w)
}

func readLimits(l api.EgressLimits) sandbox.EgressLimits {
	return sandbox.EgressLimits{Connections: l.Connections, BytesPerSecond: l.BytesPerSecond, Bytes: l.Bytes}
}

func readRules(list []api.EgressRule) []sandbox.EgressRule {
	var out []sandbox.EgressRule
	for _, r := range list {
		rule := sandbox.EgressRule{
			Name: r.Name, Action: sandbox.EgressAction(r.Action), Hosts: r.Hosts, CIDRs: r.Cidrs, Ports: r.Ports,
			Methods: r.Methods, Paths: r.Paths, Passthrough: r.Passthrough,
		}
		for _, s := range r.Schemes {
			rule.Schemes = append(rule.Schemes, string(s))
		}
		for _, i := range r.Inject {
			rule.Inject = append(rule.Inject, sandbox.Injection{
				Secret: i.Secret, Kind: sandbox.InjectKind(i.Kind), Name: i.Name, Prefix: i.Prefix, User: i.User, Region: i.Region, Service: i.Service,
			})
		}
		out = append(out, rule)
	}
	return out
}

func showProfile(p sandbox.EgressProfile) api.EgressProfile {
	out := api.EgressProfile{
		Id: p.ID, Project: p.Project, Name: p.Name, Version: p.Version, Preset: sandbox.IsPreset(p.Name), Default: api.EgressAction(p.Default),
		DryRun: p.DryRun, Rules: make([]api.EgressRule, 0, len(p.Rules)), CreatedAt: p.CreatedAt.UTC(), UpdatedAt: p.UpdatedAt.UTC(),
		Limits: api.EgressLimits{Connections: p.Limits.Connections, BytesPerSecond: p.Limits.BytesPerSecond, Bytes: p.Limits.Bytes},
	}
	for _, r := range p.Rules {
		rule := api.EgressRule{
			Name: r.Name, Action: api.EgressAction(r.Action), Hosts: r.Hosts, Cidrs: r.CIDRs, Ports: r.Ports,
			Methods: r.Methods, Paths: r.Paths, Passthrough: r.Passthrough,
		}
		for _, s := range r.Schemes {
			rule.Schemes = append(rule.Schemes, api.EgressRuleSchemes(s))
		}
		for _, i := range r.Inject {
			rule.Inject = append(rule.Inject, api.Injection{
				Secret: i.Secret, Kind: api.InjectionKind(i.Kind), Name: i.Name, Prefix: i.Prefix, User: i.User, Region: i.Region, Service: i.Service,
			})
		}
		out.Rules = append(out.Rules, rule)
	}
	return out
}

// ListSecrets answers the project's secrets, without their values.
func (a *API) ListSecrets(w http.ResponseWriter, r *http.Request) {
	rows, err := a.o.Control.Secrets(r.Context(), callerOf(r))
	answer(w, r, http.StatusOK, rows, err, func(rows []sandbox.Secret) api.SecretList {
		list := api.SecretList{Items: make([]api.Secret, 0, len(rows))}
		for _, s := range rows {
			list.Items = append(list.Items, showSecret(s))
		}
		return list
	})
}

// CreateSecret makes a secret. It takes no idempotency key: the hash of the
// request, which such a key is kept with, would tell of the value.
func (a *API) CreateSecret(w http.ResponseWriter, r *http.Request) {
	var body api.CreateSecretRequest
	_, err := rest.Decode(w, r, &body)
	var s sandbox.Secret
	if err == nil {
		req := control.SecretRequest{Name: body.Name, Hosts: body.Hosts, Value: []byte(body.Value)}
		if src := body.Source; src != nil {
			req.Source = &sandbox.SecretSource{Kind: string(src.Kind), TokenURL: src.TokenUrl, ClientID: src.ClientId, Scopes: src.Scopes}
		}
		s, err = a.o.Control.CreateSecret(r.Context(), callerOf(r), req)
	}
	answer(w, r, http.StatusCreated, s, err, showSecret)
}

// GetSecret answers one secret, without its value.
func (a *API) GetSecret(w http.ResponseWriter, r *http.Request, name api.SecretParam) {
	s, err := a.o.Control.Secret(r.Context(), callerOf(r), name)
	answer(w, r, http.StatusOK, s, err, showSecret)
}

// RotateSecret gives a secret another value.
func (a *API) RotateSecret(w http.ResponseWriter, r *http.Request, name api.SecretParam) {
	var body api.RotateSecretRequest
	_, err := rest.Decode(w, r, &body)
	var s sandbox.Secret
	if err == nil {
		s, err = a.o.Control.ReplaceSecret(r.Context(), callerOf(r), name, body.Version, []byte(body.Value))
	}
	answer(w, r, http.StatusOK, s, err, showSecret)
}

// DeleteSecret deletes a secret.
func (a *API) DeleteSecret(w http.ResponseWriter, r *http.Request, name api.SecretParam) {
	if err := a.o.Control.DeleteSecret(r.Context(), callerOf(r), name); err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.NoContent(w)
}

func showSecret(s sandbox.Secret) api.Secret {
	out := api.Secret{
		Id: s.ID, Project: s.Project, Name: s.Name, Hosts: s.Hosts, Version: s.Version, CreatedAt: s.CreatedAt.UTC(), UpdatedAt: s.UpdatedAt.UTC(),
	}
	if s.Source != nil {
		out.Source = &api.SecretSource{
			Kind: api.SecretSourceKind(s.Source.Kind), TokenUrl: s.Source.TokenURL, ClientId: s.Source.ClientID, Scopes: s.Source.Scopes,
		}
	}
	return out
}
