package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Draft is a snapshot that is being written: the driver writes into Dir, then
// it is committed or discarded.
type Draft struct {
	s   *Store
	id  string
	dir string
}

// Begin makes the directory of a new snapshot, and removes what an earlier try
// left of it.
func (s *Store) Begin(id string) (*Draft, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	d := &Draft{s: s, id: id, dir: filepath.Join(s.dir, tmpPrefix+id)}
	if failpoint.Skip(failpoint.SkipRename) {
		d.dir = s.Dir(id)
	}
	if err := s.Delete(id); err != nil {
		return nil, err
	}
	if err := os.RemoveAll(d.dir); err != nil {
		return nil, DiskError(err)
	}
	if err := os.Mkdir(d.dir, 0o700); err != nil {
		return nil, DiskError(fmt.Errorf("make the snapshot's directory: %w", err))
	}
	return d, nil
}

// Dir is the empty directory for the driver's files.
func (d *Draft) Dir() string { return d.dir }

// Discard removes all of it. It may be called after Commit, and then does nothing.
func (d *Draft) Discard() error {
	if d.dir == "" {
		return nil
	}
	return DiskError(os.RemoveAll(d.dir))
}

// Commit makes what lies in Dir the snapshot that m describes, and returns m
// with what it found. When it returns nil the snapshot is durable; otherwise
// nothing of it is left but the draft.
func (d *Draft) Commit(ctx context.Context, m Manifest) (*Manifest, error) {
	m.ID, m.Format, m.Needs.Format = d.id, Format, Format
	files, before, err := d.prepare()
	if err != nil {
		return nil, DiskError(err)
	}
	failpoint.Hit("node.snapshot.written")
	if m.Files, m.SizeBytes, err = d.settle(ctx, files); err != nil {
		return nil, DiskError(err)
	}
	if err := m.check(); err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, "snapshot_manifest", "what the driver wrote can't be described: %w", err)
	}
	data, err := m.encode()
	if err != nil {
		return nil, err
	}
	failpoint.Hit("node.snapshot.synced")
	if err := writeFile(filepath.Join(d.dir, manifestFile), data); err != nil {
		return nil, DiskError(err)
	}
	failpoint.Hit("node.snapshot.manifest")
	if err := d.publish(); err != nil {
		return nil, DiskError(err)
	}
	// The stamps of before it was hashed, so that a change since then shows; the
	// rename was of the directory and left the files' own as they were. A
	// snapshot without stamps is good too: it is hashed when it is used.
	_ = d.s.record(m.ID, before)
	return &m, nil
}

// publish gives the draft its name.
func (d *Draft) publish() error {
	if err := syncDir(d.dir); err != nil {
		return err
	}
	if to := d.s.Dir(d.id); to != d.dir {
		if err := os.Rename(d.dir, to); err != nil {
			return err
		}
		failpoint.Hit("node.snapshot.renamed")
	}
	if err := syncDir(d.s.dir); err != nil {
		// Whether it is there after a power loss is not known, so it must not be.
		return errors.Join(err, d.s.Delete(d.id))
	}
	d.dir = ""
	return nil
}

// prepare lists the driver's files, takes everybody's hands off them, and says
// what they look like.
func (d *Draft) prepare() ([]string, stamps, error) {
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return nil, nil, err
	}
	var names []string
	looks := stamps{}
	for _, e := range entries { // in the order of names
		if !e.Type().IsRegular() || !validName(e.Name()) || len(names) == maxFiles {
			return nil, nil, sandbox.Errorf(sandbox.Internal, "snapshot_files", "the driver wrote %q, which can't be a snapshot's file", e.Name())
		}
		path := filepath.Join(d.dir, e.Name())
		if err := seal(path, e); err != nil {
			return nil, nil, err
		}
		if looks[e.Name()], err = sys.StampFile(path); err != nil {
			return nil, nil, err
		}
		names = append(names, e.Name())
	}
	return names, looks, nil
}

// seal takes everybody's hands off a file. One that nobody may write to is for
// a jail to read, by another user's process.
func seal(path string, e os.DirEntry) error {
	st, err := e.Info()
	if err != nil {
		return err
	}
	mode := os.FileMode(0o600)
	if st.Mode().Perm() == 0o444 {
		mode = 0o444
	}
	return os.Chmod(path, mode)
}

// settle hashes the files, while they are cached, and meanwhile has the kernel
// write them to the disk: one reads memory, the other waits for the device.
func (d *Draft) settle(ctx context.Context, names []string) ([]File, int64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	synced := make(chan error, 1)
	go func() { // ends before settle does
		var err error
		for _, name := range names {
			if err = ctx.Err(); err != nil {
				break
			}
			if err = syncFile(filepath.Join(d.dir, name)); err != nil {
				break
			}
		}
		if err != nil {
			cancel()
		}
		synced <- err
	}()
	var files []File
	var err error
	for _, name := range names {
		var f File
		if f, err = measure(ctx, filepath.Join(d.dir, name)); err != nil {
			cancel()
			break
		}
		files = append(files, f)
	}
	if serr := <-synced; serr != nil && !errors.Is(serr, context.Canceled) {
		return nil, 0, serr
	}
	if err != nil {
		return nil, 0, err
	}
	size, err := d.onDisk(names)
	return files, size, err
}

// onDisk sums what the files take on the disk, which is known once they were
// written to it.
func (d *Draft) onDisk(names []string) (int64, error) {
	var sum int64
	for _, name := range names {
		st, err := os.Lstat(filepath.Join(d.dir, name))
		if err != nil {
			return 0, err
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok {
			sum += sys.Blocks * 512
		}
	}
	return sum, nil
}

// measure hashes one file.
func measure(ctx context.Context, path string) (File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	sum := sha256.New()
	size, err := copyHash(ctx, sum, f)
	if err != nil {
		return File{}, err
	}
	return File{Name: filepath.Base(path), Size: size, SHA256: hex.EncodeToString(sum.Sum(nil))}, nil
}

// copyHash hashes r until its end or ctx's.
func copyHash(ctx context.Context, sum hash.Hash, r io.Reader) (int64, error) {
	buf := make([]byte, 1<<20)
	var n int64
	for ctx.Err() == nil {
		k, err := r.Read(buf)
		sum.Write(buf[:k])
		n += int64(k)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
	return n, ctx.Err()
}

func writeFile(path string, data []byte) error {
	if failpoint.Skip(failpoint.SkipFsync) {
		return os.WriteFile(path, data, 0o600)
	}
	return sys.WriteFileAtomic(path, data, 0o600)
}

func syncDir(dir string) error {
	if failpoint.Skip(failpoint.SkipFsync) {
		return nil
	}
	return sys.SyncDir(dir)
}

func syncFile(path string) error {
	if failpoint.Skip(failpoint.SkipFsync) {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
