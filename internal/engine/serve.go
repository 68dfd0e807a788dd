package engine

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
)

// routes is the control process's interface; see enginerpc.
func (c *control) routes() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, h func(w http.ResponseWriter, r *http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			c.mu.Lock()
			c.used = time.Now()
			c.mu.Unlock()
			answer, err := h(w, r)
			c.reply(w, answer, err)
		})
	}
	handle("GET /v1/about", c.serveAbout)
	handle("GET /v1/machines", c.serveList)
	handle("PUT /v1/machines/{id}", c.serveCreate)
	handle("GET /v1/machines/{id}", c.serveGet)
	handle("DELETE /v1/machines/{id}", c.serveDiscard)
	handle("POST /v1/kill/{id}", c.serveKill)
	handle("POST /v1/pause/{id}", c.servePause)
	handle("POST /v1/resume/{id}", c.serveResume)
	handle("POST /v1/snapshot/{id}", c.serveSnapshot)
	handle("POST /v1/quit", c.serveQuit)
	return mux
}

// statuses are the HTTP statuses of the classes that occur here.
var statuses = map[sandbox.Class]int{
	sandbox.NotFound: http.StatusNotFound, sandbox.Conflict: http.StatusConflict, sandbox.Invalid: http.StatusBadRequest,
	sandbox.FailedPrecondition: http.StatusConflict, sandbox.Unavailable: http.StatusServiceUnavailable,
	sandbox.NoCapacity: http.StatusInsufficientStorage,
}

func (c *control) reply(w http.ResponseWriter, answer any, err error) {
	status := http.StatusOK
	if err != nil {
		e := sandbox.AsError(err)
		answer, status = e, http.StatusInternalServerError
		if s, ok := statuses[e.Class]; ok {
			status = s
		}
	}
	if answer == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(answer) // fails only when nobody listens
}

func (c *control) serveAbout(http.ResponseWriter, *http.Request) (any, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return enginerpc.About{Engine: Version, PID: os.Getpid(), Machines: len(c.machines)}, nil
}

func (c *control) serveList(http.ResponseWriter, *http.Request) (any, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := []enginerpc.Machine{}
	for _, m := range c.machines {
		list = append(list, m.record())
	}
	return list, nil
}

// find returns a machine that has been made.
func (c *control) find(id string) (*machine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m, ok := c.machines[id]; ok {
		return m, nil
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "machine_not_found", "the engine has no machine %s", id)
}

func (c *control) serveGet(_ http.ResponseWriter, r *http.Request) (any, error) {
	m, err := c.find(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	rec := m.record()
	if rec.End != nil {
		return rec, nil
	}
	err = c.answers(r.Context(), rec.ID)
	if rec = m.record(); rec.End == nil {
		rec.Live = err == nil
	}
	return rec, nil
}

func (c *control) serveKill(_ http.ResponseWriter, r *http.Request) (any, error) {
	m, err := c.find(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	return nil, c.kill(r.Context(), m)
}

func (c *control) serveQuit(http.ResponseWriter, *http.Request) (any, error) {
	if !c.retire() {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "engine_busy", "the engine still has machines")
	}
	// The answer goes out first: shutting down waits for it.
	time.AfterFunc(0, c.quit)
	return nil, nil
}

// serveDiscard ends a machine, or the making of it, and forgets it. It
// succeeds for one that never was.
func (c *control) serveDiscard(_ http.ResponseWriter, r *http.Request) (any, error) {
	id := r.PathValue("id")
	c.mu.Lock()
	making := c.creating[id]
	c.mu.Unlock()
	if making != nil {
		making.cancel()
		select {
		case <-making.done:
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
	m, err := c.find(id)
	if err == nil {
		if err := c.kill(r.Context(), m); err != nil {
			return nil, err
		}
		if err := c.clear(r.Context(), id, m.record().Cgroup); err != nil {
			return nil, err
		}
		c.mu.Lock()
		delete(c.machines, id)
		c.mu.Unlock()
	}
	return nil, nil
}

// clear removes what a machine without processes leaves outside its directory.
func (c *control) clear(ctx context.Context, id, group string) error {
	if err := c.tree.Group(group).Remove(ctx); err != nil {
		return err
	}
	if err := removeState(c.root(), id); err != nil {
		return err
	}
	if err := os.Remove(c.link(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func (c *control) serveCreate(w http.ResponseWriter, r *http.Request) (any, error) {
	var req enginerpc.CreateRequest
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, enginerpc.MaxRequest))
	if err := dec.Decode(&req); err != nil {
		return nil, sandbox.Errorf(sandbox.Invalid, "malformed", "the request is malformed: %w", err)
	}
	if req.ID != r.PathValue("id") || !sandbox.ValidID(sandbox.KindSandbox, req.ID) {
		return nil, sandbox.Errorf(sandbox.Invalid, "malformed", "%q is not the id of a sandbox", req.ID)
	}
	for _, p := range []string{req.Dir, req.Image, req.NetNS, req.Cgroup} {
		if !filepath.IsAbs(p) {
			return nil, sandbox.Errorf(sandbox.Invalid, "malformed", "%q is not an absolute path", p)
		}
	}
	if req.Restore != "" && (!filepath.IsAbs(req.Restore) || req.RestoreKind != enginerpc.Memory && req.RestoreKind != enginerpc.Disk) {
		return nil, sandbox.Errorf(sandbox.Invalid, "malformed", "%q (%s) is not an image", req.Restore, req.RestoreKind)
	}
	if len(req.Binds) == 0 {
		return nil, sandbox.Errorf(sandbox.Invalid, "malformed", "a machine needs a bind mount: without one gVisor starts no gofer and can't have its disk in a file")
	}
	if req.RestoreKind == enginerpc.Memory {
		var err error
		if req, err = thaw(req); err != nil {
			return nil, err
		}
	}
	return c.create(r.Context(), req)
}

// create makes a machine. On failure nothing of it is left but its directory.
func (c *control) create(ctx context.Context, req enginerpc.CreateRequest) (enginerpc.Machine, error) {
	var none enginerpc.Machine
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	making := &creation{cancel: cancel, done: make(chan struct{})}
	if err := c.begin(req.ID, making); err != nil {
		return none, err
	}
	defer close(making.done)
	defer func() {
		c.mu.Lock()
		delete(c.creating, req.ID)
		c.mu.Unlock()
	}()
	err := os.Symlink(req.Dir, c.link(req.ID))
	if err == nil {
		err = saveRequest(req.Dir, req)
	}
	var out created
	if err == nil {
		out, err = c.spawn(ctx, req)
	}
	if err == nil {
		exit := c.reaper.adopt(out.Machine.Sentry)
		if err = saveRecord(req.Dir, out.Machine); err == nil {
			c.mu.Lock()
			c.watch(out.Machine, req.Dir, exit) //nolint:contextcheck // it is watched beyond the request
			c.mu.Unlock()
			return out.Machine, nil
		}
	}
	undo, stop := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer stop()
	uerr := killAll(undo, c.tree, enginerpc.Machine{Cgroup: req.Cgroup})
	if uerr == nil {
		uerr = c.clear(undo, req.ID, req.Cgroup)
	}
	if uerr != nil {
		c.log.Error("undo a failed creation", "machine", req.ID, "err", uerr)
	}
	c.log.Warn("creation failed", "machine", req.ID, "err", err, "log", out.Log,
		"panic", readTail(filepath.Join(req.Dir, enginerpc.PanicName), maxCreateLog))
	if ctx.Err() != nil {
		return none, ctx.Err()
	}
	if err = full(err); sandbox.IsClass(err, sandbox.NoCapacity) {
		return none, err
	}
	return none, sandbox.Errorf(sandbox.Internal, "machine_not_made", "gVisor could not make the machine: %w", err)
}

func (c *control) begin(id string, making *creation) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.quitting {
		return sandbox.Errorf(sandbox.Unavailable, "engine_quitting", "the engine's control process is about to end")
	}
	if c.machines[id] != nil || c.creating[id] != nil {
		return sandbox.Errorf(sandbox.Conflict, "machine_exists", "the engine has a machine %s", id)
	}
	c.creating[id] = making
	return nil
}
