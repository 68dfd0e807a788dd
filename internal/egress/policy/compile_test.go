package policy

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"cloche.dev/cloche/internal/sandbox"
)

func TestCompileNormalises(t *testing.T) {
	p := compile(t, `{"name":"n","version":3,"default":"deny","limits":{"connections":5},"rules":[
		{"action":"inject","hosts":["API.Example.COM.","*.Bücher.de","*"],"paths":["/%61/\u00fc"],"inject":[{"secret":"s","kind":"header"},{"secret":"t","kind":"query","name":"key"}]},
		{"action":"allow","cidrs":["10.0.0.0/8","1.2.3.4"],"ports":["1-2"],"schemes":["tcp"]}]}`)
	got := p.Profile()
	want := sandbox.EgressProfile{
		Name: "n", Version: 3, Default: "deny", Limits: sandbox.EgressLimits{Connections: 5},
		Rules: []sandbox.EgressRule{
			{
				Action: "inject", Hosts: []string{"api.example.com", "*.xn--bcher-kva.de", "*"}, Paths: []string{"/a/%C3%BC"},
				Inject: []sandbox.Injection{{Secret: "s", Kind: "header", Name: "Authorization"}, {Secret: "t", Kind: "query", Name: "key"}},
			},
			{Action: "allow", CIDRs: []string{"10.0.0.0/8", "1.2.3.4/32"}, Ports: []string{"1-2"}, Schemes: []string{"tcp"}},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	again, err := Compile(got)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(got, again.Profile()); diff != "" {
		t.Errorf("the normal form changes: %s", diff)
	}
}

func TestCompileLeavesItsArgumentAlone(t *testing.T) {
	in := sandbox.EgressProfile{Default: "deny", Rules: []sandbox.EgressRule{{
		Action: "inject", Hosts: []string{"A.example"}, Inject: []sandbox.Injection{{Secret: "s", Kind: "header"}},
	}}}
	p, err := Compile(in)
	if err != nil {
		t.Fatal(err)
	}
	in.Rules[0].Hosts[0] = "evil.example"
	in.Rules[0].Inject[0].Secret = "other"
	if r := p.Profile().Rules[0]; r.Hosts[0] != "a.example" || r.Inject[0] != (sandbox.Injection{Secret: "s", Kind: "header", Name: "Authorization"}) {
		t.Errorf("the policy follows what was compiled: %+v", r)
	}
}

func TestCompileRefuses(t *testing.T) {
	rule := func(fields string) string { return `{"default":"deny","rules":[{"name":"it",` + fields + `}]}` }
	host := `"hosts":["a.example"],`
	many := strings.TrimSuffix(strings.Repeat(`"a.example",`, sandbox.MaxEgressPatterns+1), ",")
	for text, field := range map[string]string{
		`{}`:                   "default",
		`{"default":"inject"}`: "default",
		`{"default":"deny","limits":{"connections":1025}}`:                                                         "limits.connections",
		`{"default":"deny","limits":{"bytes":-1}}`:                                                                 "limits.bytes",
		`{"default":"deny","limits":{"bytes_per_second":-1}}`:                                                      "limits.bytes_per_second",
		`{"default":"deny","rules":[` + strings.Repeat(`{"action":"deny"},`, 256) + `{"action":"deny"}]}`:          "rules",
		`{"default":"deny","rules":[{"name":"default","action":"deny"}]}`:                                          "name",
		`{"default":"deny","rules":[{"name":"rule-2","action":"deny"},{"action":"deny"}]}`:                         "name",
		`{"default":"deny","rules":[{"name":"a\nb","action":"deny"}]}`:                                             "name",
		rule(`"action":"permit"`):                                                                                  "action",
		rule(`"action":"allow","hosts":["1.2.3.4"]`):                                                               "hosts",
		rule(`"action":"allow","hosts":["a.*.example"]`):                                                           "hosts",
		rule(`"action":"allow","hosts":["*a.example"]`):                                                            "hosts",
		rule(`"action":"allow","hosts":["*."]`):                                                                    "hosts",
		rule(`"action":"allow","hosts":["*.*"]`):                                                                   "hosts",
		rule(`"action":"allow","hosts":["*.1"]`):                                                                   "hosts",
		rule(`"action":"allow","hosts":["a.example:443"]`):                                                         "hosts",
		rule(`"action":"allow","hosts":[""]`):                                                                      "hosts",
		rule(`"action":"allow","hosts":[` + many + `]`):                                                            "hosts",
		rule(`"action":"allow",` + host + `"cidrs":["1.2.3.4"]`):                                                   "cidrs",
		rule(`"action":"allow","cidrs":["1.2.3.4/8"]`):                                                             "cidrs",
		rule(`"action":"allow","cidrs":["1.2.3/24"]`):                                                              "cidrs",
		rule(`"action":"allow","cidrs":["01.2.3.4"]`):                                                              "cidrs",
		rule(`"action":"allow","cidrs":["::/0"]`):                                                                  "cidrs",
		rule(`"action":"allow","cidrs":["::ffff:1.2.3.4/128"]`):                                                    "cidrs",
		rule(`"action":"allow","cidrs":["a.example"]`):                                                             "cidrs",
		rule(`"action":"allow","ports":["0"]`):                                                                     "ports",
		rule(`"action":"allow","ports":["65536"]`):                                                                 "ports",
		rule(`"action":"allow","ports":["080"]`):                                                                   "ports",
		rule(`"action":"allow","ports":["+80"]`):                                                                   "ports",
		rule(`"action":"allow","ports":["90-80"]`):                                                                 "ports",
		rule(`"action":"allow","ports":["80-"]`):                                                                   "ports",
		rule(`"action":"allow","ports":["http"]`):                                                                  "ports",
		rule(`"action":"allow",` + host + `"schemes":["tcp"]`):                                                     "schemes",
		rule(`"action":"allow",` + host + `"schemes":["HTTP"]`):                                                    "schemes",
		rule(`"action":"allow","schemes":["udp"]`):                                                                 "schemes",
		rule(`"action":"allow",` + host + `"methods":["get"]`):                                                     "methods",
		rule(`"action":"allow",` + host + `"methods":["*"]`):                                                       "methods",
		rule(`"action":"allow","methods":["GET"]`):                                                                 "schemes",
		rule(`"action":"allow","paths":["/a"],"schemes":["tcp","http"]`):                                           "schemes",
		rule(`"action":"allow",` + host + `"paths":["a"]`):                                                         "paths",
		rule(`"action":"allow",` + host + `"paths":[""]`):                                                          "paths",
		rule(`"action":"allow",` + host + `"paths":["/a/../b"]`):                                                   "paths",
		rule(`"action":"allow",` + host + `"paths":["/a//b"]`):                                                     "paths",
		rule(`"action":"allow",` + host + `"paths":["/a;x"]`):                                                      "paths",
		rule(`"action":"allow",` + host + `"paths":["/***"]`):                                                      "paths",
		rule(`"action":"allow",` + host + `"paths":["/a?b"]`):                                                      "paths",
		rule(`"action":"allow",` + host + `"paths":["/` + strings.Repeat("*a", 17) + `"]`):                         "paths",
		rule(`"action":"deny",` + host + `"passthrough":true`):                                                     "passthrough",
		rule(`"action":"allow","passthrough":true`):                                                                "passthrough",
		rule(`"action":"allow",` + host + `"paths":["/"],"passthrough":true`):                                      "passthrough",
		rule(`"action":"allow",` + host + `"schemes":["http"],"passthrough":true`):                                 "passthrough",
		rule(`"action":"inject",` + host + `"passthrough":true,"inject":[{"secret":"s","kind":"header"}]`):         "passthrough",
		rule(`"action":"allow",` + host + `"inject":[{"secret":"s","kind":"header"}]`):                             "inject",
		rule(`"action":"inject",` + host + `"inject":[]`):                                                          "inject",
		rule(`"action":"inject","inject":[{"secret":"s","kind":"header"}]`):                                        "hosts",
		rule(`"action":"inject",` + host + `"schemes":["http","https"],"inject":[{"secret":"s","kind":"header"}]`): "schemes",
	} {
		refused(t, text, field)
	}
	for in, field := range map[string]string{
		`{"kind":"header"}`:                                                                       "inject.secret",
		`{"secret":"s\n","kind":"header"}`:                                                        "inject.secret",
		`{"secret":"s","kind":"cookie"}`:                                                          "inject.kind",
		`{"secret":"s","kind":"header","name":"Host"}`:                                            "inject.name",
		`{"secret":"s","kind":"header","name":"transfer-encoding"}`:                               "inject.name",
		`{"secret":"s","kind":"header","name":"X Y"}`:                                             "inject.name",
		`{"secret":"s","kind":"header","prefix":"a\r\nX: "}`:                                      "inject.prefix",
		`{"secret":"s","kind":"header","user":"u"}`:                                               "inject",
		`{"secret":"s","kind":"basic","user":"a:b"}`:                                              "inject.user",
		`{"secret":"s","kind":"query"}`:                                                           "inject.name",
		`{"secret":"s","kind":"query","name":"a&b"}`:                                              "inject.name",
		`{"secret":"s","kind":"sigv4","region":"us-east-1"}`:                                      "inject.region",
		`{"secret":"s","kind":"header"},{"secret":"t","kind":"basic"}`:                            "inject",
		`{"secret":"s","kind":"header","name":"X-A"},{"secret":"t","kind":"header","name":"x-a"}`: "inject",
	} {
		refused(t, rule(`"action":"inject",`+host+`"inject":[`+in+`]`), field)
	}
}

func refused(t *testing.T, text, field string) {
	t.Helper()
	var p sandbox.EgressProfile
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	_, err := Compile(p)
	e := sandbox.AsError(err)
	if e == nil || e.Class != sandbox.Invalid || e.Code != "invalid_egress_profile" || e.Hint == "" || len(e.Message) > 1024 {
		t.Errorf("%.200s: %v", text, err)
		return
	}
	if !strings.Contains(e.Message, field) || strings.Contains(text, `"it"`) && !strings.HasPrefix(e.Message, fmt.Sprintf("%s of rule %q", field, "it")) {
		t.Errorf("%.200s: %q names something else than %s", text, e.Message, field)
	}
}

func FuzzCompile(f *testing.F) {
	f.Add([]byte(mixed))
	f.Add([]byte(`{"default":"allow","rules":[{"action":"allow","hosts":["*.a"],"paths":["/*/**"],"ports":["1-2"]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var p sandbox.EgressProfile
		if json.Unmarshal(text, &p) != nil {
			return
		}
		c, err := Compile(p)
		if err != nil {
			if sandbox.AsError(err).Class != sandbox.Invalid {
				t.Error(err)
			}
			return
		}
		again, err := Compile(c.Profile())
		if err != nil {
			t.Fatalf("the normal form is refused: %v", err)
		}
		if diff := cmp.Diff(c.Profile(), again.Profile()); diff != "" {
			t.Errorf("the normal form changes: %s", diff)
		}
	})
}
