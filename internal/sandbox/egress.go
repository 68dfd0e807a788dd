package sandbox

import "time"

// What leaves a sandbox is decided by its egress profile, in the gateway
// (docs/adr/0008). These are the words that control, the store, the faces, the
// node and the gateway share.

// EgressAction is what a rule does with what it matches.
type EgressAction string

// The actions. Inject is allow with secrets put into the request.
const (
	EgressAllow  EgressAction = "allow"
	EgressDeny   EgressAction = "deny"
	EgressInject EgressAction = "inject"
)

// The presets: profiles that every project has, by these names.
const (
	PresetNone     = "none"     // everything is denied; what a sandbox gets where nothing is asked for
	PresetPublic   = "public"   // any public address
	PresetPackages = "packages" // mirrors of languages' and operating systems' packages
)

// EgressProfile decides every outbound connection of the sandboxes that have
// it. A change makes a new version; sandboxes follow the newest at once.
type EgressProfile struct {
	ID      string       `json:"id"` // "pol_…"; "" of a preset
	Project string       `json:"project"`
	Name    string       `json:"name"`
	Version int64        `json:"version"` // grows by one with each change, from 1
	Rules   []EgressRule `json:"rules,omitempty"`
	Default EgressAction `json:"default"` // allow or deny, of what no rule matches
	// DryRun lets through what the rules deny, and records it. Closed ranges stay
	// closed, and what the gateway doesn't understand stays refused.
	DryRun    bool         `json:"dry_run,omitempty"`
	Limits    EgressLimits `json:"limits"`
	CreatedAt time.Time    `json:"created_at"`
	UpdatedAt time.Time    `json:"updated_at"`
}

// EgressRule matches when each of its fields that is set does; the first rule
// that matches decides. Hosts and CIDRs exclude each other: a rule without
// Hosts is about addresses (plain TCP is spliced), one with Hosts about names
// (HTTP and TLS only, each request is looked at).
type EgressRule struct {
	Name    string       `json:"name,omitempty"` // "rule-N" where it is empty
	Action  EgressAction `json:"action"`
	Hosts   []string     `json:"hosts,omitempty"`   // exact, or "*.suffix" (any depth below, not the suffix itself), or "*"; lower-case A-labels without a final dot
	CIDRs   []string     `json:"cidrs,omitempty"`   // of addresses
	Ports   []string     `json:"ports,omitempty"`   // "443" or "8000-8999"
	Schemes []string     `json:"schemes,omitempty"` // http, https; with CIDRs also tcp
	Methods []string     `json:"methods,omitempty"` // GET, …
	Paths   []string     `json:"paths,omitempty"`   // "/prefix/" and all below, or a glob: "*" within a segment, "**" across
	// Passthrough leaves TLS to the two ends (certificates pinned by a program).
	// The gateway sees the name asked for and no request: every site that this
	// server has is reachable. It excludes Methods, Paths and Inject.
	Passthrough bool        `json:"passthrough,omitempty"`
	Inject      []Injection `json:"inject,omitempty"` // with action inject only
}

// InjectKind is where a secret goes.
type InjectKind string

// The kinds.
const (
	InjectHeader InjectKind = "header" // Name: Prefix + value
	InjectBasic  InjectKind = "basic"  // Authorization: Basic base64(User:value)
	InjectQuery  InjectKind = "query"  // the parameter Name
	InjectSigV4  InjectKind = "sigv4"  // AWS Signature Version 4; the value is "ACCESS_KEY_ID:SECRET_ACCESS_KEY[:SESSION_TOKEN]"
)

// Injection puts one secret into a request.
type Injection struct {
	Secret  string     `json:"secret"` // its name
	Kind    InjectKind `json:"kind"`
	Name    string     `json:"name,omitempty"`    // of the header or parameter; "Authorization" where it is empty and Kind is header
	Prefix  string     `json:"prefix,omitempty"`  // e.g. "Bearer "
	User    string     `json:"user,omitempty"`    // of basic
	Region  string     `json:"region,omitempty"`  // of sigv4
	Service string     `json:"service,omitempty"` // of sigv4
}

// EgressLimits bound one sandbox; 0 is the gateway's own bound, which none exceeds.
type EgressLimits struct {
	Connections    int   `json:"connections,omitempty"`      // open at once; at most MaxEgressConnections
	BytesPerSecond int64 `json:"bytes_per_second,omitempty"` // both ways together
	Bytes          int64 `json:"bytes,omitempty"`            // both ways together, while the machine lives
}

// The bounds of profiles and secrets.
const (
	MaxEgressRules       = 256
	MaxEgressPatterns    = 64 // in each list of a rule
	MaxEgressConnections = 1024
	MaxSecretBytes       = 16 << 10
	MaxSecretHosts       = 32
)

// Secret is a value that only the gateway ever sees. Its value is not here.
type Secret struct {
	ID      string   `json:"id"` // "sec_…"
	Project string   `json:"project"`
	Name    string   `json:"name"`
	Hosts   []string `json:"hosts"` // exact names of the only servers that ever get it; they can't be changed
	Version int64    `json:"version"`
	// Source, where it is set, is where the value comes from: Value then holds the
	// client secret or refresh token.
	Source    *SecretSource `json:"source,omitempty"`
	CreatedAt time.Time     `json:"created_at"`
	UpdatedAt time.Time     `json:"updated_at"`
	Sealed    []byte        `json:"-"` // the value as the store has it
}

// SecretSource fetches short-lived tokens (RFC 6749): sections 4.4 and 6.
type SecretSource struct {
	Kind     string   `json:"kind"` // "client_credentials" or "refresh_token"
	TokenURL string   `json:"token_url"`
	ClientID string   `json:"client_id"`
	Scopes   []string `json:"scopes,omitempty"`
}

// EgressAssignment is what the gateway needs to know of one sandbox. It holds
// secrets in clear: it is never stored, logged or sent anywhere but to the
// gateway.
type EgressAssignment struct {
	Sandbox  string        `json:"sandbox"`
	Project  string        `json:"project"`
	Revision int64         `json:"revision"` // grows with each change; an older one is ignored
	Profile  EgressProfile `json:"profile"`
	Secrets  []SecretValue `json:"secrets,omitempty"` // those that the profile injects, as far as they have a value
	CA       Authority     `json:"ca"`
}

// SecretValue is one secret in clear.
type SecretValue struct {
	Name      string     `json:"name"`
	Hosts     []string   `json:"hosts"`
	Value     []byte     `json:"value"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"` // after which it is not used
}

// Authority is a project's own certificate authority, in PEM.
type Authority struct {
	Cert []byte `json:"cert"`
	Key  []byte `json:"key,omitempty"`
}
