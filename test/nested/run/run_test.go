package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/test/nested"
)

// fake is a runner whose QEMU is a shell script that is told its attempt.
func fake(t *testing.T, does string) (*runner, *bytes.Buffer) {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "log"), 0o755); err != nil {
		t.Fatal(err)
	}
	text := "#!/bin/sh\nfor a in \"$@\"; do case $a in file:*) console=${a#file:} ;; esac; done\n" +
		"case $console in *-1.console) attempt=1 ;; *) attempt=2 ;; esac\n" + does + "\n"
	qemu := filepath.Join(dir, "qemu")
	for _, file := range []string{qemu, filepath.Join(dir, "p.test")} {
		if err := os.WriteFile(file, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	r := &runner{o: options{cache: dir, json: true}, out: &printer{w: &out, json: true}, kernel: &nested.Kernel{Image: "/kernel"}, files: nested.Tree{}}
	r.tools = nested.Tools{QEMU: qemu, Busybox: qemu}
	return r, &out
}

// told are the events that begin and end something, as "ACTION TEST".
func told(t *testing.T, out *bytes.Buffer) (events []string, output string) {
	t.Helper()
	for line := range strings.Lines(out.String()) {
		var e event
		if json.Unmarshal([]byte(line), &e) != nil {
			continue
		}
		if e.Package != "p" {
			t.Errorf("an event of another package: %s", line)
		}
		if e.Action == "output" {
			output += e.Output
			continue
		}
		events = append(events, strings.TrimSpace(e.Action+" "+e.Test))
	}
	return events, output
}

const (
	lines = `printf '\026=== RUN   TestA\n\026=== RUN   TestA/firecracker\n    a_test.go:1: said\n\026--- PASS: TestA/firecracker (0.10s)\n\026--- PASS: TestA (0.20s)\n'`
	good  = lines + "; printf '\\026PASS\\n'; echo 'l1: EXIT 0' >>$console"
	dies  = `printf '\026=== RUN   TestA\n\026=== RUN   TestA/firecracker\n'; exit 0`
)

func TestSuite(t *testing.T) {
	run := []string{"start", "run TestA", "run TestA/firecracker", "pass TestA/firecracker", "pass TestA"}
	began := []string{"start", "run TestA", "run TestA/firecracker"}
	for _, c := range []struct {
		name, does string
		want       []string
		ok, infra  bool
	}{
		{"passes", good, append(run[:5:5], "pass"), true, false},
		{"fails", lines + `; printf '\026--- FAIL: TestB (0.00s)\n\026FAIL\n'; echo 'l1: EXIT 1' >>$console`, append(run[:5:5], "fail TestB", "fail"), false, false},
		{"says that it passed and ends otherwise", lines + "; printf '\\026PASS\\n'; echo 'l1: EXIT 2' >>$console", append(run[:5:5], "fail"), false, false},
		{"ends well and says nothing", "echo 'l1: EXIT 0' >>$console", []string{"start", "fail"}, false, false},
		{"has a bad first L1", "if [ $attempt = 1 ]; then " + dies + "; fi; " + good, append(append(began[:3:3], "again"), append(run[:5:5], "pass")...), true, false},
		{"has two bad L1", dies, append(append(began[:3:3], "again"), append(began[:3:3], "fail")...), false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r, out := fake(t, c.does)
			err := r.suite(t.Context(), nested.Suite{Name: "s", Package: "p", Time: time.Minute})
			if (err == nil) != c.ok || errors.Is(err, nested.ErrNoExit) != c.infra {
				t.Errorf("error %v", err)
			}
			have, output := told(t, out)
			// What never ended is closed by test2json where its input ends.
			if strings.Join(without(have, "fail TestA"), ",") != strings.Join(c.want, ",") {
				t.Errorf("events %q, want %q", have, c.want)
			}
			if c.ok && !strings.Contains(output, "=== RUN   TestA/firecracker\n    a_test.go:1: said\n--- PASS: TestA/firecracker (0.10s)\n") {
				t.Errorf("the lines are not what the tests printed: %q", output)
			}
		})
	}
}

func without(list []string, prefix string) (rest []string) {
	for _, s := range list {
		if !strings.HasPrefix(s, prefix) {
			rest = append(rest, s)
		}
	}
	return rest
}

// TestMissingPartsAreSkips has the report count one skip with its reason.
func TestMissingPartsAreSkips(t *testing.T) {
	r, out := fake(t, "exit 1")
	suites := []nested.Suite{{Name: "firecracker", Package: "p", Firecracker: true}}
	if _, err := r.skip(suites, fmt.Errorf("as told: %w", &nested.Missing{Part: "firecracker and jailer", Why: errors.New("no network")})); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	have, output := told(t, out)
	if want := "start,run firecracker,skip firecracker,skip"; strings.Join(have, ",") != want {
		t.Errorf("events %q, want %s", have, want)
	}
	for _, s := range []string{output, text} {
		if !strings.Contains(s, "firecracker and jailer can't be had here: no network") {
			t.Errorf("the reason is missing in %q", s)
		}
	}
	if _, err := r.skip(suites, errors.New("a mistake of ours")); err == nil {
		t.Error("what is not missing was skipped")
	}
}

func TestStatus(t *testing.T) {
	infra, failed := fmt.Errorf("x: %w", nested.ErrNoExit), errors.New("y failed")
	for want, errs := range map[int][]error{0: nil, exitInfrastructure: {infra, infra}, exitFailed: {infra, failed, infra}} {
		if have := status(errs); have != want {
			t.Errorf("status(%v) = %d, want %d", errs, have, want)
		}
	}
}

func TestLinesStayWhole(t *testing.T) {
	var out bytes.Buffer
	p := &printer{w: &out}
	a, b := p.lines(), p.lines()
	for _, piece := range []string{"\x16--- PA", "SS: TestA\nne", "xt\n"} {
		_, _ = a.Write([]byte(piece))
		_, _ = b.Write([]byte("other\n"))
	}
	if want := "other\n--- PASS: TestA\nother\nnext\nother\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}
