package proxy

import (
	"context"
	"errors"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
)

// The reasons that this package gives, beside those of package policy, the
// resolver, the dialer and the injector. They are stable.
const (
	reasonNoPolicy        = "no_policy"
	reasonNoAuthority     = "no_authority"
	reasonNoDestination   = "no_destination" // what was dialled isn't known
	reasonGatewayPort     = "gateway_port"   // the gateway itself was dialled
	reasonTooMany         = "too_many_connections"
	reasonBytesLimit      = "bytes_limit"
	reasonPolicyChanged   = "policy_changed"
	reasonReset           = "reset"
	reasonNoRequest       = "no_request"
	reasonUnknownProtocol = "unknown_protocol"
	reasonBadHello        = "bad_client_hello"
	reasonNoSNI           = "no_sni"
	reasonBadSNI          = "bad_sni"
	reasonECH             = "ech"
	reasonALPN            = "alpn"
	reasonTLSVersion      = "tls_version"
	reasonTLSHandshake    = "tls_handshake"
	reasonHostMismatch    = "host_mismatch"
	reasonBadHost         = "bad_host"
	reasonBadPath         = "bad_path"
	reasonNoAddress       = "dns_failed"
	reasonHeaderTimeout   = "header_timeout"

	reasonUpstreamTLS         = "upstream_tls"
	reasonUpstreamCertificate = "upstream_certificate"
	reasonUpstreamFailed      = "upstream_failed"
	reasonUpstreamCut         = "upstream_cut" // it ended in the middle of an answer
	reasonClientGone          = "client_gone"  // before there was an answer
	reasonInternal            = "internal"
)

// refusal is an error with a verdict.
type refusal struct {
	verdict audit.Verdict
	reason  string
	rule    string
}

func (r *refusal) Error() string { return string(r.verdict) + ": " + r.reason }

func denied(reason string) *refusal { return &refusal{verdict: audit.Denied, reason: reason} }
func failed(reason string) *refusal { return &refusal{verdict: audit.Failed, reason: reason} }

// deniedBy is what a policy said.
func deniedBy(d policy.Decision) *refusal {
	r := &refusal{verdict: audit.Denied, reason: d.Reason, rule: d.Rule}
	if r.reason == "" {
		r.reason = "rule"
	}
	return r
}

// refusalOf finds out what an error of a room below says, and takes otherwise
// for its reason where it says nothing.
func refusalOf(err error, otherwise string) *refusal {
	var r *refusal
	if errors.As(err, &r) {
		return r
	}
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return failed(otherwise)
	}
	if e.Class == sandbox.Denied || strings.HasPrefix(e.Code, "closed_range") {
		return denied(e.Code)
	}
	return failed(e.Code)
}

// cutError is why something that ran was ended.
type cutError struct{ reason string }

func (c cutError) Error() string { return c.reason }

// cutOf tells why ctx was ended by this package, "" where it wasn't.
func cutOf(ctx context.Context) string {
	var c cutError
	if errors.As(context.Cause(ctx), &c) {
		return c.reason
	}
	return ""
}

// apply puts a refusal into a record.
func (r *refusal) apply(rec *audit.Record) {
	rec.Verdict, rec.Reason = r.verdict, r.reason
	if r.rule != "" {
		rec.Rule = r.rule
	}
}

// cutVerdict is the refusal of what was cut: a policy or a limit said no, or
// it just was ended.
func cutVerdict(reason string) *refusal {
	if reason == reasonReset {
		return failed(reason)
	}
	return denied(reason)
}

// emit completes a record and hands it on.
func (p *Proxy) emit(rec audit.Record, live *Live) {
	if live != nil && live.Policy != nil {
		profile := live.Policy.Profile()
		rec.Profile, rec.Version = profile.Name, profile.Version
	}
	rec.Duration = time.Since(rec.At)
	rec.Rule, rec.Reason = text(rec.Rule), text(rec.Reason)
	rec.Host, rec.Method, rec.Path = text(rec.Host), text(rec.Method), text(rec.Path)
	p.o.Audit(rec)
}

// text bounds what came out of a sandbox, and leaves nothing in it that could
// pass for the end of a line or confuse a terminal.
func text(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s[:min(len(s), audit.MaxText)])
}
