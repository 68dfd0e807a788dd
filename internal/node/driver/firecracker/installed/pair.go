package installed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	versionWait = 10 * time.Second
	versionSize = 4 << 10
)

// PairOptions say which pairs are let in.
type PairOptions struct {
	// Version is what the pair must be; "" for any.
	Version string
	// AllowVulnerable lets jailers in that have a known hole; for tests.
	AllowVulnerable bool
}

// PutPair installs a firecracker and its jailer and makes them the current
// pair. Both are asked for their version first, and refused as
// vmm.ParseVersion and vmm.CheckVersion say. Installing the same again changes
// nothing.
func (s *Store) PutPair(ctx context.Context, firecracker, jailer io.Reader, o PairOptions) (PairRecord, error) {
	f, newF, err := s.putNew(ctx, artifact.FirecrackerName, firecracker)
	if err != nil {
		return PairRecord{}, err
	}
	j, newJ, err := s.putNew(ctx, artifact.JailerName, jailer)
	version := ""
	if err == nil {
		version, err = checkPair(ctx, f, j, o)
	}
	if err != nil {
		// Nothing names them. Those that were there before stay.
		return PairRecord{}, errors.Join(err, s.remove(f, newF), s.remove(j, newJ))
	}
	return s.putPair(ctx, PairRecord{Version: version, Firecracker: f.Hash, Jailer: j.Hash})
}

// putNew stores a program and tells whether it was not there before.
func (s *Store) putNew(ctx context.Context, name string, r io.Reader) (a artifact.Artifact, isNew bool, err error) {
	before, err := s.artifacts.List()
	if err != nil {
		return a, false, err
	}
	a, err = s.put(ctx, name, r, maxBinary)
	if errors.Is(err, errTooLarge) {
		err = sandbox.Errorf(sandbox.Invalid, "firecracker_invalid", "%s is larger than %d bytes, which no release is", name, maxBinary)
	}
	if err != nil {
		return artifact.Artifact{}, false, err
	}
	for _, b := range before {
		if b.Hash == a.Hash && b.Name == a.Name {
			return a, false, nil
		}
	}
	return a, true, nil
}

func (s *Store) remove(a artifact.Artifact, isNew bool) error {
	if !isNew {
		return nil
	}
	return s.artifacts.Remove(a)
}

// checkPair asks both programs for their version and returns it.
func checkPair(ctx context.Context, f, j artifact.Artifact, o PairOptions) (string, error) {
	versions := map[string]string{}
	for _, a := range []artifact.Artifact{f, j} {
		out, err := AskVersion(ctx, a.Path)
		if err != nil {
			return "", err
		}
		if versions[a.Name], err = vmm.ParseVersion(a.Name, out); err != nil {
			return "", err
		}
	}
	version := versions[artifact.FirecrackerName]
	if err := vmm.CheckVersion(version, versions[artifact.JailerName], o.AllowVulnerable); err != nil {
		return "", err
	}
	if o.Version != "" && o.Version != version {
		return "", sandbox.Errorf(sandbox.Invalid, "firecracker_version", "it should be version %.40q and says that it is %s", o.Version, version).
			WithHint("the archive is not what its name says; take the upstream release")
	}
	return version, nil
}

// AskVersion runs a program with --version and returns the beginning of what it
// prints.
func AskVersion(ctx context.Context, path string) ([]byte, error) {
	name := path[strings.LastIndexByte(path, '/')+1:]
	asked, cancel := context.WithTimeout(ctx, versionWait)
	defer cancel()
	cmd := exec.CommandContext(asked, path, "--version")
	cmd.Dir, cmd.Env = "/", []string{"LC_ALL=C"}
	// Whatever it starts ends with it, and what it prints beyond that is lost.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	out := &atMost{left: versionSize}
	cmd.Stdout = out
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case asked.Err() != nil:
		return nil, sandbox.Errorf(sandbox.Invalid, "firecracker_invalid", "%s did not say its version within %s", name, versionWait)
	case err != nil:
		return nil, sandbox.Errorf(sandbox.Invalid, "firecracker_invalid", "%s can't be run: %w", name, err).
			WithHint("take the release for this machine's architecture")
	}
	return out.Bytes(), nil
}

// atMost keeps the beginning of what is written to it.
type atMost struct {
	bytes.Buffer
	left int
}

// Write implements io.Writer.
func (b *atMost) Write(p []byte) (int, error) {
	n := min(len(p), b.left)
	b.left -= n
	if _, err := b.Buffer.Write(p[:n]); err != nil {
		return 0, fmt.Errorf("keep output: %w", err)
	}
	return len(p), nil
}
