package sandbox

import (
	"crypto/rand"
	"encoding/base32"
	"strings"
)

// The kinds of id. An id is its kind followed by 20 characters of lower-case
// base32 (100 random bits). All ids have the same length, so that none is a
// prefix of another. An id is an address, never a permission.
const (
	KindSandbox   = "sbx_"
	KindOperation = "op_"
	KindSession   = "ses_"
	KindSnapshot  = "snp_"
	KindTemplate  = "tpl_"
	KindProject   = "prj_"
	KindKey       = "key_"
	KindPolicy    = "pol_"
	KindSecret    = "sec_"
)

const idChars = 20

var idEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// NewID returns a fresh random id of the given kind.
func NewID(kind string) string {
	var b [13]byte
	rand.Read(b[:]) // never fails (crypto/rand documents that it crashes instead)
	return kind + idEncoding.EncodeToString(b[:])[:idChars]
}

// ValidID tells whether s is a well-formed id of the given kind. It says
// nothing about whether such a thing exists.
func ValidID(kind, s string) bool {
	rest, ok := strings.CutPrefix(s, kind)
	if !ok || len(rest) != idChars {
		return false
	}
	for _, c := range rest {
		if (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return false
		}
	}
	return true
}
