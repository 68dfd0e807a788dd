package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"
	"time"
)

// maxOutput bounds what is kept of one test's output; of more, the end stays.
const maxOutput = 512 << 10

// event is one line of `go test -json` (see `go doc test2json`).
type event struct {
	Time       time.Time
	Action     string
	Package    string
	ImportPath string // of build-output and build-fail
	Test       string
	Elapsed    float64
	Output     string
}

// running is a test or package that has not ended.
type running struct {
	began    time.Time
	output   []byte
	children int
	failures int // among the children
}

// report follows one suite. It is used from one goroutine.
type report struct {
	w       io.Writer
	verbose bool
	lines   bool      // show all output as it comes
	printed time.Time // when anything was last printed
	open    map[string]*running
	builds  map[string][]byte // output of compilers, by import path
	passed  map[string]int    // by package
	sum     summary
}

func newReport(w io.Writer, suite string, verbose, lines bool) *report {
	return &report{
		w: w, verbose: verbose, lines: lines, printed: time.Now(), open: map[string]*running{}, builds: map[string][]byte{},
		passed: map[string]int{}, sum: summary{Suite: suite},
	}
}

func key(pkg, test string) string { return pkg + "\x00" + test }

// line takes one line of the command's output.
func (r *report) line(line []byte) {
	var e event
	if line[0] != '{' || json.Unmarshal(line, &e) != nil {
		r.printf("%s", line)
		return
	}
	switch e.Action {
	case "build-output":
		r.builds[e.ImportPath] = keep(r.builds[e.ImportPath], e.Output)
	case "build-fail":
		r.printf("--- BUILD FAILED: %s\n%s", e.ImportPath, r.builds[e.ImportPath])
	case "start", "run":
		r.start(e)
	case "output":
		r.output(e)
	case "pass", "fail", "skip":
		r.end(e)
	case "again":
		r.again(e)
	}
}

func (r *report) start(e event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	r.open[key(e.Package, e.Test)] = &running{began: e.Time}
	if p := r.parent(e); p != nil {
		p.children++
	}
}

// parent returns what e's test belongs to: the test above it or the package.
func (r *report) parent(e event) *running {
	if e.Test == "" {
		return nil
	}
	i := strings.LastIndexByte(e.Test, '/')
	for ; i > 0; i = strings.LastIndexByte(e.Test[:i], '/') {
		if p := r.open[key(e.Package, e.Test[:i])]; p != nil {
			return p
		}
	}
	return r.open[key(e.Package, "")]
}

func (r *report) output(e event) {
	t := r.open[key(e.Package, e.Test)]
	if r.lines {
		r.printf("%s", e.Output)
		if t != nil {
			t.output = keep(t.output, e.Output)
		}
		return
	}
	if t == nil {
		r.printf("%s", e.Output)
		return
	}
	if e.Test == "" && closes(e.Output) {
		r.printf("%s", e.Output)
		return
	}
	t.output = keep(t.output, e.Output)
}

// closes tells whether a line of a package's output is one of go test's own
// closing lines.
func closes(line string) bool {
	return strings.HasPrefix(line, "ok  \t") || strings.HasPrefix(line, "FAIL\t")
}

func keep(have []byte, more string) []byte {
	have = append(have, more...)
	if len(have) > maxOutput {
		have = append([]byte("[… the beginning was cut]\n"), have[len(have)-maxOutput/2:]...)
	}
	return have
}

// end closes a test or a package.
func (r *report) end(e event) {
	t := r.open[key(e.Package, e.Test)]
	if t == nil {
		t = &running{}
	}
	delete(r.open, key(e.Package, e.Test))
	if e.Test == "" {
		r.endPackage(e, t)
		return
	}
	if e.Action == "fail" {
		if p := r.parent(e); p != nil {
			p.failures++
		}
	}
	leaf := t.children == 0
	switch {
	case e.Action == "fail":
		r.late("%s", t.output)
		if leaf || t.failures == 0 {
			r.sum.Failed++
			r.sum.Failures = append(r.sum.Failures, e.Package+" "+e.Test)
		}
	case e.Action == "skip" && leaf:
		why := reason(t.output)
		r.sum.Skipped++
		r.sum.Skips = append(r.sum.Skips, skip{Package: e.Package, Test: e.Test, Reason: why})
		r.late("--- SKIP: %s (%s)\n", e.Test, why)
	case leaf:
		r.sum.Passed++
		r.passed[e.Package]++
		if r.verbose {
			r.late("--- PASS: %s (%.2fs)\n", e.Test, e.Elapsed)
		}
	}
}

func (r *report) endPackage(e event, t *running) {
	r.sum.Packages++
	if e.Action != "fail" {
		return
	}
	// What never ended (a panic, a timeout, os.Exit) is told here.
	var unfinished []string
	for k := range r.open {
		if strings.HasPrefix(k, key(e.Package, "")) {
			unfinished = append(unfinished, k)
		}
	}
	sort.Strings(unfinished)
	for _, k := range unfinished {
		name := strings.TrimPrefix(k, key(e.Package, ""))
		r.printf("--- FAIL: %s (did not end)\n", name)
		r.late("%s", r.open[k].output)
		if r.open[k].children == 0 {
			r.sum.Failed++
			t.failures++
			r.sum.Failures = append(r.sum.Failures, e.Package+" "+name)
		}
		delete(r.open, k)
	}
	r.late("%s", t.output)
	if t.failures == 0 {
		r.sum.Failed++
		r.sum.Failures = append(r.sum.Failures, e.Package+" (the package itself)")
	}
}

// again forgets what a package told: it is run once more.
func (r *report) again(e event) {
	for k := range r.open {
		if strings.HasPrefix(k, key(e.Package, "")) {
			delete(r.open, k)
		}
	}
	r.sum.Passed -= r.passed[e.Package]
	delete(r.passed, e.Package)
	skips, failures := len(r.sum.Skips), len(r.sum.Failures)
	r.sum.Skips = slices.DeleteFunc(r.sum.Skips, func(s skip) bool { return s.Package == e.Package })
	r.sum.Failures = slices.DeleteFunc(r.sum.Failures, func(f string) bool { return strings.HasPrefix(f, e.Package+" ") })
	r.sum.Skipped -= skips - len(r.sum.Skips)
	r.sum.Failed -= failures - len(r.sum.Failures)
	why := strings.TrimSpace(e.Output)
	r.sum.Repeats = append(r.sum.Repeats, repeat{Package: e.Package, Reason: why})
	r.printf("--- AGAIN: %s (%s)\n", e.Package, why)
}

// reason finds why a test was skipped in its output.
func reason(output []byte) string {
	best := "no reason given"
	for line := range strings.Lines(string(output)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ") {
			continue
		}
		// "file_test.go:12: SKIP: why" → "why"
		if _, after, ok := strings.Cut(line, "_test.go:"); ok {
			if _, why, ok := strings.Cut(after, ": "); ok {
				line = why
			}
		}
		best = strings.TrimPrefix(line, "SKIP: ")
	}
	return best
}

// alive prints what runs when nothing was printed for a while.
func (r *report) alive(now time.Time) {
	if now.Sub(r.printed) < quiet {
		return
	}
	var names []string
	for k, t := range r.open {
		pkg, test, _ := strings.Cut(k, "\x00")
		if test != "" && t.children == 0 {
			names = append(names, fmt.Sprintf("%s %s (%ds)", pkg[strings.LastIndexByte(pkg, '/')+1:], test, int(now.Sub(t.began).Seconds())))
		}
	}
	sort.Strings(names)
	what := "building"
	if len(names) > 0 {
		what = "running " + strings.Join(names[:min(len(names), 4)], ", ")
		if len(names) > 4 {
			what += fmt.Sprintf(" and %d more", len(names)-4)
		}
	}
	r.printf("... %d passed so far, %s\n", r.sum.Passed, what)
}

// late prints what was kept, unless it was shown as it came.
func (r *report) late(format string, args ...any) {
	if !r.lines {
		r.printf(format, args...)
	}
}

func (r *report) printf(format string, args ...any) {
	r.printed = time.Now()
	fmt.Fprintf(r.w, format, args...)
}

// finish closes the report after the command ended with err.
func (r *report) finish(took time.Duration, err error) *summary {
	if err != nil && r.sum.Failed == 0 {
		r.sum.Failed++
		r.sum.Failures = append(r.sum.Failures, r.sum.Suite+": "+err.Error())
	}
	r.sum.Seconds = took.Seconds()
	r.printf("=== suite %s ended after %s: passed %d, failed %d, skipped %d, packages %d\n",
		r.sum.Suite, took.Round(time.Second/10), r.sum.Passed, r.sum.Failed, r.sum.Skipped, r.sum.Packages)
	return &r.sum
}
