// Package artifact keeps immutable files that machines and snapshots are
// pinned to: engines, guest binaries, and later kernels.
//
// Invariants: an artifact is addressed by the SHA-256 of its content, lies at
// DIR/HASH/NAME, and is never overwritten; what is there was complete and
// durable before it had that name; a file is hashed again only when its stamp
// (sys.FileStamp) differs from what was recorded, since nobody but root can make
// a file differ without that. The node's wiring unpacks what this
// build carries, and drivers are handed paths.
package artifact

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Artifact is one immutable file.
type Artifact struct {
	Name string
	Hash string // SHA-256, in hex
	Path string
}

// Store keeps artifacts below one directory. Several processes may use the
// same one.
type Store struct {
	dir      string
	embedded fs.FS
	exe      string // the file that the embedded ones came in
}

// Open returns the store in dir, making it where it is missing.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the artifacts' directory: %w", err)
	}
	sub, err := fs.Sub(embedded, "embedded")
	if err != nil {
		return nil, err
	}
	return &Store{dir: dir, embedded: sub, exe: "/proc/self/exe"}, nil
}

// record is what is kept beside an artifact, in NAME.json.
type record struct {
	Stamp sys.FileStamp `json:"stamp"`
}

func validName(name string) bool {
	return name != "" && !strings.HasPrefix(name, ".") && !strings.HasSuffix(name, ".json") && filepath.Base(name) == name
}

func validHash(hash string) bool {
	b, err := hex.DecodeString(hash)
	return err == nil && len(b) == sha256.Size && strings.ToLower(hash) == hash
}

// Put stores what r holds under its hash and name; it is executable. Storing
// the same again returns what is there.
func (s *Store) Put(name string, r io.Reader) (Artifact, error) {
	if !validName(name) {
		return Artifact{}, sandbox.Errorf(sandbox.Invalid, "artifact_name", "%q can't be an artifact's name", name)
	}
	tmp, err := os.CreateTemp(s.dir, ".put-*")
	if err != nil {
		return Artifact{}, err
	}
	defer os.Remove(tmp.Name()) // it was renamed, unless Put failed
	hash, err := fill(tmp, r)
	if err != nil {
		return Artifact{}, fmt.Errorf("store artifact %s: %w", name, err)
	}
	if a, err := s.Get(hash, name); err == nil {
		return a, nil
	}
	a := Artifact{Name: name, Hash: hash, Path: filepath.Join(s.dir, hash, name)}
	if err := os.MkdirAll(filepath.Dir(a.Path), 0o700); err != nil {
		return Artifact{}, err
	}
	if err := os.Rename(tmp.Name(), a.Path); err != nil {
		return Artifact{}, err
	}
	if err := errors.Join(sys.SyncDir(filepath.Dir(a.Path)), sys.SyncDir(s.dir)); err != nil {
		return Artifact{}, err
	}
	return a, s.stamp(a)
}

// fill copies r to f, makes it durable and executable, and returns its hash.
func fill(f *os.File, r io.Reader) (string, error) {
	h := sha256.New()
	_, err := io.Copy(io.MultiWriter(f, h), r)
	if err == nil {
		err = f.Chmod(0o555)
	}
	if err == nil {
		err = f.Sync()
	}
	return hex.EncodeToString(h.Sum(nil)), errors.Join(err, f.Close())
}

// stamp records how an artifact's file looks now.
func (s *Store) stamp(a Artifact) error {
	st, err := sys.StampFile(a.Path)
	if err != nil {
		return err
	}
	data, err := json.Marshal(record{Stamp: st})
	if err != nil {
		return err
	}
	return sys.WriteFileAtomic(a.Path+".json", data, 0o600)
}

// Get returns a stored artifact. Its file is as it was stored; one that was
// changed is an error.
func (s *Store) Get(hash, name string) (Artifact, error) {
	if !validHash(hash) || !validName(name) {
		return Artifact{}, sandbox.Errorf(sandbox.Invalid, "artifact_name", "%s/%s can't be an artifact", hash, name)
	}
	a := Artifact{Name: name, Hash: hash, Path: filepath.Join(s.dir, hash, name)}
	st, err := sys.StampFile(a.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return Artifact{}, sandbox.Errorf(sandbox.NotFound, "artifact_missing", "the artifact %s %s is not on this host", name, hash)
	}
	if err != nil {
		return Artifact{}, err
	}
	var rec record
	data, err := os.ReadFile(a.Path + ".json")
	if err == nil && json.Unmarshal(data, &rec) == nil && rec.Stamp == st {
		return a, nil
	}
	return a, s.verify(a)
}

// verify hashes an artifact whose record is missing or does not fit.
func (s *Store) verify(a Artifact) error {
	f, err := os.Open(a.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if hex.EncodeToString(h.Sum(nil)) != a.Hash {
		return sandbox.Errorf(sandbox.Internal, "artifact_changed", "the artifact %s was changed on disk", a.Path).
			WithHint("remove it; `cloche serve` unpacks its own again")
	}
	return s.stamp(a)
}

// List returns all artifacts, to be told apart from those that something still
// needs.
func (s *Store) List() ([]Artifact, error) {
	paths, err := filepath.Glob(filepath.Join(s.dir, "*", "*"))
	if err != nil {
		return nil, err
	}
	var all []Artifact
	for _, p := range paths {
		a := Artifact{Name: filepath.Base(p), Hash: filepath.Base(filepath.Dir(p)), Path: p}
		if validHash(a.Hash) && validName(a.Name) {
			all = append(all, a)
		}
	}
	return all, nil
}

// Remove removes an artifact that nothing needs any more. It succeeds for one
// that never was.
func (s *Store) Remove(a Artifact) error {
	if !validHash(a.Hash) || !validName(a.Name) {
		return sandbox.Errorf(sandbox.Invalid, "artifact_name", "%s/%s can't be an artifact", a.Hash, a.Name)
	}
	path := filepath.Join(s.dir, a.Hash, a.Name)
	for _, p := range []string{path + ".json", path} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	_ = os.Remove(filepath.Dir(path)) // unless another name has the same content
	return nil
}
