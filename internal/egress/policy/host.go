package policy

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
)

const (
	maxHost  = 253
	maxLabel = 63
)

// toASCII maps as browsers do (UTS 46, nontransitional). What it gives is held
// to the same checks as what was ASCII from the start.
var toASCII = idna.New(idna.MapForLookup(), idna.Transitional(false), idna.BidiRule(), idna.CheckJoiners(true),
	idna.ValidateLabels(true), idna.StrictDomainName(true), idna.VerifyDNSLength(true))

var (
	errHostEmpty = errors.New("is empty")
	errHostLong  = fmt.Errorf("is longer than %d bytes", maxHost)
	errHostIP    = errors.New("is an address or looks like one, not a name")
	errHostIDNA  = errors.New("is not a valid internationalised name")
)

// CanonicalHost returns the one form of a host's name, of which DNS, SNI, Host
// and the rules speak: lower-case A-labels without a final dot. A name that
// anybody might read as an address is an error, in whatever notation: as
// browsers have it, one whose last label is a number.
func CanonicalHost(s string) (string, error) {
	if len(s) > 4*maxHost {
		return "", errHostLong // before any work is spent on it
	}
	if !isASCII(s) {
		if !utf8.ValidString(s) {
			return "", errHostIDNA
		}
		ascii, err := toASCII.ToASCII(strings.TrimSuffix(s, "."))
		if err != nil || !isASCII(ascii) {
			return "", errHostIDNA
		}
		s = ascii
	}
	s = strings.ToLower(strings.TrimSuffix(s, "."))
	if s == "" {
		return "", errHostEmpty
	}
	if len(s) > maxHost {
		return "", errHostLong
	}
	labels := strings.Split(s, ".")
	for _, l := range labels {
		if err := checkLabel(l); err != nil {
			return "", err
		}
	}
	if numeric(labels[len(labels)-1]) {
		return "", errHostIP
	}
	return s, nil
}

func checkLabel(l string) error {
	if l == "" {
		return errors.New("has an empty label")
	}
	if len(l) > maxLabel {
		return fmt.Errorf("has a label longer than %d bytes", maxLabel)
	}
	for i := range len(l) {
		// Underscores are in no host name by the book and in many by practice.
		if c := l[i]; !alphanumeric(c) && c != '-' && c != '_' {
			return fmt.Errorf("has the byte %q", c)
		}
	}
	if l[0] == '-' || l[len(l)-1] == '-' {
		return errors.New("has a label that begins or ends with a hyphen")
	}
	if strings.HasPrefix(l, "xn--") {
		// Only what comes back the same is the one form of something.
		u, err := toASCII.ToUnicode(l)
		if err != nil || isASCII(u) {
			return errHostIDNA
		}
		if back, err := toASCII.ToASCII(u); err != nil || back != l {
			return errHostIDNA
		}
	}
	return nil
}

// numeric tells whether inet_aton could take a label for a part of an address.
func numeric(l string) bool {
	if hex, ok := strings.CutPrefix(l, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(l, "0123456789") == ""
}

func alphanumeric(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' }

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// compileHost returns the pattern of one of a rule's hosts and its normal form.
func compileHost(s string) (hostPattern, string, error) {
	if s == "*" {
		return "", s, nil
	}
	if suffix, ok := strings.CutPrefix(s, "*."); ok {
		c, err := CanonicalHost(suffix)
		return hostPattern("." + c), "*." + c, err
	}
	c, err := CanonicalHost(s)
	return hostPattern(c), c, err
}
