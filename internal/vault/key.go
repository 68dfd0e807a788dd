package vault

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const maxKeyFile = 4 << 10

// readKey reads the key file: one line of base64. With create it is made where
// it isn't there; without, there may be none.
func readKey(path string, create bool) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		if !create {
			return nil, nil
		}
		if err := makeKey(path); err != nil {
			return nil, badKey("can't be made: %w", err)
		}
		f, err = os.Open(path)
	}
	if err != nil {
		return nil, badKey("can't be read: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, badKey("can't be read: %w", err)
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o077 != 0 {
		return nil, badKey("%s is not a file that only its owner can read (mode %v)", path, st.Mode()).WithHint("chmod 600 %s", path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKeyFile))
	if err != nil {
		return nil, badKey("can't be read: %w", err)
	}
	key, err := base64.StdEncoding.DecodeString(string(bytes.TrimSpace(text)))
	if err != nil || len(key) != keySize {
		return nil, badKey("%s does not hold %d bytes in base64", path, keySize).WithHint("make one: head -c %d /dev/urandom | base64", keySize)
	}
	return key, nil
}

func badKey(format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "vault_key", "the key file "+format, args...)
}

// makeKey makes the key file, whole or not at all. Of two that make it at once
// one wins, and both have the winner's.
func makeKey(path string) error {
	key := make([]byte, keySize)
	rand.Read(key)                                                // never fails
	f, err := os.CreateTemp(filepath.Dir(path), ".cloche-vault-") // 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = fmt.Fprintln(f, base64.StdEncoding.EncodeToString(key))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync() // what is sealed under a key that a power loss takes is lost
}

const (
	maxCommands    = 4 // at once
	commandTimeout = 30 * time.Second
)

// run asks the command. Its standard error is the daemon's; what it says there
// is not repeated in an error, since it may speak of keys.
func (v *Vault) run(ctx context.Context, verb, project, id string, in []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	select {
	case v.running <- struct{}{}:
		defer func() { <-v.running }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	out := &bounded{max: 2 * maxWrapped}
	cmd := exec.CommandContext(ctx, v.command[0], append(v.command[1:len(v.command):len(v.command)], verb)...)
	cmd.Env = append(os.Environ(), "CLOCHE_PROJECT="+project, "CLOCHE_SECRET="+id)
	cmd.Stdin = bytes.NewReader([]byte(base64.StdEncoding.EncodeToString(in) + "\n"))
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, sandbox.Errorf(sandbox.Unavailable, "vault_command", "the key command could not %s a key: %w", verb, err).
			WithHint("its own words are in the daemon's log")
	}
	answer, err := base64.StdEncoding.DecodeString(string(bytes.TrimSpace(out.buf.Bytes())))
	if err != nil || len(answer) == 0 || len(answer) > maxWrapped {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "vault_command", "the key command's answer to %s is not base64 of 1 to %d bytes", verb, maxWrapped)
	}
	return answer, nil
}

var errTooMuch = errors.New("it says too much")

// bounded takes so much and no more: then the command loses its reader.
type bounded struct {
	buf bytes.Buffer
	max int
}

// Write implements io.Writer.
func (b *bounded) Write(p []byte) (int, error) {
	if b.buf.Len()+len(p) > b.max {
		return 0, errTooMuch
	}
	return b.buf.Write(p)
}
