package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// attachment says how to attach to a session.
type attachment struct {
	session *client.Session
	start   bool // else it is only followed
	stdin   bool // pass standard input on
	tty     bool // the session has a terminal
	offset  int64
	signals chan os.Signal // of catchSignals; nil catches them for this attachment alone
}

// catchSignals keeps signals from ending this program, so that they can be
// passed on. The caller stops it with signal.Stop.
func catchSignals() chan os.Signal {
	ch := make(chan os.Signal, 16)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGWINCH)
	return ch
}

// again is how soon the next Ctrl-C means more than the one before.
const again = 2 * time.Second

// errDetached ends an attachment whose command goes on.
var errDetached = errors.New("detached")

// attach follows a session to its end and returns an exitError with its code.
// It owns the goroutines that pass signals, sizes and input on, and restores
// the terminal on every way out.
func (a *app) attach(parent context.Context, at attachment) error {
	ctx, cancel := context.WithCancelCause(parent)
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer cancel(nil)

	if at.signals == nil {
		at.signals = catchSignals()
		defer signal.Stop(at.signals)
	}
	restore, err := a.rawTerminal(at)
	if err != nil {
		return err
	}
	defer restore()
	helpers.Go(func() { a.passSignals(ctx, cancel, at) })

	o := client.StreamOptions{
		Offset: at.offset,
		Interrupted: func(err error) {
			a.note("%scloche: %v; waiting for the daemon to come back\r", eol(at), line(err.Error()))
		},
		Resumed: func() { a.note("cloche: the daemon is back\r") },
	}
	st := at.session.Follow(o)
	if at.start {
		st = at.session.Attach(o)
	}
	defer st.Close()
	exit, err := a.show(ctx, st, func() {
		if at.stdin { // input is taken from the start on
			go a.passInput(ctx, at.session) // not waited for: a read of a terminal can't be interrupted
		}
	})
	if errors.Is(context.Cause(ctx), errDetached) {
		restore()
		a.note("cloche: left the command alone; `cloche attach %s %s` shows it again", at.session.Sandbox, at.session.ID)
		return exitError(exitOwn)
	}
	if err != nil {
		return err
	}
	return a.exited(exit)
}

func eol(at attachment) string {
	if at.tty {
		return "\r\n"
	}
	return ""
}

// exited turns a command's end into this program's.
func (a *app) exited(exit *api.Exit) error {
	switch {
	case exit == nil:
		return &client.Error{Class: api.ClassInternal, Code: client.CodeBadAnswer, Message: "the daemon did not say how the command ended"}
	case exit.Reason == "start_failed":
		message := exit.Message
		if message == "" {
			message = "the command could not be started"
		}
		code := exit.Code
		if code == 0 {
			code = exitOwn
		}
		fmt.Fprintf(a.err, "cloche: %s\n", line(message))
		return exitError(code)
	case exit.Reason == "timeout":
		a.note("cloche: the command ran into its timeout")
	}
	if exit.Code == 0 {
		return nil
	}
	return exitError(exit.Code)
}

// show prints a stream's events to its end. started is called once, when the
// command runs.
func (a *app) show(ctx context.Context, st *client.Stream, started func()) (*api.Exit, error) {
	enc := json.NewEncoder(a.out)
	begun := sync.OnceFunc(started)
	for {
		e, err := st.Next(ctx)
		if err != nil {
			return nil, err
		}
		if e.Type != api.EventGap && e.Type != api.EventLost {
			begun()
		}
		if a.json {
			if err := enc.Encode(e); err != nil {
				return nil, err
			}
		}
		switch e.Type {
		case api.EventStdout, api.EventStderr:
			if a.json {
				continue
			}
			to := a.out
			if e.Type == api.EventStderr {
				to = a.err
			}
			if _, err := to.Write(e.Data); err != nil {
				return nil, err
			}
		case api.EventGap:
			a.note("cloche: bytes %d to %d of the output are gone: %s", e.Offset, e.To, line(e.Reason))
		case api.EventExit:
			return e.Exit, nil
		case api.EventLost:
			return nil, client.Lost(e)
		}
	}
}

// rawTerminal hands the terminal over to the command's, and returns what takes
// it back (more than once does no harm).
func (a *app) rawTerminal(at attachment) (restore func(), err error) {
	fd := int(a.in.Fd())
	if !at.tty || !at.stdin || !term.IsTerminal(fd) {
		return func() {}, nil
	}
	before, err := term.MakeRaw(fd)
	if err != nil {
		return nil, fmt.Errorf("the terminal can't be made raw: %w", err)
	}
	return sync.OnceFunc(func() { _ = term.Restore(fd, before) }), nil
}

// passInput sends standard input until it ends. An error of a command that no
// longer reads is not this program's: the command's end tells more.
func (a *app) passInput(ctx context.Context, s *client.Session) {
	w := s.Stdin(ctx, 0)
	buf := make([]byte, 256<<10)
	for {
		n, err := a.in.Read(buf)
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				a.inputFault(ctx, err)
				return
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				if err := w.Close(); err != nil {
					a.inputFault(ctx, err)
				}
			}
			return
		}
	}
}

// inputFault tells what went wrong with input, unless the command has ended.
func (a *app) inputFault(ctx context.Context, err error) {
	var e *client.Error
	if ctx.Err() != nil || errors.Is(err, io.ErrClosedPipe) || errors.As(err, &e) && (e.Class == api.ClassConflict || e.Class == api.ClassFailedPrecondition) && e.Code != client.CodeStdinTaken {
		return
	}
	a.note("cloche: standard input: %s\r", line(err.Error()))
}

// passSignals passes this program's signals on to the command, and the
// window's size where it has a terminal.
func (a *app) passSignals(ctx context.Context, detach context.CancelCauseFunc, at attachment) {
	var pressed int
	var last time.Time
	for {
		var sig os.Signal
		select {
		case <-ctx.Done():
			return
		case sig = <-at.signals:
		}
		switch {
		case sig == syscall.SIGWINCH:
			if at.tty {
				_ = at.session.Resize(ctx, windowSize(a.out, a.in))
			}
		case sig == os.Interrupt:
			if time.Since(last) > again {
				pressed = 0
			}
			pressed, last = pressed+1, time.Now()
			switch pressed {
			case 1:
				a.send(ctx, at, api.SIGINT)
			case 2:
				a.send(ctx, at, api.SIGKILL)
			default:
				detach(errDetached)
				return
			}
		case sig == syscall.SIGHUP && at.tty: // the window was closed: the command waits to be attached to
			detach(errDetached)
			return
		case sig == syscall.SIGTERM:
			a.send(ctx, at, api.SIGTERM)
		case sig == syscall.SIGHUP:
			a.send(ctx, at, api.SIGHUP)
		case sig == syscall.SIGQUIT:
			a.send(ctx, at, api.SIGQUIT)
		}
	}
}

// send passes a signal on without keeping the next one waiting for long.
func (a *app) send(ctx context.Context, at attachment, name api.SignalName) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := at.session.Signal(ctx, name); err != nil && ctx.Err() == nil {
		a.note("cloche: %s could not be passed on: %s", name, line(err.Error()))
	}
}

// interruptible ends a context by Ctrl-C, for what is not attached.
func interruptible(ctx context.Context) (context.Context, func()) {
	return signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
}
