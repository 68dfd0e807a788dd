package engine

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
)

// snapshotTimeout bounds writing an image.
const snapshotTimeout = 30 * time.Minute

func (c *control) serveSnapshot(w http.ResponseWriter, r *http.Request) (any, error) {
	var req enginerpc.SnapshotRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, enginerpc.MaxRequest)).Decode(&req); err != nil {
		return nil, sandbox.Errorf(sandbox.Invalid, "malformed", "the request is malformed: %w", err)
	}
	if !filepath.IsAbs(req.Dir) || req.Kind != enginerpc.Memory && req.Kind != enginerpc.Disk {
		return nil, sandbox.Errorf(sandbox.Invalid, "malformed", "a snapshot of kind %q in %q can't be taken", req.Kind, req.Dir)
	}
	out := enginerpc.Snapshot{Engine: Version}
	return &out, c.verb(r, func(m *machine) error {
		began := time.Now()
		err := c.save(m, req)
		out.StoodNanos = time.Since(began).Nanoseconds()
		return err
	})
}

// save has the sentry write an image. It stops the machine's tasks for that by
// itself, once more where they are stopped already, and lets them go on.
func (c *control) save(m *machine, req enginerpc.SnapshotRequest) error {
	rec := m.record()
	conf, err := runscConfig(c.root(), nil)
	if err != nil {
		return err
	}
	box := c.box(rec.ID)
	if req.Kind == enginerpc.Disk {
		err = c.ask(m, snapshotTimeout, func() error {
			return box.FSSave(conf, rec.ID, req.Dir, gsandbox.FSSaveOpts{})
		})
		return full(err)
	}
	made, err := loadRequest(m.dir)
	if err == nil {
		err = saveRequest(req.Dir, made)
	}
	if err == nil {
		err = c.ask(m, snapshotTimeout, func() error {
			return box.Checkpoint(conf, rec.ID, req.Dir, gsandbox.CheckpointOpts{Resume: true})
		})
	}
	return full(err)
}

// full makes an error of class NoCapacity of one that a full disk caused. What
// crosses the sentry's RPC is text.
func full(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || strings.Contains(err.Error(), unix.ENOSPC.Error()) {
		return sandbox.Errorf(sandbox.NoCapacity, "disk_full", "the host's disk is full: %w", err)
	}
	return err
}

// thaw merges what a memory image has frozen into the request for a machine
// that is to be made from it.
func thaw(req enginerpc.CreateRequest) (enginerpc.CreateRequest, error) {
	frozen, err := loadRequest(req.Restore)
	if err != nil {
		return req, sandbox.Errorf(sandbox.FailedPrecondition, "image_incomplete", "the image in %s has no request: %w", req.Restore, err)
	}
	sources := map[string]string{}
	for _, b := range req.Binds {
		sources[b.Target] = b.Source
	}
	for i, b := range frozen.Binds {
		source, ok := sources[b.Target]
		if !ok {
			return req, sandbox.Errorf(sandbox.FailedPrecondition, "image_differs", "the image needs something at %s", b.Target)
		}
		frozen.Binds[i].Source = source
	}
	frozen.ID, frozen.Dir, frozen.Image, frozen.NetNS = req.ID, req.Dir, req.Image, req.NetNS
	frozen.Hostname, frozen.Cgroup = req.Hostname, req.Cgroup
	frozen.OverheadBytes, frozen.MaxTasks = req.OverheadBytes, req.MaxTasks
	frozen.Restore, frozen.RestoreKind = req.Restore, req.RestoreKind
	return frozen, nil
}

// saveRequest keeps the request that a machine was made with.
func saveRequest(dir string, req enginerpc.CreateRequest) error {
	req.Restore, req.RestoreKind = "", ""
	data, err := json.Marshal(req)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, enginerpc.RequestName), data, 0o600)
}

func loadRequest(dir string) (enginerpc.CreateRequest, error) {
	var req enginerpc.CreateRequest
	data, err := os.ReadFile(filepath.Join(dir, enginerpc.RequestName))
	if err != nil {
		return req, err
	}
	return req, json.Unmarshal(data, &req)
}
