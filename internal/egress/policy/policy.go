// Package policy decides what may leave a sandbox: it compiles an egress
// profile and answers for addresses, names, TLS handshakes and requests. It
// also knows the one form of hosts' names and of paths, and which ranges of
// addresses are closed to everybody.
//
// Invariants: it does no I/O and keeps no state, so a Policy may be asked from
// anywhere at once; rules are walked in order and the first that matches
// decides; what is malformed or not known is denied, in a dry run too. Nothing
// here trusts its callers to have normalised what they ask about. The gateway's
// proxy, dialer and resolver call it; control compiles profiles to check them.
package policy

import (
	"net/netip"
	"slices"

	"cloche.dev/cloche/internal/sandbox"
)

// The reasons that a Decision gives.
const (
	ReasonRule           = "denied_by_rule"
	ReasonDefault        = "denied_by_default"
	ReasonHost           = "malformed_host"
	ReasonAddress        = "no_address"
	ReasonPath           = "malformed_path"
	ReasonScheme         = "unknown_scheme"
	ReasonSecretNeedsTLS = "secret_needs_tls"
	ReasonNotPassthrough = "not_passthrough"
)

// defaultRule is what a Decision calls the end of the rules.
const defaultRule = "default"

// Policy is a compiled egress profile. It is immutable; the zero Policy denies
// everything.
type Policy struct {
	profile sandbox.EgressProfile
	rules   []rule
}

// Request is what is to be decided once a request is known.
type Request struct {
	Scheme string // http or https
	Host   string // as CanonicalHost gives it
	Port   uint16
	// Method and Path are empty of a TLS connection that is to be passed through:
	// then the connection as a whole is decided.
	Method string
	Path   string     // as CanonicalPath gives it, without a query
	Addr   netip.Addr // that the gateway chose for Host
}

// Decision is what a profile says.
type Decision struct {
	Allow       bool
	WouldDeny   bool // allowed only because the profile is a dry run
	Passthrough bool // of TLS: not to be terminated
	Rule        string
	Reason      string // a stable code; "" where a rule or the default allows it
	Inject      []sandbox.Injection
}

// Profile returns the profile in its normal form. Callers don't change its slices.
func (p *Policy) Profile() sandbox.EgressProfile { return p.profile }

func (p *Policy) deny(rule, reason string) Decision {
	return Decision{Allow: p.profile.DryRun, WouldDeny: p.profile.DryRun, Rule: rule, Reason: reason}
}

func (p *Policy) end() Decision {
	if p.profile.Default == sandbox.EgressAllow {
		return Decision{Allow: true, Rule: defaultRule}
	}
	return p.deny(defaultRule, ReasonDefault)
}

// Resolves tells whether the profile could ever let something go to a name, so
// that asking the world for its address tells nobody more than the profile
// allows anyway.
func (p *Policy) Resolves(name string) bool { return p.Name(name).Allow }

// Name is Resolves with the rule that says so.
func (p *Policy) Name(name string) Decision {
	if c, err := CanonicalHost(name); err != nil || c != name {
		return Decision{Reason: ReasonHost}
	}
	for i := range p.rules {
		r := &p.rules[i]
		switch {
		case !r.matchesHost(name):
		case r.action != sandbox.EgressDeny: // a rule about addresses: the name may have one of them
			return Decision{Allow: true, Rule: r.name}
		case r.unconditional():
			return p.deny(r.name, ReasonRule)
		}
	}
	return p.end()
}

// Address decides a connection by what was dialled. Where inspect is true the
// names in it decide, and the Decision says nothing.
func (p *Policy) Address(a netip.AddrPort) (d Decision, inspect bool) {
	if !a.IsValid() {
		return Decision{Reason: ReasonAddress}, false
	}
	for i := range p.rules {
		r := &p.rules[i]
		switch {
		case !r.matchesPort(a.Port()):
		case !r.byAddress():
			return Decision{}, true
		case !r.matchesAddr(a.Addr()):
		case r.action == sandbox.EgressDeny:
			return p.deny(r.name, ReasonRule), false
		default:
			return Decision{Allow: true, Rule: r.name}, false
		}
	}
	return p.end(), false
}

// TLS decides whether a handshake with a host goes on, and how. It is denied
// where no request to the host could be allowed. A connection that is passed
// through has to be decided by Request too, with the chosen address and
// neither Method nor Path, since rules about addresses may come first.
func (p *Policy) TLS(host string, port uint16) Decision {
	if c, err := CanonicalHost(host); err != nil || c != host {
		return Decision{Reason: ReasonHost}
	}
	var maybe *rule   // the first rule that allows what isn't known yet
	requests := false // a rule so far looks at requests, so they must be seen
	for i := range p.rules {
		r := &p.rules[i]
		if !r.matchesPort(port) || !r.schemes.has(schemeHTTPS) || !r.matchesHost(host) {
			continue
		}
		allows := r.action != sandbox.EgressDeny
		switch {
		case r.looksAtRequests() || len(r.prefixes) > 0:
			requests = requests || r.looksAtRequests()
			if allows && maybe == nil {
				maybe = r
			}
		case r.passthrough && !requests:
			return Decision{Allow: true, Passthrough: true, Rule: r.name}
		case maybe != nil:
			return Decision{Allow: true, Rule: maybe.name}
		case allows:
			return Decision{Allow: true, Rule: r.name}
		default:
			return p.deny(r.name, ReasonRule)
		}
	}
	if maybe != nil {
		return Decision{Allow: true, Rule: maybe.name}
	}
	return p.end()
}

// Request decides one request, or one TLS connection to be passed through.
func (p *Policy) Request(q Request) Decision {
	scheme := schemeOf(q.Scheme)
	if scheme == 0 {
		return Decision{Reason: ReasonScheme}
	}
	if c, err := CanonicalHost(q.Host); err != nil || c != q.Host {
		return Decision{Reason: ReasonHost}
	}
	if q.Method == "" && q.Path == "" && scheme == schemeHTTPS {
		return p.connection(q)
	}
	if c, err := CanonicalPath(q.Path); err != nil || c != q.Path || q.Method == "" {
		return Decision{Reason: ReasonPath}
	}
	path := readingsOf(q.Path)
	for i := range p.rules {
		r := &p.rules[i]
		if !r.matchesPort(q.Port) || !r.schemes.has(scheme) || !r.matchesHost(q.Host) || !r.matchesAddr(q.Addr) {
			continue
		}
		if len(r.methods) > 0 && !slices.Contains(r.methods, q.Method) || !r.matchesPath(path) {
			continue
		}
		switch r.action {
		case sandbox.EgressAllow:
			return Decision{Allow: true, Rule: r.name}
		case sandbox.EgressInject:
			if scheme != schemeHTTPS || q.Port == 80 {
				return Decision{Rule: r.name, Reason: ReasonSecretNeedsTLS} // in a dry run too: it would go out bare
			}
			return Decision{Allow: true, Rule: r.name, Inject: slices.Clone(r.inject)}
		default:
			return p.deny(r.name, ReasonRule)
		}
	}
	return p.end()
}

// connection decides a TLS connection that nobody looks into. Only a rule that
// says passthrough, or one that allows any TCP to the address, lets it go.
func (p *Policy) connection(q Request) Decision {
	for i := range p.rules {
		r := &p.rules[i]
		if !r.matchesPort(q.Port) || !r.schemes.has(schemeHTTPS) || !r.matchesHost(q.Host) || !r.matchesAddr(q.Addr) {
			continue
		}
		switch {
		case r.passthrough || r.byAddress() && r.action == sandbox.EgressAllow:
			return Decision{Allow: true, Passthrough: true, Rule: r.name}
		case r.action == sandbox.EgressDeny && !r.looksAtRequests():
			d := p.deny(r.name, ReasonRule)
			d.Passthrough = d.Allow
			return d
		default:
			return Decision{Rule: r.name, Reason: ReasonNotPassthrough}
		}
	}
	return Decision{Rule: defaultRule, Reason: ReasonNotPassthrough}
}
