package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Format is the version of the directory and the manifest that this build
// writes. It reads those from 1 on.
const Format = 1

// What a manifest may hold.
const (
	maxManifest = 32 << 20 // bytes; a session is about 1 KiB
	maxFiles    = 256
	maxName     = 128
	maxKey      = 64
)

// Manifest says what a snapshot is. It holds the guest's key.
type Manifest struct {
	Format    int                  `json:"format"`
	ID        string               `json:"id"`
	Project   string               `json:"project"`
	Sandbox   string               `json:"sandbox"` // what it was taken of
	Kind      sandbox.SnapshotKind `json:"kind"`
	TakenAt   time.Time            `json:"taken_at"`
	Stood     time.Duration        `json:"stood"` // how long the machine stood still for it
	Needs     sandbox.Needs        `json:"needs"`
	Resources sandbox.Resources    `json:"resources"`
	MaxProcs  uint64               `json:"max_procs"`     // of the machine in it
	Key       []byte               `json:"key,omitempty"` // the guest's, in the image; of memory snapshots
	Epoch     int64                `json:"epoch"`         // of the machine
	BootID    string               `json:"boot_id"`       // that the guest saw
	Sessions  []sandbox.Session    `json:"sessions"`      // that live in it
	SizeBytes int64                `json:"size_bytes"`    // on disk
	Files     []File               `json:"files"`         // all but the manifest and the stamps, by name
}

// File is one file of a driver's.
type File struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// Status is what control is told of it.
func (m *Manifest) Status() sandbox.SnapshotStatus {
	return sandbox.SnapshotStatus{
		Snapshot: m.ID, Sandbox: m.Sandbox, Kind: m.Kind, SizeBytes: m.SizeBytes, Needs: m.Needs, TakenAt: m.TakenAt, Stood: m.Stood,
	}
}

// sealed is the manifest as it is written: with a hash of its own, so that a
// flipped bit is not taken for what was meant.
type sealed struct {
	Format   int             `json:"format"` // again outside, to be told of a newer one that can't be read
	SHA256   string          `json:"sha256"`
	Manifest json.RawMessage `json:"manifest"`
}

func (m *Manifest) encode() ([]byte, error) {
	inner, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode the snapshot's manifest: %w", err)
	}
	sum := sha256.Sum256(inner)
	data, err := json.Marshal(sealed{Format: m.Format, SHA256: hex.EncodeToString(sum[:]), Manifest: inner})
	if err == nil && len(data) > maxManifest {
		err = sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_too_large", "the sandbox has more sessions than a snapshot can hold")
	}
	return data, err
}

// parse reads a manifest and checks all of it that can be checked without the
// files. The error is one of the refusals.
func parse(id string, data []byte) (*Manifest, error) {
	var s sealed
	if err := json.Unmarshal(data, &s); err != nil { // not strict: of a newer one only its format is known
		return nil, corrupt(id, "its manifest can't be read: %w", err)
	}
	if s.Format > Format {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_incompatible", "the snapshot %s has format %d, and this build reads up to %d", id, s.Format, Format).
			WithHint("use the release of Cloche that took it, or a newer one")
	}
	if sum := sha256.Sum256(s.Manifest); hex.EncodeToString(sum[:]) != s.SHA256 {
		return nil, corrupt(id, "its manifest was changed")
	}
	m := new(Manifest)
	if err := decode(s.Manifest, m); err != nil {
		return nil, corrupt(id, "its manifest can't be read: %w", err)
	}
	if m.ID != id {
		return nil, foreign(id, "it says that it is %q", m.ID)
	}
	if err := m.check(); err != nil {
		return nil, corrupt(id, "%w", err)
	}
	if m.Format != s.Format {
		return nil, corrupt(id, "it says two formats")
	}
	return m, nil
}

// decode is strict: what a format does not have is not in it.
func decode(data []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is something after it")
	}
	return nil
}

// check bounds what the rest of the node relies on.
func (m *Manifest) check() error {
	memory := m.Kind == sandbox.SnapshotMemory
	var total int64
	switch {
	case m.Format < 1:
		return fmt.Errorf("format %d", m.Format)
	case !sandbox.ValidID(sandbox.KindSandbox, m.Sandbox):
		return errors.New("its sandbox has no id")
	case !memory && m.Kind != sandbox.SnapshotDisk:
		return fmt.Errorf("kind %q", m.Kind)
	case m.Needs.Format != m.Format:
		return errors.New("it needs another format than its own")
	case len(m.Key) > maxKey || memory && len(m.Key) == 0 || !memory && len(m.Key) != 0:
		return errors.New("a key that can't be the guest's")
	case m.SizeBytes < 0 || m.Epoch < 0 || m.Stood < 0 || m.MaxProcs > math.MaxInt32:
		return errors.New("a number is out of range")
	case len(m.Files) == 0 || len(m.Files) > maxFiles:
		return fmt.Errorf("%d files", len(m.Files))
	}
	if err := m.Resources.Validate(); err != nil {
		return err
	}
	for i, f := range m.Files {
		b, err := hex.DecodeString(f.SHA256)
		if err != nil || len(b) != sha256.Size || !validName(f.Name) || f.Size < 0 || f.Size > math.MaxInt64-total {
			return fmt.Errorf("file %q is described wrongly", f.Name)
		}
		if i > 0 && m.Files[i-1].Name >= f.Name {
			return errors.New("its files are not in order")
		}
		total += f.Size
	}
	return nil
}

// validName tells whether a driver may name a file so.
func validName(name string) bool {
	if name == "" || len(name) > maxName || name[0] == '.' || name == manifestFile || name == stampsFile {
		return false
	}
	return strings.IndexFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-", r)
	}) < 0
}

func corrupt(id, format string, args ...any) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_corrupt", "the snapshot %s is corrupt: %w", id, fmt.Errorf(format, args...)).
		WithHint("it can't be used any more; delete it and use another")
}

func foreign(id, format string, args ...any) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_foreign", "the snapshot %s was not made here for this: %w", id, fmt.Errorf(format, args...)).
		WithHint("a snapshot is used by the project, and on the host, that took it")
}
