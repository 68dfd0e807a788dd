package dataplane

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
)

// What exec does where the request says nothing.
const (
	execWait   = 60
	execOutput = 1 << 20
	maxLate    = 64 // events of at most 64 KiB
)

// ExecCommand runs a command and answers its output and exit, within bounds.
func (p *Plane) ExecCommand(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.ExecCommandParams) {
	var body api.ExecRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	wait, most := execWait, execOutput
	if body.WaitSeconds != nil {
		wait = *body.WaitSeconds
	}
	if body.MaxOutputBytes != nil {
		most = *body.MaxOutputBytes
	}
	proc := sandbox.Process{
		Args: body.Args, Env: body.Env, Cwd: body.Cwd, User: body.User, Stdin: len(body.Stdin) > 0,
		Timeout: time.Duration(body.TimeoutSeconds) * time.Second,
	}
	err := p.awake(r.Context(), sandboxID)
	var row sandbox.Session
	if err == nil {
		row, err = p.create(r, sandboxID, proc, rest.Idempotency(r, params.IdempotencyKey, body))
	}
	ref := session.Ref{Sandbox: sandboxID, Session: row.ID}
	if err == nil {
		err = p.start(r, ref)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	defer p.o.Identities.Hold(sandboxID)()
	ctx, cancel := context.WithTimeout(r.Context(), time.Duration(wait)*time.Second)
	defer cancel()
	out := &collected{most: most, result: api.ExecResult{Session: row.ID, Stdout: []byte{}, Stderr: []byte{}}}
	// A command that ends without reading its input has a right to, and what is
	// not read in time is as when the output is not there in time.
	err = p.feed(ctx, ref, body.Stdin)
	if err == nil || ctx.Err() != nil || sandbox.IsClass(err, sandbox.FailedPrecondition) {
		err = out.collect(ctx, p, ref)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, out.result)
}

// feed gives the command its whole stdin, while ctx lasts. It begins at offset
// 0, so that a repetition of the request gives nothing twice.
func (p *Plane) feed(ctx context.Context, ref session.Ref, data []byte) error {
	if len(data) == 0 {
		return nil
	}
	i, done := p.inputs.use(ref)
	defer done()
	for at := uint64(0); ; {
		taken, left, err := p.write(ctx, ref, i, &at, data, true)
		if err != nil || left == 0 || ctx.Err() != nil {
			return err
		}
		data, at = data[len(data)-left:], taken
	}
}

// collected is the beginning of a command's output, and its end.
type collected struct {
	most   int
	result api.ExecResult
}

// collect reads the log from its start until the command ends or ctx does. The
// rest of what goes beyond the bound is skipped, not read.
func (c *collected) collect(ctx context.Context, p *Plane, ref session.Ref) error {
	reader, err := p.o.Recorder.Reader(ref, 0)
	if err != nil {
		return err
	}
	defer func() { p.close(reader) }()
	late := 0 // events that were there when ctx had ended; endless ones end too
	for skipped := false; late < maxLate; {
		ev, err := reader.Next(ctx)
		switch {
		case errors.Is(err, io.EOF), err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		case c.take(ev):
			return nil
		case ctx.Err() != nil:
			late++
		}
		if !c.result.StdoutTruncated || !c.result.StderrTruncated || skipped {
			continue
		}
		skipped = true
		st, err := p.o.Recorder.State(ref)
		if err != nil {
			return err
		}
		if st.End <= ev.Next() {
			continue
		}
		further, err := p.o.Recorder.Reader(ref, st.End)
		if err != nil {
			return err
		}
		p.close(reader)
		reader = further
	}
	return nil
}

// take adds an event; it is true at the last one.
func (c *collected) take(ev session.Event) (last bool) {
	switch ev.Kind {
	case session.KindStdout:
		c.result.Stdout, c.result.StdoutTruncated = c.add(c.result.Stdout, ev.Data, c.result.StdoutTruncated)
	case session.KindStderr:
		c.result.Stderr, c.result.StderrTruncated = c.add(c.result.Stderr, ev.Data, c.result.StderrTruncated)
	case session.KindGap:
		c.result.StdoutTruncated, c.result.StderrTruncated = true, true
	case session.KindExit:
		c.result.Exited, c.result.Exit = true, exitOf(ev.Exit)
		return true
	case session.KindLost:
		c.result.Lost = true
		return true
	}
	return false
}

func (c *collected) add(have, data []byte, truncated bool) ([]byte, bool) {
	if truncated {
		return have, true
	}
	n := min(len(data), c.most-len(have))
	return append(have, data[:n]...), n < len(data)
}
