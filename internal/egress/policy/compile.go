package policy

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	maxInjections = 8
	maxText       = 256 // of names, prefixes and the like
)

var (
	ruleName  = regexp.MustCompile(`\A[A-Za-z0-9][A-Za-z0-9 ._/-]{0,63}\z`)
	token     = regexp.MustCompile("\\A[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}\\z")
	method    = regexp.MustCompile(`\A[A-Z][A-Z-]{0,31}\z`)
	printable = regexp.MustCompile(`\A[ -~]{0,256}\z`)
	parameter = regexp.MustCompile(`\A[A-Za-z0-9._~-]{1,256}\z`)
	awsWord   = regexp.MustCompile(`\A[a-z0-9-]{1,64}\z`)
)

// hopByHop are headers that the gateway writes itself or never passes on.
var hopByHop = []string{
	"accept-encoding", "connection", "content-length", "expect", "host", "http2-settings", "keep-alive", "proxy-authenticate",
	"proxy-authorization", "proxy-connection", "range", "te", "trailer", "transfer-encoding", "upgrade",
}

// Compile checks and normalises a profile. Its errors name the rule, the field
// and what to write instead.
func Compile(p sandbox.EgressProfile) (*Policy, error) {
	switch {
	case p.Default != sandbox.EgressAllow && p.Default != sandbox.EgressDeny:
		return nil, invalid(`default: it is "allow" or "deny"`, "default: %q is no decision", clip(string(p.Default)))
	case len(p.Rules) > sandbox.MaxEgressRules:
		return nil, invalid("one rule takes several hosts", "rules: there are %d, and %d at most", len(p.Rules), sandbox.MaxEgressRules)
	case p.Limits.Connections < 0 || p.Limits.Connections > sandbox.MaxEgressConnections:
		return nil, invalid("0 is the gateway's own bound", "limits.connections: %d is not between 0 and %d", p.Limits.Connections, sandbox.MaxEgressConnections)
	case p.Limits.BytesPerSecond < 0:
		return nil, invalid("0 is no limit of its own", "limits.bytes_per_second: %d is negative", p.Limits.BytesPerSecond)
	case p.Limits.Bytes < 0:
		return nil, invalid("0 is no limit of its own", "limits.bytes: %d is negative", p.Limits.Bytes)
	}
	c := &Policy{profile: p, rules: make([]rule, len(p.Rules))}
	c.profile.Rules = slices.Clone(p.Rules)
	names := map[string]bool{defaultRule: true}
	for i := range c.rules {
		in := &c.profile.Rules[i]
		name := in.Name
		if name == "" {
			name = fmt.Sprintf("rule-%d", i+1)
		}
		if !ruleName.MatchString(name) || names[name] {
			return nil, invalid("names of rules are different, short, plain text, and not \"default\"", "rule %d: its name can't be %q", i+1, clip(name))
		}
		names[name] = true
		f := field{rule: name}
		c.rules[i] = f.compile(in)
		if f.err != nil {
			return nil, f.err
		}
		c.rules[i].name = name
	}
	return c, nil
}

func invalid(hint, format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.Invalid, "invalid_egress_profile", format, args...).WithHint("%s", hint)
}

func clip(s string) string { return s[:min(len(s), maxText)] }

// field compiles one rule, and keeps the first error.
type field struct {
	rule string
	err  error
}

func (f *field) bad(name, hint, format string, args ...any) {
	if f.err == nil {
		f.err = invalid(hint, "%s of rule %q: %s", name, f.rule, fmt.Sprintf(format, args...))
	}
}

// list calls one for each entry of a list and returns the entries' normal forms.
func (f *field) list(name, hint string, in []string, one func(string) (string, error)) []string {
	if len(in) > sandbox.MaxEgressPatterns {
		f.bad(name, "split the rule", "there are %d entries, and %d at most", len(in), sandbox.MaxEgressPatterns)
		return nil
	}
	out := make([]string, 0, len(in))
	for _, s := range in {
		normal, err := one(s)
		if err != nil {
			f.bad(name, hint, "%q %v", clip(s), err)
			return nil
		}
		out = append(out, normal)
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

// compile normalises in and returns what it means.
func (f *field) compile(in *sandbox.EgressRule) rule {
	r := rule{action: in.Action, passthrough: in.Passthrough}
	if in.Action != sandbox.EgressAllow && in.Action != sandbox.EgressDeny && in.Action != sandbox.EgressInject {
		f.bad("action", `it is "allow", "deny" or "inject"`, "%q is no action", clip(string(in.Action)))
	}
	if len(in.Hosts) > 0 && len(in.CIDRs) > 0 {
		f.bad("cidrs", "make two rules", "a rule is about hosts or about addresses")
	}
	in.Hosts = f.list("hosts", `a host is "example.com", "*.example.com" or "*"; addresses go to cidrs`, in.Hosts, func(s string) (string, error) {
		h, normal, err := compileHost(s)
		r.hosts = append(r.hosts, h)
		return normal, err
	})
	in.CIDRs = f.list("cidrs", `write "192.0.2.0/24", or "192.0.2.1" for one address; sandboxes have no IPv6`, in.CIDRs, func(s string) (string, error) {
		p, err := compilePrefix(s)
		r.prefixes = append(r.prefixes, p)
		return p.String(), err
	})
	in.Ports = f.list("ports", `write "443" or "8000-8999"`, in.Ports, func(s string) (string, error) {
		p, err := compilePorts(s)
		r.ports = append(r.ports, p)
		return s, err
	})
	in.Schemes = f.list("schemes", `schemes are "http" and "https", and "tcp" in rules without hosts`, in.Schemes, func(s string) (string, error) {
		one := schemeOf(s)
		if s == "tcp" && len(in.Hosts) == 0 {
			one = schemeTCP
		}
		if one == 0 {
			return "", fmt.Errorf("is no scheme here")
		}
		r.schemes |= one
		return s, nil
	})
	in.Methods = f.list("methods", `write them in upper case: "GET"`, in.Methods, func(s string) (string, error) {
		if !method.MatchString(s) {
			return "", fmt.Errorf("is no method")
		}
		r.methods = append(r.methods, s)
		return s, nil
	})
	in.Paths = f.list("paths", `a path is "/prefix/" with all below, "/exactly/this", or a glob: "*" within a segment, "**" across`, in.Paths, func(s string) (string, error) {
		p, normal, err := compilePath(s)
		r.paths = append(r.paths, p)
		return normal, err
	})
	f.together(in, &r)
	return r
}

// together checks fields against each other.
func (f *field) together(in *sandbox.EgressRule, r *rule) {
	if r.looksAtRequests() && len(r.hosts) == 0 && r.schemes.has(schemeTCP) {
		f.bad("schemes", `name hosts, or the schemes "http" or "https"`, "methods and paths need requests, and a rule without hosts is about any TCP")
	}
	if in.Passthrough {
		switch {
		case in.Action != sandbox.EgressAllow:
			f.bad("passthrough", `use it with action "allow"`, "it lets TLS through, so it can't go with action %q", in.Action)
		case len(r.hosts) == 0:
			f.bad("passthrough", "name hosts", "it needs the names of servers")
		case r.looksAtRequests():
			f.bad("passthrough", "leave one of them out", "no request is seen, so it can't go with methods or paths")
		case r.schemes&schemeHTTP != 0:
			f.bad("passthrough", `leave "http" out`, "it is about TLS")
		}
		r.schemes = schemeHTTPS // plain requests to the same hosts need a rule of their own
	}
	f.injections(in, r)
}

func (f *field) injections(in *sandbox.EgressRule, r *rule) {
	if in.Action != sandbox.EgressInject {
		if len(in.Inject) > 0 {
			f.bad("inject", `write action "inject"`, "action %q injects nothing", clip(string(in.Action)))
		}
		return
	}
	switch {
	case len(in.Inject) == 0 || len(in.Inject) > maxInjections:
		f.bad("inject", "say what to inject", "there are %d injections, not between 1 and %d", len(in.Inject), maxInjections)
	case len(r.hosts) == 0:
		f.bad("hosts", "name the hosts of the secret", "secrets go to named hosts only")
	case r.schemes&schemeHTTP != 0:
		f.bad("schemes", `leave "http" out`, "secrets never go out without TLS")
	}
	in.Inject = slices.Clone(in.Inject)
	places := map[string]bool{}
	for i := range in.Inject {
		place := f.injection(&in.Inject[i])
		if places[place] {
			f.bad("inject", "put one secret in one place", "two secrets go to the same place: %s", place)
		}
		places[place] = true
	}
	r.inject = in.Inject
}

// injection checks one injection and names the place that it fills.
func (f *field) injection(in *sandbox.Injection) (place string) {
	if !printable.MatchString(in.Secret) || in.Secret == "" {
		f.bad("inject.secret", "name a secret of the project", "%q is no name", clip(in.Secret))
	}
	place = "header authorization"
	only := sandbox.Injection{Secret: in.Secret, Kind: in.Kind}
	switch in.Kind {
	case sandbox.InjectHeader:
		if in.Name == "" {
			in.Name = "Authorization"
		}
		lower := strings.ToLower(in.Name)
		if !token.MatchString(in.Name) || slices.Contains(hopByHop, lower) {
			f.bad("inject.name", "name a header that belongs to the request", "%q can't be injected", clip(in.Name))
		}
		if !printable.MatchString(in.Prefix) {
			f.bad("inject.prefix", `write something like "Bearer "`, "%q is not short, plain text", clip(in.Prefix))
		}
		only.Name, only.Prefix = in.Name, in.Prefix
		place = "header " + lower
	case sandbox.InjectBasic:
		if !printable.MatchString(in.User) || strings.Contains(in.User, ":") {
			f.bad("inject.user", "a user is short, plain text without a colon", "%q is no user", clip(in.User))
		}
		only.User = in.User
	case sandbox.InjectQuery:
		if !parameter.MatchString(in.Name) {
			f.bad("inject.name", "name the parameter", "%q is no plain parameter", clip(in.Name))
		}
		only.Name = in.Name
		place = "parameter " + in.Name
	case sandbox.InjectSigV4:
		if !awsWord.MatchString(in.Region) || !awsWord.MatchString(in.Service) {
			f.bad("inject.region", `sigv4 needs a region and a service, such as "us-east-1" and "s3"`, "region %q or service %q is none", clip(in.Region), clip(in.Service))
		}
		only.Region, only.Service = in.Region, in.Service
	default:
		f.bad("inject.kind", `it is "header", "basic", "query" or "sigv4"`, "%q is no kind", clip(string(in.Kind)))
	}
	if only != *in {
		f.bad("inject", "leave out what the kind has no use for", "a field is set that kind %q has no use for", clip(string(in.Kind)))
	}
	return place
}

// compilePrefix takes one address for the prefix that holds only it.
func compilePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if a, aerr := netip.ParseAddr(s); aerr == nil {
		p, err = netip.PrefixFrom(a, a.BitLen()), nil
	}
	switch {
	case err != nil:
		return p, fmt.Errorf("is no prefix")
	case !p.Addr().Is4():
		return p, fmt.Errorf("is not IPv4")
	case p != p.Masked():
		return p, fmt.Errorf("has bits behind its length; the prefix is %s", p.Masked())
	}
	return p, nil
}

func compilePorts(s string) (portRange, error) {
	from, to, ranged := strings.Cut(s, "-")
	if !ranged {
		to = from
	}
	first, err1 := strconv.ParseUint(from, 10, 16)
	last, err2 := strconv.ParseUint(to, 10, 16)
	if err1 != nil || err2 != nil || first == 0 || first > last ||
		strconv.FormatUint(first, 10) != from || strconv.FormatUint(last, 10) != to {
		return portRange{}, fmt.Errorf("is no port or range")
	}
	return portRange{uint16(first), uint16(last)}, nil
}
