package sandbox

import "time"

// EgressAction is what a rule does to what it matches.
type EgressAction string

// The actions. Inject allows too, and puts secrets into the request.
const (
	EgressAllow  EgressAction = "allow"
	EgressDeny   EgressAction = "deny"
	EgressInject EgressAction = "inject"
)

// The profiles that every project has: their names are taken, they have
// version 1 and never change.
const (
	EgressNone     = "none"     // everything is denied; what a create gets where it names nothing
	EgressPublic   = "public"   // every public address
	EgressPackages = "packages" // the mirrors of programming languages and distributions
)

// EgressProfile is the ordered rules that decide every outbound connection of
// the sandboxes that it is attached to. The first rule that matches decides,
// Default where none does. Each change makes the next version, which holds
// for running sandboxes at once. Closed ranges (private, link-local, loopback,
// metadata and every other special-purpose block, the host's own addresses)
// are closed whatever a rule says.
type EgressProfile struct {
	ID        string       `json:"id"` // "" for those that every project has
	Project   string       `json:"project"`
	Name      string       `json:"name"`
	Version   int64        `json:"version"`
	Rules     []EgressRule `json:"rules"`
	Default   EgressAction `json:"default"` // allow or deny
	DryRun    bool         `json:"dry_run,omitempty"`
	Limits    EgressLimits `json:"limits"`
	CreatedAt time.Time    `json:"created_at"`
	UpdatedAt time.Time    `json:"updated_at"`
}

// EgressRule matches where each of its conditions that is not empty matches.
//
// One with neither hosts, schemes, methods nor paths is an *address rule*: it
// is decided by address and port alone, and what it allows is carried byte by
// byte. Every other is a *host rule*: what it might allow is understood
// (HTTP/1.1, HTTP/2, WebSocket, TLS) and each request is decided by itself.
type EgressRule struct {
	Name   string       `json:"name,omitempty"`
	Action EgressAction `json:"action"`
	// Hosts are exact names, or "*.suffix" for every name below suffix (not
	// suffix itself), or "*"; in ASCII (punycode), lower case, no trailing dot.
	Hosts   []string `json:"hosts,omitempty"`
	CIDRs   []string `json:"cidrs,omitempty"`   // IPv4; of the address that the gateway connects to
	Ports   []string `json:"ports,omitempty"`   // "443" or "8000-8099"
	Schemes []string `json:"schemes,omitempty"` // "http", "https"; WebSockets are those they begin as
	Methods []string `json:"methods,omitempty"` // upper case
	// Paths are prefixes that end at a segment ("/simple" matches /simple and
	// /simple/x), or globs where they hold a *: * is within a segment, ** is any number of segments.
	Paths []string `json:"paths,omitempty"`
	// Passthrough carries TLS unopened to the gateway's own resolution of its
	// SNI. It trusts every site on that server. Not with methods, paths or inject.
	Passthrough bool        `json:"passthrough,omitempty"`
	Inject      []Injection `json:"inject,omitempty"` // of action inject; over verified TLS only
}

// InjectInto is the place of a request that a secret is put into.
type InjectInto string

// The places.
const (
	IntoHeader InjectInto = "header" // Name, by Format
	IntoBasic  InjectInto = "basic"  // Authorization: Basic, User and the secret
	IntoQuery  InjectInto = "query"  // parameter Name
	IntoSigV4  InjectInto = "sigv4"  // AWS Signature Version 4; the secret is "ACCESS_KEY_ID:SECRET_ACCESS_KEY[:SESSION_TOKEN]"
)

// Injection puts one secret into a request.
type Injection struct {
	Secret  string     `json:"secret"` // its name
	Into    InjectInto `json:"into"`
	Name    string     `json:"name,omitempty"`
	Format  string     `json:"format,omitempty"` // of a header: "Bearer {}"; "" is "{}"
	User    string     `json:"user,omitempty"`
	Region  string     `json:"region,omitempty"`
	Service string     `json:"service,omitempty"`
}

// EgressLimits bound one sandbox. 0 is the gateway's own bound (connections)
// or none.
type EgressLimits struct {
	Connections    int   `json:"connections,omitempty"`      // at once
	BytesPerSecond int64 `json:"bytes_per_second,omitempty"` // each direction
	Bytes          int64 `json:"bytes,omitempty"`            // both directions, as long as its machine lives
}

// SecretSource is where a secret's value comes from.
type SecretSource string

// The sources.
const (
	SecretStatic            SecretSource = "static"
	SecretClientCredentials SecretSource = "oauth_client_credentials"
	SecretRefreshToken      SecretSource = "oauth_refresh_token"
)

// Secret is a value that only the egress gateway ever sees, without that
// value. Hosts are fixed when it is made: it is never sent anywhere else.
type Secret struct {
	ID        string       `json:"id"`
	Project   string       `json:"project"`
	Name      string       `json:"name"`
	Hosts     []string     `json:"hosts"` // exact names
	Source    SecretSource `json:"source"`
	Version   int64        `json:"version"` // grows with each rotation
	ExpiresAt *time.Time   `json:"expires_at,omitempty"`
	CreatedAt time.Time    `json:"created_at"`
	UpdatedAt time.Time    `json:"updated_at"`
}

// EgressSecret is a live secret with its value, as a gateway gets it.
type EgressSecret struct {
	Secret
	Value string `json:"value"`
}

// EgressCA is a project's certificate authority, PEM.
type EgressCA struct {
	Cert string `json:"cert"`
	Key  string `json:"key"`
}

// EgressAssignment is all that decides a sandbox's outbound connections. A
// node keeps it in memory only. One with an older Revision than the node has
// is ignored.
type EgressAssignment struct {
	Sandbox  string         `json:"sandbox"`
	Project  string         `json:"project"`
	Revision int64          `json:"revision"`
	Profile  EgressProfile  `json:"profile"`
	Secrets  []EgressSecret `json:"secrets,omitempty"` // those that the profile's rules name
	CA       EgressCA       `json:"ca"`
}
