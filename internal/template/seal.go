package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

const sealName = "seal.json"

// seal records which file had the manifest's hash when it was last hashed.
// While none of this changes, nobody wrote to it.
type seal sys.FileStamp

func sealOf(f *os.File) (seal, error) {
	info, err := f.Stat()
	if err != nil {
		return seal{}, fmt.Errorf("look at an image: %w", err)
	}
	if !info.Mode().IsRegular() {
		return seal{}, errors.New("an image is no regular file")
	}
	stamp, err := sys.StampOpen(f)
	if err != nil {
		return seal{}, fmt.Errorf("look at an image: %w", err)
	}
	return seal(stamp), nil
}

// writeSeal records f as the file that was hashed.
func writeSeal(dir string, f *os.File) error {
	s, err := sealOf(f)
	if err != nil {
		return err
	}
	data, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode a seal: %w", err)
	}
	tmp := filepath.Join(dir, sealName+".new")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("write a seal: %w", err)
	}
	if err := writeSynced(tmp, data, 0o600); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(dir, sealName)); err != nil {
		return fmt.Errorf("write a seal: %w", err)
	}
	return nil
}

func readSeal(dir string) (s seal, ok bool) {
	data, err := os.ReadFile(filepath.Join(dir, sealName))
	return s, err == nil && json.Unmarshal(data, &s) == nil
}

// readManifest reads a template's manifest, which must have the digest.
func readManifest(place, digest string) (m Manifest, err error) {
	data, err := os.ReadFile(filepath.Join(place, manifestName))
	if err != nil {
		return m, changed(digest, "its manifest can't be read: %w", err)
	}
	sum := sha256.Sum256(data)
	if "sha256:"+hex.EncodeToString(sum[:]) != digest {
		return m, changed(digest, "its manifest has another hash")
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, changed(digest, "its manifest can't be read: %w", err)
	}
	if m.Format != manifestFormat || m.Image.Kind != "erofs" {
		return m, sandbox.Errorf(sandbox.FailedPrecondition, "template_format_unknown",
			"the template %s has format %d, which this version doesn't know", digest, m.Format).
			WithHint("use the version of Cloche that made it, or build it again")
	}
	return m, nil
}

// verify makes sure that the template's files are what they were. It hashes
// the image only when the file isn't the one that the seal knows.
func (s *Store) verify(ctx context.Context, digest, place string) error {
	m, err := readManifest(place, digest)
	if err != nil {
		return err
	}
	f, err := os.Open(filepath.Join(place, imageName))
	if err != nil {
		return changed(digest, "its image can't be opened: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	now, err := sealOf(f)
	if err != nil {
		return changed(digest, "%w", err)
	}
	if was, ok := readSeal(place); ok && was == now {
		return nil
	}
	if now.Size != m.Image.Size {
		return changed(digest, "its image has %d bytes instead of %d", now.Size, m.Image.Size)
	}
	sum, err := hashFile(ctx, f)
	if err != nil {
		return err
	}
	if sum != m.Image.SHA256 {
		return changed(digest, "its image has another hash")
	}
	return writeSeal(place, f)
}

// changed makes the error for files that aren't what was installed.
func changed(digest, format string, args ...any) error {
	return sandbox.Errorf(sandbox.Internal, "template_changed", "the template %s was changed on disk: %w",
		digest, fmt.Errorf(format, args...)).
		WithHint("build or import it again; the same input repairs it")
}

// hashFile hashes f from its start and looks at ctx now and then.
func hashFile(ctx context.Context, f *os.File) (string, error) {
	h, buf := sha256.New(), make([]byte, 1<<20)
	for off := int64(0); ; {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		n, err := f.ReadAt(buf, off)
		_, _ = h.Write(buf[:n]) // a hash never fails
		off += int64(n)
		if errors.Is(err, io.EOF) {
			return hex.EncodeToString(h.Sum(nil)), nil
		}
		if err != nil {
			return "", fmt.Errorf("hash an image: %w", err)
		}
	}
}

// writeSynced writes a new file and has it on disk when it returns.
func writeSynced(path string, data []byte, perm os.FileMode) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return fmt.Errorf("write a template's file: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(data); err != nil {
		return fmt.Errorf("write a template's file: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync a template's file: %w", err)
	}
	return nil
}

func syncDir(dir string) (err error) {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync a directory: %w", err)
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync a directory: %w", err)
	}
	return nil
}
