package nested

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestInitramfs(t *testing.T) {
	host := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(host, bytes.Repeat([]byte("program"), 1000), 0o755); err != nil {
		t.Fatal(err)
	}
	tree := Tree{
		"/etc/deep/er/file": {Data: "content"}, "bin/program": {Mode: 0o755, Host: host}, "bin/link": {Link: "program"}, "empty": {Mode: 0o600},
	}
	var one, two bytes.Buffer
	if err := errors.Join(WriteInitramfs(&one, tree), WriteInitramfs(&two, tree)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(one.Bytes(), two.Bytes()) {
		t.Error("the same tree gave two archives")
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("SKIP: the archive is not unpacked: there is no busybox (package busybox-static)")
	}
	dir := t.TempDir()
	unpack := exec.Command(busybox, "cpio", "-idm")
	unpack.Dir, unpack.Stdin = dir, &one
	if out, err := unpack.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v: %s", err, out)
	}
	for name, want := range map[string]string{"etc/deep/er/file": "content", "bin/link": strings.Repeat("program", 1000), "empty": ""} {
		if have, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(have) != want {
			t.Errorf("%s: %d bytes, %v", name, len(have), err)
		}
	}
	for name, want := range map[string]os.FileMode{"etc/deep": os.ModeDir | 0o755, "bin/program": 0o755, "empty": 0o600, "etc/deep/er/file": 0o644} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode() != want {
			t.Errorf("%s: %v, %v", name, st.Mode(), err)
		}
	}
	if err := WriteInitramfs(&two, Tree{"x": {Host: "/nowhere"}}); err == nil {
		t.Error("a file that is nowhere was written")
	}
}

// TestScript runs a job's script on the host, with what shells stumble over.
func TestScript(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "it's a $HOME")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	text := script(Job{Dir: dir, Env: []string{"WHAT='a' \"$b\" `c`"}, Args: []string{"/bin/sh", "-c", `pwd; echo "$WHAT"; echo "$1"; exit 7`, "sh", "*"}})
	cmd := exec.Command("sh")
	cmd.Stdin = strings.NewReader(text)
	out, _ := cmd.Output()
	if want := dir + "\n'a' \"$b\" `c`\n*\n"; string(out) != want || cmd.ProcessState.ExitCode() != 7 {
		t.Errorf("it printed %q (status %d), not %q", out, cmd.ProcessState.ExitCode(), want)
	}
}

// fakeQEMU is a QEMU that runs a shell script in place of a machine. $console
// is where the first serial port goes.
func fakeQEMU(t *testing.T, does string) *L1 {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "qemu")
	text := "#!/bin/sh\nfor a in \"$@\"; do case $a in file:*) console=${a#file:} ;; esac; done\n" + does + "\n"
	if err := os.WriteFile(file, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return &L1{Kernel: "/kernel", Busybox: file, QEMU: file, Dir: dir, Silence: time.Second}
}

func TestHowL1Ends(t *testing.T) {
	alive := `while :; do echo "[ 1.5] l1: alive" >>$console; sleep 0.1; done`
	for _, c := range []struct {
		name, does string
		time       time.Duration
		status     int
		why        string // "": it ended with status
	}{
		{name: "passed", does: `echo output; printf '[ 2.25] l1: EXIT 0\r\n' >>$console`},
		{name: "failed", does: `echo output; echo "l1: EXIT 12" >>$console`, status: 12},
		{name: "failed whatever QEMU says", does: `echo output; echo "l1: EXIT 12" >>$console; exit 1`, status: 12},
		{name: "ended early", does: `echo output; echo "[ 3.0] l1: up 3.0" >>$console`, why: "QEMU ended by itself; its last words: [ 3.0] l1: up 3.0"},
		{name: "broke", does: `echo output; echo "qemu: warning: x" >&2; exit 3`, why: "exit status 3; it never came up"},
		{name: "was ended", does: `echo output; echo "qemu: terminating on signal 15" >&2`, why: "QEMU ended by itself (qemu: terminating on signal 15); it"},
		{name: "quoted", does: `echo output; echo "l1: alive, l1: EXIT 0" >>$console`, why: "QEMU ended by itself"},
		{name: "froze", does: `echo output; echo "l1: alive" >>$console; exec sleep 100`, why: "frozen: no sign of life for 1s"},
		{name: "took too long", does: "echo output; " + alive, time: 2 * time.Second, why: "it had 2s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := fakeQEMU(t, c.does)
			if c.time == 0 {
				c.time = time.Minute
			}
			var out bytes.Buffer
			status, err := l.Run(t.Context(), Job{Name: "job", Args: []string{"true"}, Time: c.time}, &out)
			if out.String() != "output\n" {
				t.Errorf("the output was %q", out.String())
			}
			if c.why == "" && (err != nil || status != c.status) {
				t.Errorf("status %d, %v; want %d", status, err, c.status)
			}
			if c.why != "" && (!errors.Is(err, ErrNoExit) || !strings.Contains(err.Error(), c.why)) {
				t.Errorf("the error is %v, and lacks %q", err, c.why)
			}
			if _, err := os.Stat(filepath.Join(l.Dir, "job.console")); err != nil {
				t.Errorf("the log was not kept: %v", err)
			}
		})
	}
}

// TestChoice holds the choice of tests to clauses that exist, and all of them
// to being run once.
func TestChoice(t *testing.T) {
	known := contract()
	for _, list := range [][]string{ciFirecracker, ciGVisor} {
		for _, name := range list {
			if !slices.Contains(known, name) {
				t.Errorf("CI is to run the clause %q, which does not exist", name)
			}
		}
	}
	for _, driver := range []string{"firecracker", "gvisor"} {
		for _, name := range known {
			n := 0
			for _, s := range All() {
				if picks(t, s, "TestConformance/"+driver+"/"+name) {
					n++
				}
			}
			if n != 1 {
				t.Errorf("the clause %s of %s is run %d times", name, driver, n)
			}
		}
	}
	names := map[string]bool{}
	for _, s := range append(All(), CI()...) {
		if s.Time == 0 || s.Name == "" || s.Run == "" {
			t.Errorf("incomplete: %+v", s)
		}
		if args := s.Args("t"); !slices.Contains(args, "-test.run="+s.Run) || !slices.Contains(args, "-test.skip="+s.Skip) {
			t.Errorf("%s runs %q", s.Name, args)
		}
		names[s.Title()] = true
	}
	if len(names) < len(All()) {
		t.Error("suites have the same title")
	}
}

// picks tells whether a suite runs a test, by the rules of -test.run and
// -test.skip.
func picks(t *testing.T, s Suite, test string) bool {
	t.Helper()
	match := func(pattern string) bool {
		elements := strings.Split(test, "/")
		patterns := strings.Split(pattern, "/")
		for i, p := range patterns {
			if i < len(elements) && !regexp.MustCompile(p).MatchString(elements[i]) {
				return false
			}
		}
		return len(patterns) <= len(elements)
	}
	return strings.HasSuffix(s.Package, strings.Split(test, "/")[1]) && match(s.Run) && (s.Skip == "" || !match(s.Skip))
}

func TestPins(t *testing.T) {
	if !regexp.MustCompile(`^[a-z-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}\n$`).MatchString(requirements) {
		t.Errorf("the requirements are %q", requirements)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	const x = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
	if err := verify(dir, map[string]string{"f": x}); err != nil {
		t.Error(err)
	}
	if err := verify(dir, map[string]string{"f": strings.Repeat("0", 64)}); err == nil {
		t.Error("a wrong hash was accepted")
	}
	if err := verify(dir, map[string]string{"g": x}); err == nil {
		t.Error("a missing file was accepted")
	}
}
