package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guest/wire"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// startFailure is why a command could not be started, with a shell's code.
type startFailure struct {
	code int64
	text string
}

// Start implements the service. It resolves everything inside the guest; the
// supervisor only forks.
func (a *Agent) Start(ctx context.Context, req *connect.Request[guestv1.StartRequest]) (*connect.Response[guestv1.StartResponse], error) {
	m := req.Msg
	if len(m.GetArgs()) == 0 || m.GetArgs()[0] == "" {
		return nil, sandbox.Errorf(sandbox.Invalid, "no_command", "a session needs a command")
	}
	if err := checkStart(m); err != nil {
		return nil, err
	}
	if err := a.freezer.wait(ctx); err != nil {
		return nil, err
	}
	start := &wire.Start{Session: m.GetSession(), Args: m.GetArgs(), Stdin: m.GetStdin(), TTY: m.GetTty() != nil, TimeoutMS: m.GetTimeoutMs()}
	if t := m.GetTty(); t != nil {
		start.Rows, start.Cols, start.Stdin = clampSize(t.GetRows()), clampSize(t.GetCols()), true
	}
	if f := a.resolve(m, start); f != nil {
		start.FailCode, start.FailText = f.code, f.text
	}
	started := new(wire.Started)
	if err := a.super.call(ctx, wire.OpStart, start, started); err != nil {
		return nil, err
	}
	return connect.NewResponse(&guestv1.StartResponse{Pid: started.PID, StartedUnixNano: started.UnixNano}), nil
}

func clampSize(n uint32) uint16 { return uint16(min(n, 1<<15)) }

// checkStart refuses what no process could be given.
func checkStart(m *guestv1.StartRequest) error {
	for _, s := range append([]string{m.GetCwd(), m.GetUser()}, m.GetArgs()...) {
		if strings.ContainsRune(s, 0) {
			return sandbox.Errorf(sandbox.Invalid, "nul_byte", "an argument holds a NUL byte")
		}
	}
	if m.GetTimeoutMs() < 0 {
		return sandbox.Errorf(sandbox.Invalid, "bad_timeout", "a timeout can't be negative")
	}
	return checkEnv(m.GetEnv())
}

func checkEnv(env map[string]string) error {
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return sandbox.Errorf(sandbox.Invalid, "bad_env", "%q is no name or has no value that an environment can hold", k)
		}
	}
	return nil
}

// resolve fills in who runs what, where and with which environment.
func (a *Agent) resolve(m *guestv1.StartRequest, start *wire.Start) *startFailure {
	acc, err := resolveUser(m.GetUser())
	if err != nil {
		return &startFailure{126, err.Error()}
	}
	start.UID, start.GID = acc.uid, acc.gid
	for _, g := range acc.groups {
		start.Groups = append(start.Groups, strconv.FormatUint(uint64(g), 10))
	}
	env := a.environment(acc, m)
	for _, k := range slices.Sorted(maps.Keys(env)) {
		start.Env = append(start.Env, k+"="+env[k])
	}
	if start.Dir = m.GetCwd(); start.Dir == "" {
		start.Dir = "/"
		if st, err := os.Stat(acc.home); err == nil && st.IsDir() && filepath.IsAbs(acc.home) {
			start.Dir = acc.home
		}
	}
	if fault.Is(fault.CwdIgnored) {
		start.Dir = "/"
	}
	switch st, err := os.Stat(start.Dir); {
	case !filepath.IsAbs(start.Dir):
		return &startFailure{126, fmt.Sprintf("the working directory %q is not absolute", start.Dir)}
	case err != nil:
		return &startFailure{126, fmt.Sprintf("the working directory %q can't be used: %v", start.Dir, errors.Unwrap(err))}
	case !st.IsDir():
		return &startFailure{126, fmt.Sprintf("the working directory %q is not a directory", start.Dir)}
	}
	var f *startFailure
	start.Path, f = lookPath(m.GetArgs()[0], env["PATH"], start.Dir)
	return f
}

func (a *Agent) environment(acc account, m *guestv1.StartRequest) map[string]string {
	env := map[string]string{"PATH": defaultPath, "HOME": acc.home, "SHELL": acc.shell}
	if acc.shell == "" {
		env["SHELL"] = "/bin/sh"
	}
	if acc.name != "" {
		env["USER"], env["LOGNAME"] = acc.name, acc.name
	}
	if m.GetTty() != nil {
		env["TERM"] = "xterm-256color"
	}
	a.mu.Lock()
	maps.Copy(env, a.setup.GetEnv())
	a.mu.Unlock()
	if !fault.Is(fault.EnvLost) {
		maps.Copy(env, m.GetEnv())
	}
	return env
}

// lookPath finds file as execvp does.
func lookPath(file, path, dir string) (string, *startFailure) {
	if strings.Contains(file, "/") {
		at := file
		if !filepath.IsAbs(at) {
			at = filepath.Join(dir, at)
		}
		if _, err := os.Stat(at); errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			return "", &startFailure{127, fmt.Sprintf("%s: no such file or directory", file)}
		}
		return at, nil
	}
	failure := &startFailure{127, fmt.Sprintf("%s: command not found", file)}
	for d := range strings.SplitSeq(path, ":") {
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		at := filepath.Join(d, file)
		st, err := os.Stat(at)
		if err != nil || st.IsDir() {
			continue
		}
		if st.Mode()&0o111 != 0 {
			return at, nil
		}
		failure = &startFailure{126, fmt.Sprintf("%s: permission denied", at)}
	}
	return "", failure
}

// Follow implements the service. While one piece is on its way to the host
// the next is fetched already.
func (a *Agent) Follow(ctx context.Context, req *connect.Request[guestv1.FollowRequest], stream *connect.ServerStream[guestv1.Event]) error {
	ctx, cancel := context.WithCancel(ctx)
	pieces := make(chan *wire.Fetched)
	failed := make(chan error, 1)
	defer func() {
		cancel()
		for range failed {
			// It ended because of the cancel, or was read already.
		}
	}()
	go func() {
		err := a.fetchAll(ctx, req.Msg.GetSession(), req.Msg.GetOffset(), pieces)
		close(pieces)
		failed <- err
		close(failed)
	}()
	offset := req.Msg.GetOffset()
	for f := range pieces {
		var err error
		if offset, err = sendPiece(stream, f, offset); err != nil {
			return err
		}
	}
	return <-failed
}

func (a *Agent) fetchAll(ctx context.Context, session string, offset uint64, out chan<- *wire.Fetched) error {
	for {
		f := new(wire.Fetched)
		if err := a.super.call(ctx, wire.OpFetch, &wire.Fetch{Session: session, Offset: offset}, f); err != nil {
			return err
		}
		select {
		case out <- f:
		case <-ctx.Done():
			return ctx.Err()
		}
		if f.Exited {
			return nil
		}
		offset += uint64(len(f.Data))
	}
}

func sendPiece(stream *connect.ServerStream[guestv1.Event], f *wire.Fetched, offset uint64) (uint64, error) {
	data := f.Data
	for _, r := range f.Runs {
		ev := &guestv1.Event{Offset: offset, Event: &guestv1.Event_Stdout{Stdout: data[:r.N]}}
		if r.Stderr {
			ev.Event = &guestv1.Event_Stderr{Stderr: data[:r.N]}
		}
		if err := stream.Send(ev); err != nil {
			return offset, err
		}
		data, offset = data[r.N:], offset+uint64(r.N)
	}
	if !f.Exited {
		return offset, nil
	}
	return offset, stream.Send(&guestv1.Event{Offset: offset, Event: &guestv1.Event_Exit{Exit: &guestv1.Exit{
		Code: int32(f.Exit.Code), Signal: int32(f.Exit.Signal), Reason: f.Exit.Reason, Message: f.Exit.Text, UnixNano: f.Exit.UnixNano,
	}}})
}

// Ack implements the service.
func (a *Agent) Ack(ctx context.Context, req *connect.Request[guestv1.AckRequest]) (*connect.Response[guestv1.AckResponse], error) {
	m := req.Msg
	err := a.super.call(ctx, wire.OpAck, &wire.Ack{Session: m.GetSession(), Offset: m.GetOffset(), Exit: m.GetExit()}, nil)
	return connect.NewResponse(&guestv1.AckResponse{}), err
}

// Stdin implements the service.
func (a *Agent) Stdin(ctx context.Context, req *connect.Request[guestv1.StdinRequest]) (*connect.Response[guestv1.StdinResponse], error) {
	m := req.Msg
	if len(m.GetData()) > wire.MaxStdin {
		return nil, sandbox.Errorf(sandbox.Invalid, "too_large", "stdin takes at most %d bytes at once", wire.MaxStdin)
	}
	done := new(wire.StdinDone)
	err := a.super.call(ctx, wire.OpStdin, &wire.Stdin{Session: m.GetSession(), Offset: m.GetOffset(), Data: m.GetData(), Close: m.GetClose()}, done)
	return connect.NewResponse(&guestv1.StdinResponse{Accepted: done.Accepted, Closed: done.Closed}), err
}

// Signal implements the service.
func (a *Agent) Signal(ctx context.Context, req *connect.Request[guestv1.SignalRequest]) (*connect.Response[guestv1.SignalResponse], error) {
	err := a.super.call(ctx, wire.OpSignal, &wire.Signal{Session: req.Msg.GetSession(), Signal: int64(req.Msg.GetSignal())}, nil)
	return connect.NewResponse(&guestv1.SignalResponse{}), err
}

// Resize implements the service.
func (a *Agent) Resize(ctx context.Context, req *connect.Request[guestv1.ResizeRequest]) (*connect.Response[guestv1.ResizeResponse], error) {
	size := req.Msg.GetSize()
	err := a.super.call(ctx, wire.OpResize, &wire.Resize{Session: req.Msg.GetSession(), Rows: clampSize(size.GetRows()), Cols: clampSize(size.GetCols())}, nil)
	return connect.NewResponse(&guestv1.ResizeResponse{}), err
}

// Sessions implements the service.
func (a *Agent) Sessions(ctx context.Context, _ *connect.Request[guestv1.SessionsRequest]) (*connect.Response[guestv1.SessionsResponse], error) {
	list, out := new(wire.Sessions), new(guestv1.SessionsResponse)
	if err := a.super.call(ctx, wire.OpSessions, nil, list); err != nil {
		return nil, err
	}
	mine := map[int]bool{os.Getpid(): true, os.Getppid(): true}
	for _, s := range list.List {
		out.Sessions = append(out.Sessions, &guestv1.SessionInfo{Session: s.ID, Pid: s.PID, Exited: s.Exited, Acked: s.Acked, Produced: s.Produced})
		if !s.Exited {
			mine[int(s.PID)] = true
		}
	}
	out.Others = countOthers(mine)
	return connect.NewResponse(out), nil
}
