package backup

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// format is the version of the manifest that this build writes.
const format = 1

// The names in a backup. All but the manifest are those of a state directory.
const (
	manifestName = "backup.json"
	storeName    = "cloche.db"
	templatesDir = "templates"
	snapshotsDir = "snapshots"
	sessionsDir  = "sessions"
	artifactsDir = "artifacts"
	imageName    = "image.erofs"
	describes    = "manifest.json" // a template or a snapshot
)

// keyFiles are secrets of the host.
var keyFiles = []string{"admin.key", "token.key", "secret.key"}

// Report tells what a backup holds.
type Report struct {
	Dir     string    `json:"dir"`
	At      time.Time `json:"at"`      // the instant of its rows
	Version string    `json:"version"` // of the program that made it
	Keys    bool      `json:"keys"`    // it holds secrets

	Sandboxes int   `json:"sandboxes"` // rows of those that are not deleted
	Templates int   `json:"templates"`
	Snapshots int   `json:"snapshots"`
	Sessions  int   `json:"sessions"`
	Files     int   `json:"files"`
	Bytes     int64 `json:"bytes"`
	Linked    int64 `json:"linked"` // of Bytes, those that share the state directory's space

	// LeftOut are memory snapshots, which hold keys.
	LeftOut []string `json:"left_out"`
	// Missing are templates and snapshots that rows name, engines that snapshots
	// need, and what was installed, whose files are not whole on this host, and why.
	Missing map[string]string `json:"missing"`
}

// file is one file of a backup.
type file struct {
	Path   string `json:"path"` // slash-separated
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// manifest is what the backup should be.
type manifest struct {
	Format int    `json:"format"`
	Report Report `json:"report"`
	Files  []file `json:"files"`
}

// sealed is the manifest as it is written: with a hash of its own.
type sealed struct {
	SHA256   string          `json:"sha256"`
	Manifest json.RawMessage `json:"manifest"`
}

func (m *manifest) write(dir string) error {
	inner, err := json.Marshal(m)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(inner)
	data, err := json.Marshal(sealed{SHA256: hex.EncodeToString(sum[:]), Manifest: inner})
	if err != nil {
		return err
	}
	return sys.WriteFileAtomic(filepath.Join(dir, manifestName), data, 0o600)
}

func readManifest(dir string) (*manifest, error) {
	data, err := os.ReadFile(filepath.Join(dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, sandbox.Errorf(sandbox.NotFound, "no_backup", "there is no backup in %s", dir)
	}
	if err != nil {
		return nil, err
	}
	var s sealed
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, corrupt("its %s can't be read: %w", manifestName, err)
	}
	if sum := sha256.Sum256(s.Manifest); hex.EncodeToString(sum[:]) != s.SHA256 {
		return nil, corrupt("its %s was changed", manifestName)
	}
	m := new(manifest)
	if err := json.Unmarshal(s.Manifest, m); err != nil {
		return nil, corrupt("its %s can't be read: %w", manifestName, err)
	}
	if m.Format != format {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "backup_format", "the backup has format %d, and this build reads %d", m.Format, format).
			WithHint("use the release of Cloche that made it")
	}
	return m, nil
}

func corrupt(text string, args ...any) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "backup_corrupt", "the backup is corrupt: "+text, args...).
		WithHint("use another one")
}
