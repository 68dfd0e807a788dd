// Package installed keeps what an administrator installed for Firecracker: pairs
// of firecracker and jailer, and guest kernels, several versions side by side,
// one of each being the current one, which new machines get.
//
// The files are artifacts; here are only small records of their hashes, in
// STATE/firecracker. A record is written after what it names is durable, whole
// or not at all, so that a crash leaves what was installed before or what is
// installed now. A pair's record is never lost while its artifacts are there:
// snapshots are restored by the pair that made them. `cloche firecracker
// install` and `cloche kernel install` write, the driver and its probe read;
// all may be different processes at the same time.
package installed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Pair is an installed firecracker with its jailer.
type Pair struct {
	Version             string // of both, like 1.15.1
	Firecracker, Jailer string // paths
	Hash                string // SHA-256 of firecracker, in hex: what a memory snapshot needs
}

// Kernel is an installed guest kernel.
type Kernel struct {
	Name    string
	Image   string // path: an ELF image
	Modules string // path: archive 1 of its initramfs; "" where it needs none
	Hash    string // SHA-256 over the hashes of both, in hex
}

// PairRecord is what is known of a pair.
type PairRecord struct {
	Version     string    `json:"version"`
	Firecracker string    `json:"firecracker"` // SHA-256, in hex, as Jailer
	Jailer      string    `json:"jailer"`
	InstalledAt time.Time `json:"installed_at"`
}

// KernelRecord is what is known of a kernel.
type KernelRecord struct {
	Name        string    `json:"name"`
	Vmlinux     string    `json:"vmlinux"`           // SHA-256, in hex, as Modules
	Modules     string    `json:"modules,omitempty"` // "" where it needs none
	InstalledAt time.Time `json:"installed_at"`
}

// Hash names a kernel by its content.
func (k KernelRecord) Hash() string {
	sum := sha256.Sum256([]byte(k.Vmlinux + "\n" + k.Modules + "\n"))
	return hex.EncodeToString(sum[:])
}

// Selection names what new machines get; "" for nothing.
type Selection struct {
	Version string `json:"version"`
	Kernel  string `json:"kernel"`
}

const (
	maxBinary  = 128 << 20
	maxVmlinux = 256 << 20
	maxModules = 256 << 20
)

// Store reads and writes the records of one state directory.
type Store struct {
	state, dir string
	artifacts  *artifact.Store
	now        func() time.Time
}

// Open returns the store of a state directory. It makes nothing: the first
// install does.
func Open(stateDir string, artifacts *artifact.Store) *Store {
	return &Store{state: stateDir, dir: filepath.Join(stateDir, "firecracker"), artifacts: artifacts, now: time.Now}
}

// Current returns what new machines are made with. Errors of class
// FailedPrecondition say what is missing (firecracker_missing, kernel_missing)
// or that a record is damaged (firecracker_record).
func (s *Store) Current() (Pair, Kernel, error) {
	sel, err := s.Selection()
	if err != nil {
		return Pair{}, Kernel{}, err
	}
	if sel.Version == "" {
		return Pair{}, Kernel{}, sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_missing", "Firecracker is not installed").
			WithHint("`cloche firecracker install` installs it")
	}
	pair, err := s.pair(sel.Version)
	if err != nil {
		return Pair{}, Kernel{}, err
	}
	if sel.Kernel == "" {
		return Pair{}, Kernel{}, sandbox.Errorf(sandbox.FailedPrecondition, "kernel_missing", "no guest kernel is installed").
			WithHint("`cloche kernel install` installs the distribution's own")
	}
	kernel, err := s.kernel(sel.Kernel)
	if err != nil {
		return Pair{}, Kernel{}, err
	}
	return pair, kernel, nil
}

// ByHash returns the pair whose firecracker has this SHA-256, be it current or
// not. An error of class FailedPrecondition says that there is none.
func (s *Store) ByHash(hash string) (Pair, error) {
	all, _, err := readAll[PairRecord](s.pairDir())
	for _, r := range all {
		if r.Firecracker == hash {
			return s.openPair(r) // whatever is wrong with other records
		}
	}
	if err != nil {
		return Pair{}, err
	}
	return Pair{}, sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_missing", "the Firecracker with the hash %.64q is not installed", hash).
		WithHint("`cloche firecracker ls` lists what is; install the same binary again")
}

func (s *Store) pair(version string) (Pair, error) {
	var r PairRecord
	err := read(s.pairFile(version), &r)
	if errors.Is(err, fs.ErrNotExist) {
		err = damaged(s.pairFile(version), errors.New("it is missing"))
	}
	if err != nil {
		return Pair{}, err
	}
	if err := r.check(); err != nil || r.Version != version {
		return Pair{}, damaged(s.pairFile(version), err)
	}
	return s.openPair(r)
}

func (s *Store) openPair(r PairRecord) (Pair, error) {
	f, err := s.artifacts.Get(r.Firecracker, artifact.FirecrackerName)
	if err != nil {
		return Pair{}, gone(err, "firecracker", "Firecracker "+r.Version)
	}
	j, err := s.artifacts.Get(r.Jailer, artifact.JailerName)
	if err != nil {
		return Pair{}, gone(err, "firecracker", "the jailer "+r.Version)
	}
	return Pair{Version: r.Version, Firecracker: f.Path, Jailer: j.Path, Hash: r.Firecracker}, nil
}

func (s *Store) kernel(name string) (Kernel, error) {
	var r KernelRecord
	err := read(s.kernelFile(name), &r)
	if errors.Is(err, fs.ErrNotExist) {
		err = damaged(s.kernelFile(name), errors.New("it is missing"))
	}
	if err != nil {
		return Kernel{}, err
	}
	if err := r.check(); err != nil || r.Name != name {
		return Kernel{}, damaged(s.kernelFile(name), err)
	}
	image, err := s.artifacts.Get(r.Vmlinux, artifact.VmlinuxName)
	if err != nil {
		return Kernel{}, gone(err, "kernel", "the kernel "+name)
	}
	k := Kernel{Name: name, Image: image.Path, Hash: r.Hash()}
	if r.Modules != "" {
		m, err := s.artifacts.Get(r.Modules, artifact.ModulesName)
		if err != nil {
			return Kernel{}, gone(err, "kernel", "the modules of the kernel "+name)
		}
		k.Modules = m.Path
	}
	return k, nil
}

// gone says of an artifact that it is not as the record has it, and what to do.
func gone(err error, command, what string) error {
	e := sandbox.AsError(err)
	if e.Class != sandbox.NotFound && e.Code != "artifact_changed" {
		return err
	}
	return sandbox.Errorf(sandbox.FailedPrecondition, command+"_missing", "%s was installed and is not there any more: %w", what, err).
		WithHint("install it again with `cloche %s install`", command)
}

// PutKernel installs a kernel and makes it the current one. modules is nil for
// one that needs none. A kernel of the same name is replaced: machines that run
// have it in their memory, and those that boot take the current one. Installing
// the same again changes nothing.
func (s *Store) PutKernel(ctx context.Context, name string, image, modules io.Reader) (KernelRecord, error) {
	if !nameGrammar.MatchString(name) {
		return KernelRecord{}, sandbox.Errorf(sandbox.Invalid, "kernel_name", "%.80q can't be a kernel's name", name)
	}
	a, err := s.put(ctx, artifact.VmlinuxName, image, maxVmlinux)
	if err != nil {
		return KernelRecord{}, err
	}
	r := KernelRecord{Name: name, Vmlinux: a.Hash}
	if modules != nil {
		m, err := s.put(ctx, artifact.ModulesName, modules, maxModules)
		if err != nil {
			return KernelRecord{}, err
		}
		r.Modules = m.Hash
	}
	err = s.change(ctx, func(sel *Selection) error {
		sel.Kernel = name
		var old KernelRecord
		if read(s.kernelFile(name), &old) == nil && old.check() == nil && old.Name == name && old.Hash() == r.Hash() {
			r = old
			return nil
		}
		r.InstalledAt = s.now().UTC().Truncate(time.Second)
		return write(s.kernelFile(name), r)
	})
	return r, err
}

// putPair records a pair whose artifacts are there and makes it the current one.
func (s *Store) putPair(ctx context.Context, r PairRecord) (PairRecord, error) {
	err := s.change(ctx, func(sel *Selection) error {
		sel.Version = r.Version
		var old PairRecord
		if read(s.pairFile(r.Version), &old) == nil && old.check() == nil && old.Version == r.Version {
			if old.Firecracker == r.Firecracker && old.Jailer == r.Jailer {
				r = old
				return nil
			}
			// Another build of the version: snapshots may need the one that was.
			if err := write(s.pairFile(r.Version+"+"+old.Firecracker[:12]), old); err != nil {
				return err
			}
		}
		r.InstalledAt = s.now().UTC().Truncate(time.Second)
		return write(s.pairFile(r.Version), r)
	})
	return r, err
}

// put stores an artifact of at most limit bytes.
func (s *Store) put(ctx context.Context, name string, r io.Reader, limit int64) (artifact.Artifact, error) {
	if err := s.make(); err != nil {
		return artifact.Artifact{}, err
	}
	a, err := s.artifacts.Put(name, &bounded{ctx: ctx, r: r, left: limit})
	if ctx.Err() != nil {
		return artifact.Artifact{}, ctx.Err()
	}
	return a, err
}

var errTooLarge = errors.New("it is too large")

// bounded reads until the context ends or more than left bytes came.
type bounded struct {
	ctx  context.Context
	r    io.Reader
	left int64
}

// Read implements io.Reader.
func (b *bounded) Read(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := b.r.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, errTooLarge
	}
	return n, err
}

// make makes the directories of records.
func (s *Store) make() error {
	for _, dir := range []string{s.pairDir(), s.kernelDir()} {
		if _, err := os.Stat(dir); err == nil {
			continue
		}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make the directory of what is installed: %w", err)
		}
		for _, above := range []string{s.dir, s.state} {
			if err := sys.SyncDir(above); err != nil {
				return err
			}
		}
	}
	return nil
}
