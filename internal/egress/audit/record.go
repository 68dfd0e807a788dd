package audit

import (
	"net/netip"
	"time"
)

// Verdict is how something that a sandbox tried came out.
type Verdict string

// The verdicts. Failed is what was allowed and then could not be done.
const (
	Allowed Verdict = "allowed"
	Denied  Verdict = "denied"
	Failed  Verdict = "failed"
)

// Kind is what was decided about.
type Kind string

// The kinds.
const (
	DNS    Kind = "dns"    // one question
	TCP    Kind = "tcp"    // one connection by its address, or one whose protocol was refused
	TLS    Kind = "tls"    // one TLS connection that was passed through or refused before any request
	HTTP   Kind = "http"   // one request
	Packet Kind = "packet" // packets that the kernel dropped
)

// Record is one decision of the gateway. Strings come from inside a sandbox:
// whoever makes a Record bounds them (MaxText) and leaves queries out of Path.
type Record struct {
	At        time.Time      `json:"at"` // when it began
	Sandbox   string         `json:"sandbox"`
	Project   string         `json:"project"`
	Profile   string         `json:"profile"` // its name
	Version   int64          `json:"version"`
	Kind      Kind           `json:"kind"`
	Verdict   Verdict        `json:"verdict"`
	WouldDeny bool           `json:"would_deny,omitempty"` // of a dry run
	Rule      string         `json:"rule,omitempty"`       // the rule's name, or "default"
	Reason    string         `json:"reason,omitempty"`     // a stable code; "" where a rule allowed it
	Host      string         `json:"host,omitempty"`
	Dialled   netip.AddrPort `json:"dialled,omitzero"`  // what the sandbox dialled
	Upstream  netip.AddrPort `json:"upstream,omitzero"` // what the gateway connected to
	Scheme    string         `json:"scheme,omitempty"`  // tcp, http, https
	Method    string         `json:"method,omitempty"`
	Path      string         `json:"path,omitempty"` // without the query
	Status    int            `json:"status,omitempty"`
	Injected  []string       `json:"injected,omitempty"` // names of secrets
	Sent      int64          `json:"sent"`               // bytes from the sandbox
	Received  int64          `json:"received"`           // bytes to the sandbox
	Duration  time.Duration  `json:"duration"`
	Count     uint64         `json:"count,omitempty"` // of packets
}

// MaxText bounds each string of a Record, in bytes.
const MaxText = 512
