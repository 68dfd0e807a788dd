package auth

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// The files of the state directory that auth owns, all 0600.
const (
	adminKeyFile = "admin.key"
	resetFile    = "admin.key.reset"
	tokenKeyFile = "token.key"
)

// DefaultProject is the name of the project that the first start makes.
const DefaultProject = "default"

// FirstRun is what Bootstrap found or made.
type FirstRun struct {
	Project  sandbox.Project
	KeyFile  string // path of the admin key
	NewKey   bool   // it was made just now
	Lost     bool   // there are admin keys but no valid file
	Instruct string // what to do about Lost; for the log
}

// Bootstrap makes the default project and the host's admin key where they are
// missing. The key's text is written to its file first and its row second, so
// that a crash between leaves a file that the next start completes. A file
// that was lost is not replaced silently, since somebody may have taken it
// away on purpose: who wants a new one puts a file admin.key.reset beside it.
func Bootstrap(ctx context.Context, store sandbox.ProjectStore, stateDir string, now func() time.Time) (FirstRun, error) {
	run := FirstRun{KeyFile: filepath.Join(stateDir, adminKeyFile)}
	var err error
	if run.Project, err = defaultProject(ctx, store, now); err != nil {
		return run, err
	}
	keys, err := store.Keys(ctx, run.Project.ID)
	if err != nil {
		return run, err
	}
	admins := 0
	for _, k := range keys {
		if k.Role == sandbox.RoleAdmin && k.RevokedAt == nil {
			admins++
		}
	}
	text, err := readSecret(run.KeyFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return run, err
	}
	if caller, err := NewVerifier(store).Verify(ctx, text); err == nil && caller.Role == sandbox.RoleAdmin {
		return run, nil
	} else if err != nil && !sandbox.IsClass(err, sandbox.Denied) {
		return run, err
	}
	reset := filepath.Join(stateDir, resetFile)
	_, resetErr := os.Lstat(reset)
	if admins > 0 && resetErr != nil {
		run.Lost = true
		run.Instruct = fmt.Sprintf("%s holds no valid admin key. Use another admin key, or create the empty file %s and start again to get a new one",
			run.KeyFile, reset)
		return run, nil
	}
	if err := writeAdminKey(ctx, store, &run, text, now); err != nil {
		return run, err
	}
	if resetErr == nil {
		return run, os.Remove(reset)
	}
	return run, nil
}

func defaultProject(ctx context.Context, store sandbox.ProjectStore, now func() time.Time) (sandbox.Project, error) {
	list, err := store.Projects(ctx)
	if err != nil {
		return sandbox.Project{}, err
	}
	for _, p := range list {
		if p.Name == DefaultProject {
			return p, nil
		}
	}
	p := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: DefaultProject, CreatedAt: now().UTC()}
	return p, store.CreateProject(ctx, p)
}

// writeAdminKey makes the admin key. text is what the file holds now: a key
// whose row a crash has kept from being inserted is completed.
func writeAdminKey(ctx context.Context, store sandbox.ProjectStore, run *FirstRun, text string, now func() time.Time) error {
	id, secret, ok := parseKey(text)
	hash := hashSecret(secret)
	if ok {
		_, err := store.KeyByID(ctx, id)
		ok = sandbox.IsClass(err, sandbox.NotFound)
	}
	if !ok {
		id = sandbox.NewID(sandbox.KindKey)
		text, hash = Mint(id)
		if err := writeSecret(run.KeyFile, []byte(text+"\n")); err != nil {
			return err
		}
	}
	run.NewKey = true
	_, _, err := store.CreateKey(ctx, sandbox.Key{
		ID: id, Project: run.Project.ID, Name: "first admin key", Role: sandbox.RoleAdmin, Hash: hash, CreatedAt: now().UTC(),
	}, sandbox.Idempotency{})
	return err
}

// LoadTokenKey returns the key of Tokens, making STATE/token.key where it is
// missing. Losing the file ends every token and nothing else.
func LoadTokenKey(stateDir string) ([]byte, error) {
	path := filepath.Join(stateDir, tokenKeyFile)
	text, err := readSecret(path)
	if errors.Is(err, fs.ErrNotExist) {
		key := make([]byte, 32)
		rand.Read(key) // never fails (crypto/rand documents that it crashes instead)
		return key, writeSecret(path, []byte(text32.EncodeToString(key)+"\n"))
	}
	if err != nil {
		return nil, err
	}
	key, err := text32.DecodeString(text)
	if err != nil || len(key) != 32 {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "bad_token_key", "%s does not hold a key", path).
			WithHint("restore it, or remove it: then every token ends and a new key is made")
	}
	return key, nil
}

// readSecret reads a small file that nobody but its owner may read.
func readSecret(path string) (string, error) {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return "", fmt.Errorf("read a secret: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	st, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("read a secret: %w", err)
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o077 != 0 {
		return "", sandbox.Errorf(sandbox.FailedPrecondition, "secret_exposed", "%s may be read by others (mode %s)", path, st.Mode()).
			WithHint("chmod 600 it, and revoke what it holds if somebody may have read it")
	}
	b, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return "", fmt.Errorf("read a secret: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// writeSecret puts b at path durably: it is whole there or not at all.
func writeSecret(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".secret-*") // 0600
	if err != nil {
		return fmt.Errorf("write a secret: %w", err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write a secret: %w", errors.Join(err, os.Remove(f.Name())))
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("write a secret: %w", err)
	}
	return errors.Join(dir.Sync(), dir.Close())
}
