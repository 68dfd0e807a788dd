package gvisor

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
)

const mib = 1 << 20

const (
	// guestPath and hostPath are where the guest finds its binary and the
	// directory of the socket that its agent dials.
	guestPath  = "/.cloche/guest"
	hostPath   = "/.cloche/host"
	socketName = "agent.sock"

	// defaultMaxProcs bounds the processes of each guest user but root.
	defaultMaxProcs = 256
	// tasksPerProc is how many host tasks a guest process may stand for,
	// about: its stub has a thread for each CPU and one more. The bound on
	// tasks is a backstop, since reaching it may end the whole machine.
	tasksPerProc = 8
	spareTasks   = 2048

	undoTimeout = 60 * time.Second
)

// overhead is what a machine's host processes may use beside the guest's
// memory: the sentry's own heap and page tables, the gofer, and the stubs. The
// constant part carries the 64 processes that even the smallest guest may have.
func overhead(memory int64) int64 { return 128*mib + memory/8 }

// Create implements driver.Driver.
func (d *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Machine, error) {
	e, err := d.from(d.o.Engine)
	if err != nil {
		return nil, err
	}
	return d.bring(ctx, e, spec, d.request(spec))
}

// bring makes a machine, and removes what it made of it on an error.
func (d *Driver) bring(ctx context.Context, e *engine, spec driver.Spec, req enginerpc.CreateRequest) (driver.Machine, error) {
	if err := check(spec); err != nil {
		return nil, err
	}
	m, err := d.create(ctx, e, req)
	if err == nil {
		return m, nil
	}
	if !sandbox.IsClass(err, sandbox.Conflict) { // then what is there is another machine
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		if uerr := d.Discard(undo, spec.ID); uerr != nil {
			d.o.Log.Error("undo a failed creation", "machine", spec.ID, "err", uerr)
		}
	}
	return nil, err
}

func check(spec driver.Spec) error {
	if !sandbox.ValidID(sandbox.KindSandbox, spec.ID) {
		return sandbox.Errorf(sandbox.Invalid, "malformed_id", "%q is not the id of a sandbox", spec.ID)
	}
	for _, p := range []string{spec.Image, spec.Guest, spec.NetNS} {
		if !filepath.IsAbs(p) {
			return sandbox.Errorf(sandbox.Invalid, "relative_path", "%q is not an absolute path", p)
		}
		if _, err := os.Stat(p); err != nil {
			return sandbox.Errorf(sandbox.FailedPrecondition, "file_missing", "a machine can't be made: %w", err)
		}
	}
	return spec.Resources.Validate()
}

func (d *Driver) create(ctx context.Context, e *engine, req enginerpc.CreateRequest) (*machine, error) {
	dir := req.Dir
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		if os.IsExist(err) {
			return nil, sandbox.Errorf(sandbox.Conflict, "machine_exists", "there is a machine %s, or what is left of one", req.ID)
		}
		return nil, err
	}
	if err := os.Mkdir(filepath.Join(dir, enginerpc.OverlayName), 0o700); err != nil {
		return nil, err
	}
	m := newMachine(d, e, req.ID)
	if _, err := m.Guest(); err != nil { // PID 1 may dial as soon as it runs
		return nil, err
	}
	rec, err := e.create(ctx, req)
	if err != nil {
		m.guest.Close()
		return nil, err
	}
	d.watch(m, rec) //nolint:contextcheck // it is watched beyond the call
	return m, nil
}

// request translates a spec into what the engine understands.
func (d *Driver) request(spec driver.Spec) enginerpc.CreateRequest {
	memory := int64(spec.Resources.MemoryMiB) * mib
	procs := spec.MaxProcs
	if procs <= 0 {
		procs = defaultMaxProcs
	}
	env := map[string]string{
		"PATH":        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"CLOCHE_DIAL": "unix:" + hostPath + "/" + socketName,
	}
	maps.Copy(env, spec.Supervisor)
	var environ []string
	for _, k := range slices.Sorted(maps.Keys(env)) {
		environ = append(environ, k+"="+env[k])
	}
	return enginerpc.CreateRequest{
		ID: spec.ID, Dir: d.machineDir(spec.ID), Image: spec.Image, NetNS: spec.NetNS, Hostname: spec.Hostname,
		Cgroup: d.group(spec.ID).Path(),
		Args:   []string{guestPath, "supervisor"}, Env: environ,
		Binds: []enginerpc.Bind{
			{Source: spec.Guest, Target: guestPath}, {Source: filepath.Join(d.socketDir(spec.ID), "host"), Target: hostPath},
		},
		Tmpfs: []enginerpc.Tmpfs{
			{Target: "/dev/shm", Bytes: memory / 2, Mode: "1777"}, {Target: "/run", Bytes: memory / 8, Mode: "755"},
		},
		MemoryBytes: memory, OverheadBytes: overhead(memory), DiskBytes: int64(spec.Resources.DiskMiB) * mib,
		MilliCPU: spec.Resources.MilliCPU, MaxProcs: procs, MaxTasks: tasksPerProc*procs + spareTasks,
	}
}
