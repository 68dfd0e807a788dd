package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// feed gives r one event for each of the lines "ACTION PACKAGE TEST OUTPUT".
func feed(t *testing.T, r *report, events ...event) {
	t.Helper()
	for _, e := range events {
		e.Time = time.Now()
		line, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		r.line(append(line, '\n'))
	}
}

func TestLeavesAreCounted(t *testing.T) {
	var out strings.Builder
	r := newReport(&out, "unit", false, false)
	feed(t, r,
		event{Action: "start", Package: "p"},
		event{Action: "run", Package: "p", Test: "TestA"},
		event{Action: "run", Package: "p", Test: "TestA/one"},
		event{Action: "output", Package: "p", Test: "TestA/one", Output: "    a_test.go:3: went wrong\n"},
		event{Action: "fail", Package: "p", Test: "TestA/one"},
		event{Action: "run", Package: "p", Test: "TestA/two"},
		event{Action: "pass", Package: "p", Test: "TestA/two"},
		event{Action: "fail", Package: "p", Test: "TestA"},
		event{Action: "run", Package: "p", Test: "TestB"},
		event{Action: "output", Package: "p", Test: "TestB", Output: "    b_test.go:7: SKIP: needs root: it mounts\n"},
		event{Action: "output", Package: "p", Test: "TestB", Output: "--- SKIP: TestB (0.00s)\n"},
		event{Action: "skip", Package: "p", Test: "TestB"},
		event{Action: "output", Package: "p", Output: "FAIL\tp\t0.1s\n"},
		event{Action: "fail", Package: "p"},
	)
	s := r.finish(time.Second, nil)
	if s.Passed != 1 || s.Failed != 1 || s.Skipped != 1 || s.Packages != 1 {
		t.Errorf("summary %+v", s)
	}
	if len(s.Skips) != 1 || s.Skips[0].Reason != "needs root: it mounts" {
		t.Errorf("skips %+v", s.Skips)
	}
	for _, want := range []string{"went wrong", "FAIL\tp\t0.1s", "--- SKIP: TestB (needs root: it mounts)"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s", want, out.String())
		}
	}
}

func TestWhatNeverEndedHasFailed(t *testing.T) {
	var out strings.Builder
	r := newReport(&out, "unit", false, false)
	feed(t, r,
		event{Action: "start", Package: "p"},
		event{Action: "run", Package: "p", Test: "TestHangs"},
		event{Action: "output", Package: "p", Test: "TestHangs", Output: "panic: test timed out\n"},
		event{Action: "fail", Package: "p"},
	)
	s := r.finish(time.Second, nil)
	if s.Failed != 1 || !strings.Contains(out.String(), "panic: test timed out") {
		t.Errorf("summary %+v, output %s", s, out.String())
	}
}

func TestAPackageCanFailWithoutATest(t *testing.T) {
	var out strings.Builder
	r := newReport(&out, "unit", false, false)
	feed(t, r,
		event{Action: "build-output", ImportPath: "p [p.test]", Output: "p.go:1: syntax error\n"},
		event{Action: "build-fail", ImportPath: "p [p.test]"},
		event{Action: "start", Package: "p"},
		event{Action: "output", Package: "p", Output: "FAIL\tp [build failed]\n"},
		event{Action: "fail", Package: "p"},
	)
	s := r.finish(time.Second, nil)
	if s.Failed != 1 || !strings.Contains(out.String(), "syntax error") {
		t.Errorf("summary %+v, output %s", s, out.String())
	}
}

func TestOutputIsBounded(t *testing.T) {
	var have []byte
	for range 4 * maxOutput / 1024 {
		have = keep(have, strings.Repeat("x", 1023)+"\n")
	}
	have = keep(have, "the end\n")
	if len(have) > 2*maxOutput || !strings.HasSuffix(string(have), "the end\n") {
		t.Errorf("kept %d bytes", len(have))
	}
}

func TestLinesAreShownAsTheyCome(t *testing.T) {
	var out strings.Builder
	r := newReport(&out, "nested", true, true)
	want := ""
	for _, e := range []event{
		{Action: "start", Package: "p"},
		{Action: "run", Package: "p", Test: "TestA"},
		{Action: "output", Package: "p", Test: "TestA", Output: "=== RUN   TestA\n"},
		{Action: "output", Package: "p", Test: "TestA", Output: "    a_test.go:3: half"},
		{Action: "output", Package: "p", Test: "TestA", Output: " and half\n"},
		{Action: "output", Package: "p", Test: "TestA", Output: "--- FAIL: TestA (0.00s)\n"},
		{Action: "fail", Package: "p", Test: "TestA"},
		{Action: "run", Package: "p", Test: "TestB"},
		{Action: "output", Package: "p", Test: "TestB", Output: "--- PASS: TestB (0.00s)\n"},
		{Action: "pass", Package: "p", Test: "TestB"},
		{Action: "output", Package: "p", Output: "FAIL\tp\t0.1s\n"},
		{Action: "fail", Package: "p"},
	} {
		feed(t, r, e)
		want += e.Output
	}
	if out.String() != want {
		t.Errorf("output %q, want %q", out.String(), want)
	}
	if s := r.finish(time.Second, nil); s.Passed != 1 || s.Failed != 1 {
		t.Errorf("summary %+v", s)
	}
}

// TestAgain has a package fail in every way, and pass when it is run again.
func TestAgain(t *testing.T) {
	var out strings.Builder
	r := newReport(&out, "nested", false, false)
	other := []event{{Action: "start", Package: "pq"}, {Action: "run", Package: "pq", Test: "TestC"}, {Action: "fail", Package: "pq", Test: "TestC"}, {Action: "fail", Package: "pq"}}
	feed(t, r, other...)
	feed(t, r,
		event{Action: "start", Package: "p"},
		event{Action: "run", Package: "p", Test: "TestA"},
		event{Action: "pass", Package: "p", Test: "TestA"},
		event{Action: "run", Package: "p", Test: "TestB"},
		event{Action: "fail", Package: "p", Test: "TestB"},
		event{Action: "run", Package: "p", Test: "TestS"},
		event{Action: "skip", Package: "p", Test: "TestS"},
		event{Action: "run", Package: "p", Test: "TestHangs"},
		event{Action: "again", Package: "p", Output: "the machine froze"},
		event{Action: "start", Package: "p"},
		event{Action: "run", Package: "p", Test: "TestA"},
		event{Action: "pass", Package: "p", Test: "TestA"},
		event{Action: "pass", Package: "p"},
	)
	s := r.finish(time.Second, nil)
	if s.Passed != 1 || s.Failed != 1 || s.Skipped != 0 || len(s.Skips) != 0 || len(s.Failures) != 1 || s.Packages != 2 {
		t.Errorf("summary %+v", s)
	}
	if len(s.Repeats) != 1 || s.Repeats[0].Reason != "the machine froze" {
		t.Errorf("repeats %+v", s.Repeats)
	}
}

func TestTotals(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.json"), filepath.Join(dir, "b.json")
	for file, s := range map[string]summary{
		a: {Suite: "a", Passed: 3, Skipped: 1, Skips: []skip{{"p", "TestS", "no engine"}}},
		b: {Suite: "b", Passed: 4, Repeats: []repeat{{"p", "the machine froze"}}},
	} {
		if err := s.write(file); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	if err := totals(&out, []string{a, b}); err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(out.String(), "\n7 passed, 0 failed, 1 skipped\n") || !strings.Contains(out.String(), "no engine") ||
		!strings.Contains(out.String(), "the machine froze") {
		t.Errorf("output %s", out.String())
	}
	if err := os.Remove(b); err != nil {
		t.Fatal(err)
	}
	if err := totals(&out, []string{a, b}); err == nil {
		t.Error("a suite without a summary counted as green")
	}
}

func TestRunTellsTheCommandsFailure(t *testing.T) {
	var out strings.Builder
	if err := run(newReport(&out, "s", false, false), "", []string{"sh", "-c", "echo plain; exit 3"}); err == nil {
		t.Error("exit status 3 was not told")
	}
	if !strings.Contains(out.String(), "plain\n") {
		t.Errorf("output %s", out.String())
	}
	if err := run(newReport(&out, "s", false, false), "", []string{"true"}); err != nil {
		t.Error(err)
	}
}
