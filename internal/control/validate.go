package control

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"path"
	"strings"
	"time"
	"unicode/utf8"

	"cloche.dev/cloche/internal/sandbox"
)

// The bounds of what a request may hold.
const (
	MaxLabels     = 64
	MaxLabelKey   = 63
	MaxLabelValue = 256
	MaxEnv        = 256
	MaxEnvName    = 256
	MaxEnvBytes   = 128 << 10 // names and values together
	MaxArgs       = 4096
	MaxArgBytes   = 128 << 10 // together
	MaxPath       = 4096
	MaxUser       = 256
	MinTTL        = time.Second
	MaxTTL        = 365 * 24 * time.Hour
	MaxTimeout    = 30 * 24 * time.Hour // of a session's process
	MaxTerminal   = 4096                // rows and columns
	MaxPackages   = 512
	MaxUsers      = 16
	MaxName       = 64 // of a key or a snapshot

	MaxGrace        = 10 * time.Minute // of a stop
	MaxSnapshotWait = 10 * time.Minute
	MaxDrain        = 24 * time.Hour
)

func invalid(code, format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.Invalid, code, format, args...)
}

// quote shows a value that a request held, shortened.
func quote(s string) string {
	const most = 64
	if len(s) > most {
		return fmt.Sprintf("%q…", s[:most])
	}
	return fmt.Sprintf("%q", s)
}

// only tells whether s is made of ASCII letters, digits and extra.
func only(s, extra string) bool {
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune(extra, r) {
			return false
		}
	}
	return true
}

func alnum(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9'
}

// ValidateLabels checks labels.
func ValidateLabels(labels map[string]string) error {
	if len(labels) > MaxLabels {
		return invalid("bad_labels", "a sandbox may have %d labels, not %d", MaxLabels, len(labels))
	}
	for k, v := range labels {
		if k == "" || len(k) > MaxLabelKey || !only(k, "._-/") || !alnum(k[0]) {
			return invalid("bad_labels", "the label %s is no valid name", quote(k)).
				WithHint("1 to %d letters, digits and any of . _ - / where the first is a letter or digit", MaxLabelKey)
		}
		if len(v) > MaxLabelValue || !printable(v) {
			return invalid("bad_labels", "the value of the label %s is too long or not printable", quote(k)).
				WithHint("at most %d bytes of UTF-8 without control characters", MaxLabelValue)
		}
	}
	return nil
}

func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f })
}

// ValidateEnv checks an environment.
func ValidateEnv(env map[string]string) error {
	if len(env) > MaxEnv {
		return invalid("bad_env", "an environment may have %d variables, not %d", MaxEnv, len(env))
	}
	size := 0
	for k, v := range env {
		if k == "" || len(k) > MaxEnvName || !only(k, "_.-") || k[0] >= '0' && k[0] <= '9' {
			return invalid("bad_env", "%s is no valid name of a variable", quote(k)).
				WithHint("letters, digits and any of _ . - where the first is no digit")
		}
		if strings.ContainsRune(v, 0) || !utf8.ValidString(v) {
			return invalid("bad_env", "the value of the variable %s has a NUL byte or is not UTF-8", quote(k))
		}
		size += len(k) + len(v)
	}
	if size > MaxEnvBytes {
		return invalid("bad_env", "an environment may have %d bytes, not %d", MaxEnvBytes, size)
	}
	return nil
}

// ValidateTTL checks a time to live; 0 is none.
func ValidateTTL(ttl time.Duration) error {
	if ttl != 0 && (ttl < MinTTL || ttl > MaxTTL) {
		return invalid("bad_ttl", "a TTL must lie between %s and %s, not %s", MinTTL, MaxTTL, ttl)
	}
	return nil
}

// withDefaults fills the zero fields of r.
func withDefaults(r sandbox.Resources) sandbox.Resources {
	def0(&r.MilliCPU, sandbox.DefaultResources.MilliCPU)
	def0(&r.MemoryMiB, sandbox.DefaultResources.MemoryMiB)
	def0(&r.DiskMiB, sandbox.DefaultResources.DiskMiB)
	return r
}

func def0(v *int, d int) {
	if *v == 0 {
		*v = d
	}
}

// ValidateRelease checks a whole release, "name:tag".
func ValidateRelease(release string) error {
	name, tag, ok := strings.Cut(release, ":")
	if ok && validName(name) && validTag(tag) {
		return nil
	}
	return invalid("bad_release", "%s is no release of the form name:tag", quote(release)).
		WithHint("name: up to 128 of a-z 0-9 . _ - / that begin and end with a letter or digit; tag: up to 128 letters, digits and . _ -")
}

// ValidateRef checks what a template may be called by: "name:tag", "name" or a
// digest.
func ValidateRef(ref string) error {
	switch {
	case strings.HasPrefix(ref, "sha256:"):
		return validateDigest(ref)
	case strings.Contains(ref, ":"):
		return ValidateRelease(ref)
	case !validName(ref):
		return invalid("bad_template", "%s is no name of a template", quote(ref)).WithHint("use name, name:tag or sha256:…")
	}
	return nil
}

func validateDigest(digest string) error {
	hex, ok := strings.CutPrefix(digest, "sha256:")
	if !ok || len(hex) != 64 || strings.Trim(hex, "0123456789abcdef") != "" {
		return invalid("bad_digest", "%s is no digest", quote(digest)).WithHint("sha256: and 64 lower-case hexadecimal digits")
	}
	return nil
}

func validName(s string) bool {
	return s != "" && len(s) <= 128 && s != "sha256" && s == strings.ToLower(s) && only(s, "._-/") &&
		alnum(s[0]) && alnum(s[len(s)-1]) && !strings.Contains(s, "//") && !strings.Contains(s, "..")
}

func validTag(s string) bool {
	return s != "" && len(s) <= 128 && only(s, "._-") && s[0] != '.' && s[0] != '-'
}

// ValidateProcess checks what a session shall run.
func ValidateProcess(p sandbox.Process) error {
	if err := validateArgs(p.Args); err != nil {
		return err
	}
	if len(p.Args) == 0 || p.Args[0] == "" {
		return invalid("bad_args", "a session needs a command")
	}
	if err := ValidateEnv(p.Env); err != nil {
		return err
	}
	if p.Timeout < 0 || p.Timeout > MaxTimeout {
		return invalid("bad_timeout", "a timeout must lie between 0 (none) and %s, not %s", MaxTimeout, p.Timeout)
	}
	if t := p.TTY; t != nil && (t.Rows < 1 || t.Rows > MaxTerminal || t.Cols < 1 || t.Cols > MaxTerminal) {
		return invalid("bad_tty", "a terminal has 1 to %d rows and columns, not %d and %d", MaxTerminal, t.Rows, t.Cols)
	}
	return validateWhere(p.Cwd, p.User)
}

func validateArgs(args []string) error {
	if len(args) > MaxArgs {
		return invalid("bad_args", "a command may have %d arguments, not %d", MaxArgs, len(args))
	}
	size := 0
	for _, a := range args {
		if strings.ContainsRune(a, 0) || !utf8.ValidString(a) {
			return invalid("bad_args", "the argument %s has a NUL byte or is not UTF-8", quote(a))
		}
		size += len(a) + 1
	}
	if size > MaxArgBytes {
		return invalid("bad_args", "a command may have %d bytes of arguments, not %d", MaxArgBytes, size)
	}
	return nil
}

func validateWhere(cwd, user string) error {
	if cwd != "" && (!path.IsAbs(cwd) || len(cwd) > MaxPath || !printable(cwd)) {
		return invalid("bad_cwd", "the working directory must be an absolute path of at most %d bytes", MaxPath)
	}
	if len(user) > MaxUser || !only(user, "_.-:$@+") {
		return invalid("bad_user", "%s is no user", quote(user)).WithHint("a name, a number or uid:gid")
	}
	return nil
}

// ValidateConfig checks a template's runtime config.
func ValidateConfig(cfg sandbox.RuntimeConfig) error {
	if err := ValidateEnv(cfg.Env); err != nil {
		return err
	}
	if err := validateArgs(cfg.Command); err != nil {
		return err
	}
	return validateWhere(cfg.Workdir, cfg.User)
}

// validateDebian bounds a source; Debian's grammar is the builder's.
func validateDebian(src sandbox.DebianSource) error {
	if len(src.Packages) > MaxPackages || len(src.Users) > MaxUsers {
		return invalid("bad_source", "a build may name %d packages and %d users", MaxPackages, MaxUsers)
	}
	if len(src.Suite) > 64 || !only(src.Suite, ".-") {
		return invalid("bad_suite", "%s is no Debian suite", quote(src.Suite)).WithHint("for example bookworm")
	}
	for _, p := range src.Packages {
		if p == "" || len(p) > 128 || p[0] == '-' || !only(p, "+.-:=~_") {
			return invalid("bad_package", "%s is no name of a Debian package", quote(p))
		}
	}
	for _, u := range src.Users {
		if u.Name == "" || len(u.Name) > 32 || u.Name[0] < 'a' || u.Name[0] > 'z' || u.Name != strings.ToLower(u.Name) || !only(u.Name, "_-") {
			return invalid("bad_user", "%s is no name of a user", quote(u.Name)).
				WithHint("up to 32 of a-z 0-9 _ - where the first is a letter")
		}
	}
	return nil
}

// validateID refuses what can't be an id as not found, so that a malformed and
// an unknown one look alike.
func validateID(kind, what, id string) error {
	if sandbox.ValidID(kind, id) {
		return nil
	}
	return sandbox.Errorf(sandbox.NotFound, what+"_not_found", "there is no %s %s", what, quote(id))
}

// stamp checks an idempotency key and gives it the request's hash, so that the
// faces need not agree on one.
func stamp(idem sandbox.Idempotency, request any) (sandbox.Idempotency, error) {
	if idem.Key == "" {
		return sandbox.Idempotency{}, nil
	}
	if len(idem.Key) > 255 || strings.ContainsFunc(idem.Key, func(r rune) bool { return r < ' ' || r > '~' }) {
		return idem, invalid("bad_idempotency_key", "an idempotency key is at most 255 bytes of printable ASCII")
	}
	if idem.Request != [32]byte{} {
		return idem, nil
	}
	b, err := json.Marshal(request)
	if err != nil {
		return idem, fmt.Errorf("hash a request: %w", err)
	}
	idem.Request = sha256.Sum256(b)
	return idem, nil
}
