package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"cloche.dev/cloche/api"
)

// egress is the fake daemon's part for profiles, secrets and the audit.
func (f *fake) egress(mux *http.ServeMux) {
	f.profiles = []api.EgressProfile{{Name: "none", Preset: true, Default: api.EgressDeny, Rules: []api.EgressRule{}}}
	for pattern, h := range map[string]http.HandlerFunc{
		"GET /v1/egress/profiles":            f.listProfiles,
		"POST /v1/egress/profiles":           f.createProfile,
		"GET /v1/egress/profiles/{name}":     f.oneProfile,
		"PUT /v1/egress/profiles/{name}":     f.replaceProfile,
		"DELETE /v1/egress/profiles/{name}":  f.oneProfile,
		"PUT /v1/sandboxes/{sandbox}/egress": f.setEgress,
		"GET /v1/egress/audit":               f.audit,
		"GET /v1/secrets":                    f.listSecrets,
		"POST /v1/secrets":                   f.createSecret,
		"GET /v1/secrets/{name}":             f.oneSecret,
		"PUT /v1/secrets/{name}":             f.oneSecret,
		"DELETE /v1/secrets/{name}":          f.oneSecret,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			f.mu.Lock()
			defer f.mu.Unlock()
			h(w, r)
		})
	}
}

func (f *fake) listProfiles(w http.ResponseWriter, _ *http.Request) {
	reply(w, 200, api.EgressProfileList{Items: f.profiles})
}

func (f *fake) createProfile(w http.ResponseWriter, r *http.Request) {
	var req api.CreateEgressProfileRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	p := api.EgressProfile{Id: "pol_a", Name: req.Name, Version: 1, Default: req.Default, Rules: req.Rules, DryRun: req.DryRun, UpdatedAt: time.Now()}
	f.profiles = append(f.profiles, p)
	reply(w, 201, p)
}

// profile finds the request's profile, or answers that there is none.
func (f *fake) profile(w http.ResponseWriter, r *http.Request) int {
	i := slices.IndexFunc(f.profiles, func(p api.EgressProfile) bool { return p.Name == r.PathValue("name") })
	if i < 0 {
		problem(w, 404, api.ClassNotFound, "profile_not_found", "there is no egress profile "+r.PathValue("name"), "")
	}
	return i
}

func (f *fake) oneProfile(w http.ResponseWriter, r *http.Request) {
	switch i := f.profile(w, r); {
	case i < 0:
	case r.Method == http.MethodDelete:
		f.profiles = slices.Delete(f.profiles, i, i+1)
		w.WriteHeader(http.StatusNoContent)
	default:
		reply(w, 200, f.profiles[i])
	}
}

func (f *fake) replaceProfile(w http.ResponseWriter, r *http.Request) {
	var req api.ReplaceEgressProfileRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	i := f.profile(w, r)
	switch {
	case i < 0:
	case f.profiles[i].Preset:
		problem(w, 409, api.ClassFailedPrecondition, "preset_fixed", "the profile can't be changed", "")
	case f.profiles[i].Version != req.Version:
		problem(w, 409, api.ClassConflict, "version_mismatch", "it has another version by now", "read it again")
	default:
		p := &f.profiles[i]
		p.Version, p.Rules, p.Default, p.DryRun = p.Version+1, req.Rules, req.Default, req.DryRun
		reply(w, 200, *p)
	}
}

func (f *fake) setEgress(w http.ResponseWriter, r *http.Request) {
	var req api.SetEgressRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	for i := range f.sandboxes {
		if f.sandboxes[i].Id == r.PathValue("sandbox") {
			f.sandboxes[i].Egress = req.Profile
			reply(w, 200, f.sandboxes[i])
		}
	}
}

// audit has two records, and a third one for who follows, whom it then refuses.
func (f *fake) audit(w http.ResponseWriter, r *http.Request) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	all := []api.EgressRecord{
		{
			Seq: 1, At: at, Sandbox: "sbx_b" + idTail, Profile: "web", Version: 3, Kind: api.EgressHTTP, Verdict: api.EgressAllowed, Rule: "rule-1",
			Scheme: "https", Host: "example.com", Method: "GET", Path: "/a\x1b[31m", Status: 200, SentBytes: 10, ReceivedBytes: 2048, Injected: []string{"KEY"},
		},
		{Seq: 2, At: at, Sandbox: "sbx_b" + idTail, Kind: api.EgressTCP, Verdict: api.EgressDenied, Dialled: "192.0.2.1:22", Rule: "default", Profile: "web", Version: 3, Reason: "denied"},
		{Seq: 3, At: at, Sandbox: "sbx_b" + idTail, Kind: api.EgressPacket, Verdict: api.EgressDenied, Reason: "udp", Count: 7},
	}
	q := r.URL.Query()
	if q.Get("verdict") != "" && (q.Get("would_deny") != "true" || q.Get("verdict") != "denied") {
		problem(w, 400, api.ClassInvalid, "x", "unexpected query", "")
		return
	}
	if !strings.Contains(r.Header.Get("Accept"), "event-stream") {
		list := api.EgressRecordList{Items: []api.EgressRecord{}, NextAfter: 2}
		for _, rec := range all[:2] {
			if q.Get("verdict") == "" || string(rec.Verdict) == q.Get("verdict") {
				list.Items = append(list.Items, rec)
			}
		}
		reply(w, 200, list)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	b, _ := json.Marshal(all[2])
	fmt.Fprintf(w, "retry: 1000\n\nevent: decision\nid: 3\ndata: %s\n\n", b)
	fmt.Fprint(w, "event: error\nid: 3\ndata: {\"class\":\"denied\",\"code\":\"unauthenticated\",\"message\":\"the key was revoked\"}\n\n")
}

func (f *fake) listSecrets(w http.ResponseWriter, _ *http.Request) {
	reply(w, 200, api.SecretList{Items: f.secrets})
}

func (f *fake) createSecret(w http.ResponseWriter, r *http.Request) {
	var req api.CreateSecretRequest
	_ = json.NewDecoder(r.Body).Decode(&req)
	s := api.Secret{Id: "sec_a", Name: req.Name, Hosts: req.Hosts, Version: 1, Source: req.Source, UpdatedAt: time.Now()}
	f.secrets, f.values[s.Name] = append(f.secrets, s), req.Value
	reply(w, 201, s)
}

func (f *fake) oneSecret(w http.ResponseWriter, r *http.Request) {
	i := slices.IndexFunc(f.secrets, func(s api.Secret) bool { return s.Name == r.PathValue("name") })
	if i < 0 {
		problem(w, 404, api.ClassNotFound, "secret_not_found", "there is no secret "+r.PathValue("name"), "")
		return
	}
	switch r.Method {
	case http.MethodDelete:
		f.secrets = slices.Delete(f.secrets, i, i+1)
		w.WriteHeader(http.StatusNoContent)
		return
	case http.MethodPut:
		var req api.RotateSecretRequest
		_ = json.NewDecoder(r.Body).Decode(&req)
		if req.Value != "two words" {
			problem(w, 400, api.ClassInvalid, "x", fmt.Sprintf("unexpected value of %d bytes", len(req.Value)), "")
			return
		}
		f.secrets[i].Version++
	}
	reply(w, 200, f.secrets[i])
}
