package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"cloche.dev/cloche/internal/guest/wire"
	"cloche.dev/cloche/internal/guestapi/guestv1"
)

// The hooks that a restored machine runs, and what they may take.
const (
	hooksDir      = "/etc/cloche/on_restore.d"
	hookLimit     = 10 * time.Second // each
	hooksLimit    = 30 * time.Second // all together
	hookOutput    = 4 << 10          // kept of each, its beginning
	hookPipeDelay = time.Second      // for who holds a hook's output open after it
	maxHooks      = 64
)

// What a result's code is where the hook did not end by itself; a signal is
// 128 and its number, as in a shell.
const (
	hookTimedOut = 124 // or was not begun in time
	hookNotRun   = 126
	hookCutOff   = 125 // the agent ended meanwhile
)

var hookName = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

// runHooks runs the on_restore hooks, once for each generation: the supervisor
// keeps which were begun, so that one is never run twice, whoever asks again
// and whatever ends in between. They outlive the connection that Setup came over.
func (a *Agent) runHooks(ctx context.Context, m *guestv1.SetupRequest) []*guestv1.HookResult {
	if !m.GetRestored() || m.GetGeneration() == 0 {
		return nil
	}
	did := new(guestv1.SetupResponse)
	a.mu.Lock()
	same, done := a.state.HooksFor == m.GetGeneration(), a.state.HooksDone
	if same {
		if err := proto.Unmarshal(a.state.Hooks, did); err != nil {
			a.cfg.Log.Error("what the supervisor kept of the hooks can't be read", "error", err)
		}
	}
	a.mu.Unlock()
	if same && done {
		return did.GetHooks()
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), hooksLimit)
	defer cancel()
	for _, name := range a.hookNames() {
		if slices.ContainsFunc(did.GetHooks(), func(r *guestv1.HookResult) bool { return r.GetName() == name }) {
			continue
		}
		r := &guestv1.HookResult{Name: name, Code: hookCutOff, Output: "the agent ended while it ran"}
		did.Hooks = append(did.Hooks, r)
		if err := a.keepHooks(m.GetGeneration(), did, false); err != nil {
			a.cfg.Log.Warn("hooks can't be run", "error", err)
			break
		}
		r.Code, r.Output = a.runHook(ctx, m, name)
	}
	if err := a.keepHooks(m.GetGeneration(), did, true); err != nil {
		a.cfg.Log.Warn("what the hooks did can't be kept", "error", err)
	}
	return did.GetHooks()
}

func (a *Agent) keepHooks(generation uint64, did *guestv1.SetupResponse, done bool) error {
	blob, err := proto.Marshal(did)
	if err != nil {
		return err
	}
	return a.keep(context.Background(), func(s *wire.State) { s.HooksFor, s.Hooks, s.HooksDone = generation, blob, done })
}

// hookNames lists what is to be run, in order. Whatever is not a regular,
// executable file with a plain name is none.
func (a *Agent) hookNames() []string {
	entries, err := os.ReadDir(hooksDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		a.cfg.Log.Warn("hooks can't be listed", "error", err)
	}
	var names []string
	for _, e := range entries { // sorted by name
		st, err := e.Info()
		if err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 && hookName.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	if len(names) > maxHooks {
		a.cfg.Log.Warn("there are too many hooks", "run", maxHooks, "of", len(names))
		names = names[:maxHooks]
	}
	return names
}

func (a *Agent) runHook(all context.Context, m *guestv1.SetupRequest, name string) (int32, string) {
	if all.Err() != nil {
		return hookTimedOut, "not run: those before it took too long"
	}
	ctx, cancel := context.WithTimeout(all, hookLimit)
	defer cancel()
	out := new(head)
	cmd := exec.CommandContext(ctx, filepath.Join(hooksDir, name))
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = "/", hookEnv(m), out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = hookPipeDelay
	a.oomScore(0) // it is a user's process, and would have the agent's
	err := cmd.Start()
	a.oomScore(agentScore)
	if err == nil {
		err = cmd.Wait()
	}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil && err != nil && !errors.Is(err, exec.ErrWaitDelay):
		return hookTimedOut, out.String()
	case err == nil || errors.Is(err, exec.ErrWaitDelay): // it left somebody behind who holds its output
		return 0, out.String()
	case errors.As(err, &exit):
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			return 128 + int32(ws.Signal()), out.String()
		}
		return int32(exit.ExitCode()), out.String()
	}
	return hookNotRun, fmt.Sprintf("not run: %v", err)
}

func hookEnv(m *guestv1.SetupRequest) []string {
	env := map[string]string{"PATH": defaultPath, "HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/sh"}
	maps.Copy(env, m.GetEnv())
	env["CLOCHE_GENERATION"] = strconv.FormatUint(m.GetGeneration(), 10)
	env["CLOCHE_SANDBOX"] = m.GetHostname()
	env["CLOCHE_SOURCE"] = m.GetSource()
	list := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		list = append(list, k+"="+env[k])
	}
	return list
}

// head keeps the beginning of what is written to it. os/exec never writes to
// it from two goroutines, since it is both streams.
type head struct{ b bytes.Buffer }

// Write implements io.Writer.
func (h *head) Write(p []byte) (int, error) {
	h.b.Write(p[:min(len(p), hookOutput-h.b.Len())])
	return len(p), nil
}

// String is what was kept, as a protobuf string may be.
func (h *head) String() string { return strings.ToValidUTF8(h.b.String(), "?") }
