package template

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
	"sync"
	"syscall"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/template/erofs"
	"cloche.dev/cloche/internal/template/rootfs"
)

const (
	imageName    = "image.erofs"
	manifestName = "manifest.json"
)

// Limits bound what one template may take on this host.
type Limits struct {
	Tar       rootfs.Limits
	ImageSize int64 // bytes, holes included; 0 is 16 GiB
}

// Store keeps templates in a directory of this host. It is safe for concurrent
// use by one process; two daemons have two state directories.
type Store struct {
	dir    string // STATE/templates
	tmp    string // STATE/tmp/templates, on the same filesystem
	limits Limits
	scope  string        // names this store's directories outside of STATE
	builds chan struct{} // holds one token while a Debian build runs

	mu    sync.Mutex
	locks map[string]*digestLock
}

// Open makes or opens the store under stateDir and removes what imports and
// builds of a former process left behind.
func Open(stateDir string, limits Limits) (*Store, error) {
	if limits.ImageSize <= 0 {
		limits.ImageSize = 16 << 30
	}
	abs, err := filepath.Abs(stateDir)
	if err != nil {
		return nil, fmt.Errorf("open the template store: %w", err)
	}
	id := sha256.Sum256([]byte(abs))
	s := &Store{
		dir:    filepath.Join(abs, "templates"),
		tmp:    filepath.Join(abs, "tmp", "templates"),
		limits: limits,
		scope:  hex.EncodeToString(id[:6]),
		builds: make(chan struct{}, 1),
		locks:  map[string]*digestLock{},
	}
	if err := os.RemoveAll(s.tmp); err != nil {
		return nil, fmt.Errorf("clear the template store: %w", err)
	}
	for _, d := range []string{s.dir, s.tmp} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("open the template store: %w", err)
		}
	}
	if err := s.clearBuilds(); err != nil {
		return nil, err
	}
	return s, nil
}

// ImportTar implements sandbox.Builder.
func (s *Store) ImportTar(ctx context.Context, tar io.Reader, cfg sandbox.RuntimeConfig) (sandbox.Built, error) {
	return s.make(ctx, tar, cfg, Source{Kind: "tar"}, nil)
}

// make imports a tar, lets edit change the tree, and keeps the result.
func (s *Store) make(ctx context.Context, tar io.Reader, cfg sandbox.RuntimeConfig, src Source,
	edit func(*rootfs.Tree, *rootfs.Spool) error,
) (built sandbox.Built, err error) {
	if err := checkConfig(cfg); err != nil {
		return built, err
	}
	defer func() { err = hostError(err) }()
	spool, err := rootfs.NewSpool(s.tmp)
	if err != nil {
		return built, err
	}
	defer func() { err = errors.Join(err, spool.Close()) }()
	tree, err := rootfs.Import(ctx, tar, spool, s.limits.Tar)
	if err != nil {
		return built, err
	}
	if edit != nil {
		if err := edit(tree, spool); err != nil {
			return built, err
		}
	}
	dir, err := os.MkdirTemp(s.tmp, "make-")
	if err != nil {
		return built, fmt.Errorf("make a template: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	m := Manifest{Format: manifestFormat, Config: cfg, Dropped: tree.Dropped, Source: src}
	if m.Image, err = s.writeImage(ctx, dir, tree, spool); err != nil {
		return built, err
	}
	digest, err := s.install(ctx, dir, m)
	if err != nil {
		return built, err
	}
	return sandbox.Built{Digest: digest, SizeBytes: m.Image.Size, Entries: m.Image.Entries, Dropped: m.Dropped}, nil
}

// writeImage writes dir/image.erofs and its seal.
func (s *Store) writeImage(ctx context.Context, dir string, tree *rootfs.Tree, spool *rootfs.Spool) (info ImageInfo, err error) {
	f, err := os.OpenFile(filepath.Join(dir, imageName), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return info, fmt.Errorf("make an image: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	img, err := erofs.Write(ctx, f, tree.Root, spool, s.limits.ImageSize)
	if err != nil {
		return info, err
	}
	if err := f.Chmod(0o444); err != nil {
		return info, fmt.Errorf("make the image read-only: %w", err)
	}
	if err := f.Sync(); err != nil {
		return info, fmt.Errorf("sync the image: %w", err)
	}
	if err := writeSeal(dir, f); err != nil {
		return info, err
	}
	return ImageInfo{Kind: "erofs", SHA256: hex.EncodeToString(img.SHA256[:]), Size: img.Size, Entries: img.Inodes}, nil
}

// install adds the manifest to dir and moves dir to its place. Where the same
// template is there already and sound, that one stays.
func (s *Store) install(ctx context.Context, dir string, m Manifest) (digest string, err error) {
	data, digest, err := m.Encode()
	if err != nil {
		return "", err
	}
	if err := writeSynced(filepath.Join(dir, manifestName), data, 0o444); err != nil {
		return "", err
	}
	if err := syncDir(dir); err != nil {
		return "", err
	}
	unlock, err := s.lock(ctx, digest)
	if err != nil {
		return "", err
	}
	defer unlock()
	hexDigest, err := digestHex(digest)
	if err != nil {
		return "", err
	}
	place := filepath.Join(s.dir, hexDigest)
	if _, err := os.Lstat(place); err == nil {
		if err := s.verify(ctx, digest, place); err == nil {
			return digest, nil
		} else if ctx.Err() != nil {
			return "", ctx.Err()
		}
		// What is there is damaged, and here is a good one.
		if err := s.discard(place); err != nil {
			return "", err
		}
	}
	if err := os.Rename(dir, place); err != nil {
		return "", fmt.Errorf("install a template: %w", err)
	}
	return digest, syncDir(s.dir)
}

// Image implements sandbox.Builder.
func (s *Store) Image(ctx context.Context, digest string) (string, error) {
	place, unlock, err := s.find(ctx, digest)
	if err != nil {
		return "", err
	}
	defer unlock()
	if err := s.verify(ctx, digest, place); err != nil {
		return "", err
	}
	return filepath.Join(place, imageName), nil
}

// Manifest returns what a template on this host is.
func (s *Store) Manifest(ctx context.Context, digest string) (Manifest, error) {
	place, unlock, err := s.find(ctx, digest)
	if err != nil {
		return Manifest{}, err
	}
	defer unlock()
	return readManifest(place, digest)
}

// Digests implements sandbox.Builder.
func (s *Store) Digests(context.Context) ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("list the templates: %w", err)
	}
	var all []string
	for _, e := range entries {
		digest := "sha256:" + e.Name()
		if _, err := digestHex(digest); err == nil {
			all = append(all, digest)
		}
	}
	return all, nil
}

// Remove implements sandbox.Builder. Machines that have the image open keep it.
func (s *Store) Remove(ctx context.Context, digest string) error {
	place, unlock, err := s.find(ctx, digest)
	if sandbox.IsClass(err, sandbox.NotFound) {
		return nil
	} else if err != nil {
		return err
	}
	defer unlock()
	return s.discard(place)
}

// find locks a digest and returns its directory.
func (s *Store) find(ctx context.Context, digest string) (place string, unlock func(), err error) {
	hexDigest, err := digestHex(digest)
	if err != nil {
		return "", nil, err
	}
	if unlock, err = s.lock(ctx, digest); err != nil {
		return "", nil, err
	}
	place = filepath.Join(s.dir, hexDigest)
	if _, err := os.Lstat(place); err != nil {
		unlock()
		if errors.Is(err, fs.ErrNotExist) {
			return "", nil, sandbox.Errorf(sandbox.NotFound, "template_files_missing", "the template %s is not on this host", digest).
				WithHint("build or import it again: cloche template build")
		}
		return "", nil, fmt.Errorf("look for a template: %w", err)
	}
	return place, unlock, nil
}

// discard takes a template's directory out of sight at once and then deletes it.
func (s *Store) discard(place string) error {
	trash, err := os.MkdirTemp(s.tmp, "trash-")
	if err != nil {
		return fmt.Errorf("remove a template: %w", err)
	}
	if err := os.Rename(place, filepath.Join(trash, "t")); err != nil {
		return errors.Join(fmt.Errorf("remove a template: %w", err), os.Remove(trash))
	}
	if err := syncDir(s.dir); err != nil {
		return err
	}
	if err := os.RemoveAll(trash); err != nil {
		return fmt.Errorf("remove a template: %w", err)
	}
	return nil
}

// hostError gives the errors of making a template their class.
func hostError(err error) error {
	var large *erofs.TooLargeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &large):
		return sandbox.Errorf(sandbox.Invalid, "tar_too_large", "%w", err).
			WithHint("leave out what a template doesn't need, or raise the limit on this host")
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sandbox.Errorf(sandbox.NoCapacity, "disk_full", "the state directory's disk is full: %w", err).
			WithHint("free space, or remove templates: cloche template rm")
	}
	return sandbox.AsError(err)
}

// digestLock is held while a template's files are looked at or changed.
type digestLock struct {
	token chan struct{}
	users int
}

// lock waits for the digest's lock. Hashing a large image takes seconds, so
// templates don't wait for one another.
func (s *Store) lock(ctx context.Context, digest string) (unlock func(), err error) {
	s.mu.Lock()
	l := s.locks[digest]
	if l == nil {
		l = &digestLock{token: make(chan struct{}, 1)}
		s.locks[digest] = l
	}
	l.users++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(s.locks, digest)
		}
	}
	select {
	case l.token <- struct{}{}:
		return func() { <-l.token; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}
