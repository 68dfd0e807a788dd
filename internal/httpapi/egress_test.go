package httpapi

import (
	"context"
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	profileBody = `"default":"deny","dry_run":true,"limits":{"connections":7,"bytes_per_second":8,"bytes":9},"rules":[
		{"name":"r","action":"inject","hosts":["*.example.com"],"ports":["443"],"schemes":["https"],"methods":["GET"],"paths":["/a/"],
		 "inject":[{"secret":"KEY","kind":"header","name":"X-Key","prefix":"p ","user":"u","region":"r","service":"s"}]},
		{"action":"allow","cidrs":["192.0.2.0/24"],"passthrough":true}]}`
	sourceBody = `"source":{"kind":"refresh_token","token_url":"https://auth.example.com","client_id":"me","scopes":["a"]}}`
)

var profile = sandbox.EgressProfile{
	Name: "web", Default: sandbox.EgressDeny, DryRun: true, Limits: sandbox.EgressLimits{Connections: 7, BytesPerSecond: 8, Bytes: 9},
	Rules: []sandbox.EgressRule{
		{
			Name: "r", Action: sandbox.EgressInject, Hosts: []string{"*.example.com"}, Ports: []string{"443"}, Schemes: []string{"https"},
			Methods: []string{"GET"}, Paths: []string{"/a/"}, Inject: []sandbox.Injection{{
				Secret: "KEY", Kind: sandbox.InjectHeader, Name: "X-Key", Prefix: "p ", User: "u", Region: "r", Service: "s",
			}},
		},
		{Action: sandbox.EgressAllow, CIDRs: []string{"192.0.2.0/24"}, Passthrough: true},
	},
}

var secret = sandbox.Secret{
	ID: sandbox.NewID(sandbox.KindSecret), Project: project, Name: "KEY", Hosts: []string{"api.example.com"}, Version: 2, Sealed: []byte("sealed value"),
	Source:    &sandbox.SecretSource{Kind: "refresh_token", TokenURL: "https://auth.example.com", ClientID: "me", Scopes: []string{"a"}},
	CreatedAt: time.Unix(1_700_000_000, 0), UpdatedAt: time.Unix(1_700_000_001, 0),
}

func (f *fake) profile() sandbox.EgressProfile {
	p := profile
	p.ID, p.Project, p.Version, p.CreatedAt, p.UpdatedAt = sandbox.NewID(sandbox.KindPolicy), project, 4, time.Now(), time.Now()
	return p
}

func (f *fake) CreateProfile(_ context.Context, who sandbox.Caller, p sandbox.EgressProfile, idem sandbox.Idempotency) (sandbox.EgressProfile, bool, error) {
	return f.profile(), false, f.note(who, p, idem)
}

func (f *fake) Profile(_ context.Context, who sandbox.Caller, name string) (sandbox.EgressProfile, error) {
	return f.profile(), f.note(who, name)
}

func (f *fake) Profiles(_ context.Context, who sandbox.Caller) ([]sandbox.EgressProfile, error) {
	return []sandbox.EgressProfile{{Project: project, Name: sandbox.PresetNone, Default: sandbox.EgressDeny}, f.profile()}, f.note(who)
}

func (f *fake) ReplaceProfile(_ context.Context, who sandbox.Caller, p sandbox.EgressProfile) (sandbox.EgressProfile, error) {
	return f.profile(), f.note(who, p)
}

func (f *fake) DeleteProfile(_ context.Context, who sandbox.Caller, name string) error {
	return f.note(who, name)
}

func (f *fake) CreateSecret(_ context.Context, who sandbox.Caller, req control.SecretRequest) (sandbox.Secret, error) {
	return secret, f.note(who, req)
}

func (f *fake) Secret(_ context.Context, who sandbox.Caller, name string) (sandbox.Secret, error) {
	return secret, f.note(who, name)
}

func (f *fake) Secrets(_ context.Context, who sandbox.Caller) ([]sandbox.Secret, error) {
	return []sandbox.Secret{secret}, f.note(who)
}

func (f *fake) ReplaceSecret(_ context.Context, who sandbox.Caller, name string, version int64, value []byte) (sandbox.Secret, error) {
	return secret, f.note(who, name, version, string(value))
}

func (f *fake) DeleteSecret(_ context.Context, who sandbox.Caller, name string) error {
	return f.note(who, name)
}

func (f *fake) SetSandboxEgress(_ context.Context, who sandbox.Caller, id, profile string) (sandbox.Sandbox, error) {
	return f.sb, f.note(who, id, profile)
}

func (f *fake) EgressRecords(_ context.Context, who sandbox.Caller, filter sandbox.EgressAuditFilter) ([]sandbox.EgressRecord, int64, error) {
	if filter.After == beyond {
		return nil, f.last, f.err
	}
	return []sandbox.EgressRecord{record(9)}, f.last, f.note(who, filter)
}

func (f *fake) FollowEgress(ctx context.Context, who sandbox.Caller, filter sandbox.EgressAuditFilter, tell func(sandbox.EgressRecord) error) error {
	f.followed <- filter
	for {
		select {
		case r := <-f.records:
			if err := tell(r); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func record(seq int64) sandbox.EgressRecord {
	return sandbox.EgressRecord{
		Seq: seq, At: time.Unix(1_700_000_000, 0), Sandbox: sandbox.NewID(sandbox.KindSandbox), Project: project, Profile: "web", Version: 4,
		Kind: "http", Verdict: "denied", Rule: "default", Host: "example.com", Dialled: netip.MustParseAddrPort("192.0.2.1:443"),
		Method: "GET", Path: "/a", Sent: 5, Duration: 1500 * time.Millisecond, Injected: []string{"KEY"},
	}
}

func TestEgressTranslation(t *testing.T) {
	b := newBench(t)
	q := b.requests()
	call := func(method, op string) []byte {
		t.Helper()
		a := b.do("project", method, q[op].path, q[op].contentType, q[op].body, "Idempotency-Key", "k", "Accept", "application/json")
		if a.Status != q[op].status {
			t.Fatalf("%s: %d %s", op, a.Status, a.Body)
		}
		if strings.Contains(string(a.Body), "value") {
			t.Errorf("%s tells the secret: %s", op, a.Body)
		}
		return a.Body
	}
	call("POST", "createEgressProfile")
	if got := b.fake.asked[0]; !reflect.DeepEqual(got, profile) || b.fake.asked[1].(sandbox.Idempotency).Key != "k" {
		t.Errorf("%+v", b.fake.asked)
	}
	shown := call("PUT", "replaceEgressProfile")
	replaced := profile
	replaced.Version = 4
	if !reflect.DeepEqual(b.fake.asked[0], replaced) {
		t.Errorf("%+v", b.fake.asked)
	}
	var p api.EgressProfile
	if err := json.Unmarshal(shown, &p); err != nil || p.Version != 4 || p.Preset || p.Id == "" || !reflect.DeepEqual(readRules(p.Rules), profile.Rules) {
		t.Errorf("%v %s", err, shown)
	}
	var list api.EgressProfileList
	shown = call("GET", "listEgressProfiles")
	if err := json.Unmarshal(shown, &list); err != nil || !list.Items[0].Preset || list.Items[0].Rules == nil || strings.Contains(string(shown), "0001-01-01") {
		t.Errorf("%v %s", err, shown)
	}
	call("POST", "createSecret")
	want := control.SecretRequest{Name: "KEY", Hosts: []string{"api.example.com"}, Value: []byte("the value"), Source: secret.Source}
	if !reflect.DeepEqual(b.fake.asked[0], want) {
		t.Errorf("%+v", b.fake.asked)
	}
	call("PUT", "rotateSecret")
	if !slices.Equal(b.fake.asked, []any{"KEY", int64(2), "another"}) {
		t.Errorf("%+v", b.fake.asked)
	}
	call("PUT", "setSandboxEgress")
	if !slices.Equal(b.fake.asked, []any{b.fake.sb.ID, "public"}) {
		t.Errorf("%+v", b.fake.asked)
	}
	b.fake.last = 11
	var records api.EgressRecordList
	shown = call("GET", "listEgressRecords")
	err := json.Unmarshal(shown, &records)
	if err != nil || records.NextAfter != 11 || records.Items[0].Dialled != "192.0.2.1:443" || records.Items[0].Upstream != "" || records.Items[0].DurationSeconds != 1.5 {
		t.Errorf("%v %s", err, shown)
	}
	filter := sandbox.EgressAuditFilter{
		Sandbox: b.fake.sb.ID, Kind: "http", Verdict: "denied", WouldDeny: true, Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Limit: 7,
	}
	if got := b.fake.asked[0].(sandbox.EgressAuditFilter); got != filter {
		t.Errorf("%+v", got)
	}
	// Of sandboxes: asked for, inherited, and none.
	b.do("project", "POST", "/v1/sandboxes", "application/json", `{"template":"base","egress":"web"}`)
	if got := b.fake.asked[0].(control.CreateRequest).Egress; got != "web" {
		t.Errorf("%q", got)
	}
	b.do("project", "POST", "/v1/sandboxes/"+b.fake.sb.ID+"/fork", "application/json", `{"egress":"web"}`)
	if got := b.fake.asked[1].(control.ForkRequest).Egress; got != "web" {
		t.Errorf("%q", got)
	}
	if got := b.api.showSandbox(b.fake.sb).Egress; got != sandbox.PresetNone {
		t.Errorf("%q", got)
	}
	for path, body := range map[string]string{
		"/v1/secrets": `{"name":"K","hosts":["a.example.com"],"value":"12345678\n"}`, "/v1/egress/profiles": `{"name":"../x","default":"deny"}`,
	} {
		b.fake.asked = nil
		if a := b.do("project", "POST", path, "application/json", body); a.Status != 400 || b.fake.asked != nil || strings.Contains(string(a.Body), "12345678") {
			t.Errorf("%s: %d %s", path, a.Status, a.Body)
		}
	}
}

func TestEgressStream(t *testing.T) {
	b := newBench(t)
	b.api.pace = pace{look: 10 * time.Millisecond, comment: 30 * time.Millisecond}
	b.fake.last = 5
	s := b.streamOf("project", "/v1/egress/audit?verdict=denied", "Accept", "text/event-stream")
	if f := <-b.fake.followed; f.After != 5 || f.Verdict != "denied" {
		t.Errorf("from now on is %+v", f)
	}
	s.want(": nothing happened")
	for seq := range int64(300) {
		b.fake.records <- record(seq + 6)
	}
	for want := int64(6); want < 306; {
		got := s.next()
		if strings.HasPrefix(got, ": ") {
			continue
		}
		_, data, _ := strings.Cut(got, "|data: ")
		var r api.EgressRecord
		if err := json.Unmarshal([]byte(data), &r); err != nil || !strings.HasPrefix(got, "event: decision|id: ") || r.Seq != want {
			t.Fatalf("got %q, want %d", got, want)
		}
		want++
	}
	for want, header := range [][]string{nil, {"Last-Event-ID", "1"}} {
		s := b.streamOf("project", "/v1/egress/audit?after=0", append(header, "Accept", "text/event-stream")...)
		if f := <-b.fake.followed; f.After != int64(want) {
			t.Errorf("%v: %+v", header, f)
		}
		_ = s.body.Close()
	}
	if a := b.do("read", "GET", "/v1/egress/audit", "", "", "Accept", "text/event-stream"); a.Status != 403 {
		t.Errorf("%d", a.Status)
	}
	b.fake.err = sandbox.Errorf(sandbox.Unavailable, "egress_unavailable", "x")
	if a := b.do("project", "GET", "/v1/egress/audit", "", "", "Accept", "text/event-stream"); a.Status != 503 {
		t.Errorf("%d", a.Status)
	}
}

// TestEgressStreamEnds: with the key, and with the daemon.
func TestEgressStreamEnds(t *testing.T) {
	b := newBench(t)
	b.api.pace = pace{look: 10 * time.Millisecond, comment: time.Hour}
	s := b.streamOf("project", "/v1/egress/audit?after=2", "Accept", "text/event-stream")
	b.revoked.Store(true)
	s.want(`event: error|id: 2|data: {"class":"denied"`, "end")
	b.revoked.Store(false)
	s = b.streamOf("project", "/v1/egress/audit", "Accept", "text/event-stream")
	b.fake.records <- record(7)
	s.want("event: decision|id: 7|")
	b.stop()
	s.want(`event: error|id: 7|data: {"class":"unavailable","code":"stream_cut"`, "end")
}
