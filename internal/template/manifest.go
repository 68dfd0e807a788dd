package template

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// manifestFormat is the version of Manifest's JSON and of the image's layout.
// A change of either makes other digests.
const manifestFormat = 1

// Manifest says what a template is. Its JSON, as Encode gives it, is hashed to
// the template's digest, so it holds nothing that differs between two builds
// of the same thing: no time, no host.
type Manifest struct {
	Format  int                   `json:"format"`
	Image   ImageInfo             `json:"image"`
	Config  sandbox.RuntimeConfig `json:"config"`
	Dropped map[string]int64      `json:"dropped,omitempty"`
	Source  Source                `json:"source"`
}

// ImageInfo says what the image must be.
type ImageInfo struct {
	Kind    string `json:"kind"` // "erofs"
	SHA256  string `json:"sha256"`
	Size    int64  `json:"size"`
	Entries int    `json:"entries"`
}

// Source says what a template was made from.
type Source struct {
	Kind   string                `json:"kind"` // "tar" or "debian"
	Debian *sandbox.DebianSource `json:"debian,omitempty"`
}

// Encode returns the canonical JSON and its digest. encoding/json sorts maps
// and keeps the order of fields, which is all that makes it canonical.
func (m Manifest) Encode() (data []byte, digest string, err error) {
	if data, err = json.Marshal(m); err != nil {
		return nil, "", fmt.Errorf("encode a manifest: %w", err)
	}
	sum := sha256.Sum256(data)
	return data, "sha256:" + hex.EncodeToString(sum[:]), nil
}

// digestHex checks a digest and returns its hex part, which is a safe file name.
func digestHex(digest string) (string, error) {
	h, ok := strings.CutPrefix(digest, "sha256:")
	if !ok || len(h) != 64 || strings.Trim(h, "0123456789abcdef") != "" {
		return "", sandbox.Errorf(sandbox.Invalid, "template_digest_invalid", "%.80q is no template digest", digest)
	}
	return h, nil
}

const maxConfigBytes = 256 << 10

// checkConfig refuses a runtime config that no process could be started with.
func checkConfig(c sandbox.RuntimeConfig) error {
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.Invalid, "template_config_invalid", format, args...)
	}
	if c.Workdir != "" && !strings.HasPrefix(c.Workdir, "/") {
		return bad("the workdir %.80q is not absolute", c.Workdir)
	}
	size := len(c.User) + len(c.Workdir)
	all := []string{c.User, c.Workdir}
	for name, value := range c.Env {
		if name == "" || strings.Contains(name, "=") {
			return bad("%.80q is no name of an environment variable", name)
		}
		all = append(all, name, value)
		size += len(name) + len(value)
	}
	for _, arg := range c.Command {
		all = append(all, arg)
		size += len(arg)
	}
	for _, s := range all {
		if strings.ContainsRune(s, 0) {
			return bad("the runtime config has a NUL byte in %.80q", s)
		}
	}
	if size > maxConfigBytes {
		return bad("the runtime config has more than %d bytes", maxConfigBytes)
	}
	return nil
}
