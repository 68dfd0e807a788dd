package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"cloche.dev/cloche/test/nested"
)

// event is one of go test -json. The action "again" is ours: what was told of
// the package so far is void, it is run once more.
type event struct {
	Time    time.Time `json:",omitzero"`
	Action  string
	Package string   `json:",omitempty"`
	Test    string   `json:",omitempty"`
	Elapsed *float64 `json:",omitempty"`
	Output  string   `json:",omitempty"`
}

// printer writes whole lines of several suites at once.
type printer struct {
	mu   sync.Mutex
	w    io.Writer
	json bool
}

func (p *printer) line(line []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = p.w.Write(line)
}

func (p *printer) event(e event) {
	line, err := json.Marshal(e)
	if err != nil {
		panic(err) // strings and numbers
	}
	p.line(append(line, '\n'))
}

// note prints a line that belongs to no test.
func (p *printer) note(format string, args ...any) {
	p.line(fmt.Appendf(nil, "nested: "+format+"\n", args...))
}

// skip tells that a suite does not run.
func (p *printer) skip(s nested.Suite, why error) {
	p.note("SKIP: THE SUITE %s IS NOT RUN: %v", s.Name, why)
	if !p.json {
		return
	}
	for _, e := range []event{
		{Action: "start"},
		{Action: "run", Test: s.Name},
		{Action: "output", Test: s.Name, Output: "SKIP: NOT RUN: " + why.Error() + "\n"},
		{Action: "skip", Test: s.Name},
		{Action: "skip"},
	} {
		e.Package = s.Title()
		p.event(e)
	}
}

// suite runs one suite in L1, and again in a new one if L1 failed it.
func (r *runner) suite(ctx context.Context, s nested.Suite) error {
	for attempt := 1; ; attempt++ {
		began := time.Now()
		name := fmt.Sprintf("%s-%d", s.Name, attempt)
		r.out.note("%s: begins; its logs are %s.*", name, filepath.Join(r.o.cache, "log", name))
		passed, err := r.attempt(ctx, s, name)
		took := time.Since(began).Round(time.Second / 10)
		switch {
		case errors.Is(err, nested.ErrNoExit) && attempt == 1 && ctx.Err() == nil:
			r.out.note("%s: after %v: %v", name, took, err)
			if r.o.json {
				r.out.event(event{Action: "again", Package: s.Title(), Output: err.Error()})
			}
			continue
		case err != nil:
			r.end(s, took, false)
			return fmt.Errorf("%s, after %v: %w", name, took, err)
		}
		r.end(s, took, passed)
		if !passed {
			return fmt.Errorf("%s failed after %v", name, took)
		}
		r.out.note("%s: passed in %v", name, took)
		return nil
	}
}

// end closes the suite's package in the stream of events.
func (r *runner) end(s nested.Suite, took time.Duration, passed bool) {
	if !r.o.json {
		return
	}
	action, word := "pass", "ok  "
	if !passed {
		action, word = "fail", "FAIL"
	}
	seconds := took.Seconds()
	r.out.event(event{Action: "output", Package: s.Title(), Output: fmt.Sprintf("%s\t%s\t%.1fs (in L1)\n", word, s.Title(), seconds)})
	r.out.event(event{Action: action, Package: s.Title(), Elapsed: &seconds})
}

// attempt boots an L1 with the suite's tests. passed is by what L1's EXIT line
// and the tests themselves say.
func (r *runner) attempt(ctx context.Context, s nested.Suite, name string) (passed bool, err error) {
	files := maps.Clone(r.files)
	maps.Copy(files, s.Files)
	if s.Whole {
		files[nested.Prebuilt+"/cloche"] = nested.Node{Mode: 0o755, Host: r.o.program}
		for i, deb := range r.debs {
			files[fmt.Sprintf("%s/kernel-%d.deb", nested.Prebuilt, i)] = nested.Node{Host: deb}
		}
	}
	if s.Faults {
		files[nested.Prebuilt+"/cloche"] = nested.Node{Mode: 0o755, Host: r.faults()}
	}
	test := "/tests/" + filepath.Base(r.binary(s))
	files[test] = nested.Node{Mode: 0o755, Host: r.binary(s)}
	l := &nested.L1{
		Kernel: r.kernel.Image, Modules: r.kernel.L1, Busybox: r.tools.Busybox, QEMU: r.tools.QEMU, Files: files, MemoryMiB: s.MemoryMiB,
		Dir: filepath.Join(r.o.cache, "log"),
	}
	job := nested.Job{
		Name: name, Args: s.Args(test),
		Env: append([]string{"CLOCHE_NESTED=1", "CLOCHE_TEST_PREBUILT=" + nested.Prebuilt}, s.Env...), Time: s.Time + time.Minute,
	}
	if !r.o.json {
		status, err := l.Run(ctx, job, r.out.lines())
		return status == 0, err
	}
	return r.convert(ctx, l, job, s)
}

// convert runs a job whose output go tool test2json turns into events. The one
// that ends the package is held back: L1 has the last word.
func (r *runner) convert(ctx context.Context, l *nested.L1, job nested.Job, s nested.Suite) (passed bool, err error) {
	cmd := exec.Command("go", "tool", "test2json", "-t", "-p", s.Title())
	in, err := cmd.StdinPipe()
	if err != nil {
		return false, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return false, err
	}
	if err := cmd.Start(); err != nil {
		return false, err
	}
	last := make(chan string, 1)
	go func() { last <- r.forward(out) }()
	status, err := l.Run(ctx, job, in)
	verdict := errors.Join(in.Close())
	said := <-last
	if waitErr := cmd.Wait(); err == nil {
		err = errors.Join(verdict, waitErr)
	}
	return status == 0 && said == "pass", err
}

// forward passes events on and returns the action that ended the package.
func (r *runner) forward(events io.Reader) (last string) {
	in := bufio.NewReader(events)
	for {
		line, err := in.ReadBytes('\n')
		var e event
		if len(line) > 0 && json.Unmarshal(line, &e) == nil {
			if e.Test == "" && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip") {
				last = e.Action
			} else {
				r.out.line(line)
			}
		}
		if err != nil {
			return last
		}
	}
}

// lines returns a writer that prints only whole lines, so that suites that run
// at once don't mix within one.
func (p *printer) lines() io.Writer { return &lineWriter{p: p} }

type lineWriter struct {
	p    *printer
	rest []byte
}

// Write implements io.Writer.
func (w *lineWriter) Write(b []byte) (int, error) {
	w.rest = append(w.rest, b...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		if i < 0 {
			return len(b), nil
		}
		w.p.line(bytes.TrimPrefix(w.rest[:i+1], []byte{0x16})) // the mark
		w.rest = w.rest[i+1:]
	}
}
