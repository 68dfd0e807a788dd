package artifact

import (
	"embed"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// The artifacts that a build carries.
const (
	EngineName = "cloche-gvisor"
	GuestName  = "cloche-guest"
)

// The artifacts that a host's administrator installs: Firecracker's two
// programs, and a guest kernel's image and modules.
const (
	FirecrackerName = "firecracker"
	JailerName      = "jailer"
	VmlinuxName     = "vmlinux"
	ModulesName     = "modules"
)

//go:embed embedded
var embedded embed.FS

// unpacked remembers the hashes of what one build carries, so that a start
// need not hash it again.
type unpacked struct {
	Exe    sys.FileStamp     `json:"exe"`
	Hashes map[string]string `json:"hashes"`
}

func (s *Store) notes() string { return filepath.Join(s.dir, "embedded.json") }

// Embedded returns an artifact that this build carries, unpacking it the first
// time.
func (s *Store) Embedded(name string) (Artifact, error) {
	exe, err := sys.StampFile(s.exe)
	if err != nil {
		return Artifact{}, err
	}
	var u unpacked
	if data, err := os.ReadFile(s.notes()); err != nil || json.Unmarshal(data, &u) != nil || u.Exe != exe || u.Hashes == nil {
		u = unpacked{Exe: exe, Hashes: map[string]string{}}
	}
	if hash, ok := u.Hashes[name]; ok {
		if a, err := s.Get(hash, name); err == nil {
			return a, nil
		}
	}
	f, err := s.embedded.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return Artifact{}, sandbox.Errorf(sandbox.FailedPrecondition, "not_embedded", "this build carries no %s", name).
			WithHint("build it with `make build`")
	}
	if err != nil {
		return Artifact{}, err
	}
	defer f.Close() //nolint:errcheck // nothing was written
	a, err := s.Put(name, f)
	if err != nil {
		return Artifact{}, err
	}
	u.Hashes[name] = a.Hash
	data, err := json.Marshal(u)
	if err != nil {
		return Artifact{}, err
	}
	return a, sys.WriteFileAtomic(s.notes(), data, 0o600)
}

// Builds finds the binaries of one name by hash: the one that this build of
// Cloche carries, and those that earlier ones left.
type Builds struct {
	store   *Store
	current Artifact
}

// Builds returns the builds of the binary called name, unpacking the one that
// this build carries.
func (s *Store) Builds(name string) (*Builds, error) {
	a, err := s.Embedded(name)
	if err != nil {
		return nil, err
	}
	return &Builds{store: s, current: a}, nil
}

// Current returns the hash of the binary for new machines.
func (b *Builds) Current() string { return b.current.Hash }

// CurrentPath returns its file.
func (b *Builds) CurrentPath() string { return b.current.Path }

// Path returns a build's file.
func (b *Builds) Path(hash string) (string, error) {
	a, err := b.store.Get(hash, b.current.Name)
	return a.Path, err
}
