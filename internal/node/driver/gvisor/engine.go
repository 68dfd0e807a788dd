package gvisor

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// engine is the control process of one engine, as seen from here. It is
// started when it is needed and does not run.
type engine struct {
	dir  string // its run directory
	http *http.Client
	mu   sync.Mutex // one start at a time
}

// binaryLink is the name of the link in an engine's run directory to its
// binary, by which a later daemon finds it.
const binaryLink = "engine"

// engineDir is the run directory of the engine at path.
func (d *Driver) engineDir(path string) string {
	sum := sha256.Sum256([]byte(path))
	return filepath.Join(d.o.RunDir, Name, hex.EncodeToString(sum[:6]))
}

func (d *Driver) engineAt(dir string) *engine {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.engines[dir]
	if e == nil {
		dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, enginerpc.SocketName))
		}
		e = &engine{dir: dir, http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
		d.engines[dir] = e
	}
	return e
}

// from returns the engine whose binary lies at path.
func (d *Driver) from(path string) (*engine, error) {
	e := d.engineAt(d.engineDir(path))
	if err := os.MkdirAll(e.dir, 0o700); err != nil {
		return nil, err
	}
	err := os.Symlink(path, filepath.Join(e.dir, binaryLink))
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return e, nil
}

// known lists every engine that has a run directory.
func (d *Driver) known() []*engine {
	links, err := filepath.Glob(filepath.Join(d.o.RunDir, Name, "*", binaryLink))
	if err != nil {
		return nil // the pattern is malformed, so there can't be any
	}
	var all []*engine
	for _, l := range links {
		all = append(all, d.engineAt(filepath.Dir(l)))
	}
	return all
}

// engineOf returns the engine that made a machine, nil for none.
func (d *Driver) engineOf(id string) *engine {
	for _, e := range d.known() {
		if e.has(id) {
			return e
		}
	}
	return nil
}

func (e *engine) has(id string) bool {
	_, err := os.Lstat(filepath.Join(e.dir, "machines", id))
	return err == nil
}

// links names the machines that the control process knows or knew.
func (e *engine) links() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(e.dir, "machines"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, entry := range entries {
		ids = append(ids, entry.Name())
	}
	return ids, nil
}

// start starts the control process unless it runs. A lock file keeps several
// daemons and calls from doing so at once.
func (e *engine) start(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	lock, err := lockFile(ctx, filepath.Join(e.dir, "start.lock"))
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := e.once(ctx, http.MethodGet, "/v1/about", nil, &enginerpc.About{}); err == nil {
		return nil
	}
	binary, err := e.binary()
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, binary, "start", e.dir).CombinedOutput()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return sandbox.Errorf(sandbox.Internal, "engine_not_started", "the gVisor engine's control process did not start: %w: %s", err, strings.TrimSpace(string(out))).
			WithHint("look into %s", filepath.Join(e.dir, "control.log"))
	}
	return nil
}

// lockFile waits for an exclusive lock.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	for {
		f, err := sys.TryLock(path)
		if !errors.Is(err, sys.ErrLocked) {
			return f, err
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// call asks the control process, starting it where it does not run.
func (e *engine) call(ctx context.Context, method, path string, in, out any) error {
	for {
		err := e.once(ctx, method, path, in, out)
		var failed *sandbox.Error
		switch {
		case absent(err):
			if err := e.start(ctx); err != nil {
				return err
			}
		case errors.As(err, &failed) && failed.Code == "engine_quitting":
			if err := pause(ctx, 10*time.Millisecond); err != nil {
				return err
			}
		default:
			return err
		}
	}
}

// repeat asks again, a few times, what may be asked twice where the control
// process ended under it: it is started anew, and its machines live on.
func repeat(ctx context.Context, ask func() error) error {
	for tries := 0; ; tries++ {
		err := ask()
		var failed *sandbox.Error
		if tries == 5 || absent(err) || !errors.As(err, &failed) || failed.Code != "engine_unreachable" {
			return err
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

// absent tells whether nobody listened, so that nothing was asked.
func absent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial" && (errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist))
}

// once asks the control process if it runs.
func (e *engine) once(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://engine"+path, body)
	if err != nil {
		return err
	}
	resp, err := e.http.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		// Its process ended under the call; the next one starts another.
		return sandbox.Errorf(sandbox.Unavailable, "engine_unreachable", "ask the gVisor engine: %w", err)
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(io.LimitReader(resp.Body, enginerpc.MaxAnswer))
	if resp.StatusCode >= http.StatusBadRequest {
		failed := &sandbox.Error{}
		if err := dec.Decode(failed); err != nil || failed.Class == "" {
			return sandbox.Errorf(sandbox.Internal, "engine_failed", "the gVisor engine answered %s", resp.Status)
		}
		return failed
	}
	if out == nil {
		return nil
	}
	return dec.Decode(out)
}

func (e *engine) create(ctx context.Context, req enginerpc.CreateRequest) (enginerpc.Machine, error) {
	var m enginerpc.Machine
	return m, e.call(ctx, http.MethodPut, "/v1/machines/"+req.ID, req, &m)
}

func (e *engine) get(ctx context.Context, id string) (enginerpc.Machine, error) {
	var m enginerpc.Machine
	return m, repeat(ctx, func() error { return e.call(ctx, http.MethodGet, "/v1/machines/"+id, nil, &m) })
}

func (e *engine) pause(ctx context.Context, id string) error {
	return repeat(ctx, func() error { return e.call(ctx, http.MethodPost, "/v1/pause/"+id, nil, nil) })
}

func (e *engine) resume(ctx context.Context, id string) error {
	return repeat(ctx, func() error { return e.call(ctx, http.MethodPost, "/v1/resume/"+id, nil, nil) })
}

func (e *engine) snapshot(ctx context.Context, id string, req enginerpc.SnapshotRequest) (enginerpc.Snapshot, error) {
	var s enginerpc.Snapshot
	return s, e.call(ctx, http.MethodPost, "/v1/snapshot/"+id, req, &s)
}

// binary is the path of the engine's binary.
func (e *engine) binary() (string, error) { return os.Readlink(filepath.Join(e.dir, binaryLink)) }

func (e *engine) kill(ctx context.Context, id string) error {
	return repeat(ctx, func() error { return e.call(ctx, http.MethodPost, "/v1/kill/"+id, nil, nil) })
}

// discard has the control process forget a machine, if it runs.
func (e *engine) discard(ctx context.Context, id string) error {
	err := repeat(ctx, func() error { return e.once(ctx, http.MethodDelete, "/v1/machines/"+id, nil, nil) })
	if err != nil && !absent(err) {
		return err
	}
	return nil
}

// sweep removes what is left of a machine in the control process's directory.
func (e *engine) sweep(id string) error {
	root := filepath.Join(e.dir, enginerpc.RootName)
	for _, path := range []string{
		filepath.Join(e.dir, "machines", id), filepath.Join(root, "runsc-"+id+".sock"),
		filepath.Join(root, id+"_sandbox:"+id+".state"), filepath.Join(root, id+"_sandbox:"+id+".lock"),
	} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// quit ends the control process if it runs and has no machines, and waits
// until it has ended.
func (e *engine) quit(ctx context.Context) error {
	err := e.once(ctx, http.MethodPost, "/v1/quit", nil, nil)
	if absent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	lock, err := lockFile(ctx, filepath.Join(e.dir, enginerpc.LockName))
	if err != nil {
		return err
	}
	return lock.Close()
}

// remove removes the run directory of an engine whose control process has
// quit, unless a machine that it knew has not been discarded yet.
func (e *engine) remove() error {
	if ids, err := e.links(); err != nil || len(ids) > 0 {
		return err
	}
	return os.RemoveAll(e.dir)
}

func readRecord(dir string) (enginerpc.Machine, error) {
	var m enginerpc.Machine
	data, err := os.ReadFile(filepath.Join(dir, enginerpc.RecordName))
	if err != nil {
		return m, err
	}
	return m, json.Unmarshal(data, &m)
}
