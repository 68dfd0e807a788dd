package control

import (
	"net/url"
	"slices"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// The bounds of a secret's source.
const (
	MaxTokenURL = 2048
	MaxClientID = 512
	MaxScopes   = 32
)

// validateSecret checks a request for a secret and answers its hosts as they
// are kept.
func validateSecret(req SecretRequest) (hosts []string, err error) {
	if err := validateEgressName("secret", req.Name); err != nil {
		return nil, err
	}
	if err := validateValue(req.Value); err != nil {
		return nil, err
	}
	if len(req.Hosts) == 0 || len(req.Hosts) > sandbox.MaxSecretHosts {
		return nil, invalid("bad_hosts", "a secret names 1 to %d hosts, not %d", sandbox.MaxSecretHosts, len(req.Hosts))
	}
	for _, h := range req.Hosts {
		host, ok := plainHost(h)
		if !ok {
			return nil, invalid("bad_hosts", "%s is no exact name of a host", quote(h)).
				WithHint("a whole name like api.example.com: no wildcard, no address, no port, and A-labels (xn--…) for other scripts")
		}
		if !slices.Contains(hosts, host) {
			hosts = append(hosts, host)
		}
	}
	if req.Source != nil {
		if err := validateTokenSource(*req.Source); err != nil {
			return nil, err
		}
	}
	return hosts, validateKind(req.Source, req.Value)
}

// validateValue bounds a value. Control characters can't stand in a header, and
// one that slipped in with a file (its last newline) is better told now.
func validateValue(value []byte) error {
	if len(value) == 0 || len(value) > sandbox.MaxSecretBytes {
		return invalid("bad_value", "a secret's value has 1 to %d bytes, not %d", sandbox.MaxSecretBytes, len(value))
	}
	if !printable(string(value)) {
		return invalid("bad_value", "a secret's value is UTF-8 without control characters").WithHint("does it end with a newline?")
	}
	return nil
}

// minRedacted is the shortest value that answers are searched for.
const minRedacted = 8

// validateKind refuses a value that could not be found again where a server
// sends it back. What is only shown to a token's server may be short.
func validateKind(source *sandbox.SecretSource, value []byte) error {
	if source == nil && len(value) < minRedacted {
		return invalid("bad_value", "a secret's value has at least %d bytes, not %d", minRedacted, len(value)).
			WithHint("a shorter one could not be told from chance where a server sends it back to the sandbox")
	}
	return nil
}

// validateTokenSource checks where a value comes from.
func validateTokenSource(s sandbox.SecretSource) error {
	if s.Kind != "client_credentials" && s.Kind != "refresh_token" {
		return invalid("bad_source", "there is no source %s", quote(s.Kind)).WithHint("client_credentials or refresh_token")
	}
	u, err := url.Parse(s.TokenURL)
	if err != nil || len(s.TokenURL) > MaxTokenURL || u.Scheme != "https" || u.Host == "" || u.User != nil || u.Fragment != "" {
		return invalid("bad_source", "the token URL must be an https URL without user and fragment, of at most %d bytes", MaxTokenURL)
	}
	if s.ClientID == "" || len(s.ClientID) > MaxClientID || !printable(s.ClientID) {
		return invalid("bad_source", "a client's id has 1 to %d printable bytes", MaxClientID)
	}
	if len(s.Scopes) > MaxScopes {
		return invalid("bad_source", "a source may name %d scopes, not %d", MaxScopes, len(s.Scopes))
	}
	for _, scope := range s.Scopes {
		// RFC 6749 section 3.3: no space, quote or backslash.
		for _, r := range scope {
			if r <= ' ' || r > '~' || r == '"' || r == '\\' {
				return invalid("bad_source", "%s is no scope", quote(scope))
			}
		}
		if scope == "" || len(scope) > MaxClientID {
			return invalid("bad_source", "%s is no scope", quote(scope))
		}
	}
	return nil
}

// plainHost is a host as secrets name it: canonical, exact and no address.
func plainHost(s string) (string, bool) {
	s = strings.TrimSuffix(strings.ToLower(s), ".")
	labels := strings.Split(s, ".")
	if len(s) > 253 || len(labels) < 2 {
		return "", false
	}
	for _, l := range labels {
		if l == "" || len(l) > 63 || !only(l, "-_") || l[0] == '-' || l[len(l)-1] == '-' {
			return "", false
		}
	}
	// A last label that begins with a digit is read as an address by somebody.
	if last := labels[len(labels)-1]; last[0] >= '0' && last[0] <= '9' {
		return "", false
	}
	return s, true
}
