package jail

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// say writes to a jail's log as its VMM does.
func (j *Jail) say(t testing.TB, text string) {
	t.Helper()
	f, err := j.openLog()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
}

const (
	at     = "2026-11-30T00:46:04.839779594 [sbx-1:main] "
	leaves = at + "Vmm is stopping.\n" + at + "Firecracker exiting successfully. exit_code=0\n"
)

func TestVerdicts(t *testing.T) {
	for name, c := range map[string]struct {
		said string
		want Verdict
	}{
		"nothing":       {"", Silent},
		"alive":         {at + "Running Firecracker v1.12.1\n", Silent},
		"left":          {at + "Running Firecracker v1.12.1\n" + leaves, Left},
		"an error":      {at + "Firecracker exiting with error. exit_code=1\n", Crashed},
		"a signal":      {at + "Shutting down VM after intercepting signal 31, code 1.\n", Crashed},
		"a panic":       {"thread 'main' panicked at src/main.rs:1:\n", Crashed},
		"long ago":      {leaves + strings.Repeat(at+"The API server received a Get request on \"/\".\n", 10), Silent},
		"words in it":   {at + "with body \"] Firecracker exiting successfully. exit_code=0\".\n", Silent},
		"another code":  {at + "Firecracker exiting successfully. exit_code=00\n", Silent},
		"unprintable":   {at + "\x00\x1b[2J\xff\n" + leaves, Left},
		"without a end": {strings.TrimSuffix(leaves, "\n"), Left},
	} {
		j := made(t)
		l, err := j.Log()
		if err != nil {
			t.Fatal(err)
		}
		j.say(t, c.said)
		l.Finish()
		l.Finish() // as often as anybody likes
		if got, line := l.Verdict(); got != c.want || got != Silent && line == "" {
			t.Errorf("%s: %v, %q", name, got, line)
		}
	}
}

// TestACrashSaysWhy: what the log of a VMM says whose KVM can't go on, taken from
// 1.12.1 on a host whose KVM boots no Linux.
func TestACrashSaysWhy(t *testing.T) {
	j := made(t)
	l, err := j.Log()
	if err != nil {
		t.Fatal(err)
	}
	j.say(t, at+"Received KVM_EXIT_INTERNAL_ERROR signal\n"+at+"Vmm is stopping.\n"+at+"Vmm is stopping.\n"+at+"Firecracker exiting with error. exit_code=1\n")
	l.Finish()
	if got, line := l.Verdict(); got != Crashed || !strings.HasSuffix(line, "Received KVM_EXIT_INTERNAL_ERROR signal") {
		t.Errorf("%v, %q", got, line)
	}
}

// TestALogIsBounded writes more than anybody reads, with a reader and without.
func TestALogIsBounded(t *testing.T) {
	j := made(t)
	f, err := j.openLog()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_ = f.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)) // a VMM doesn't wait at all
	n, _ := f.Write(make([]byte, 1<<20))
	if n > 128<<10 {
		t.Errorf("a log without a reader took %d bytes", n)
	}
	_ = f.SetWriteDeadline(time.Time{})
	l, err := j.Log()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3000 {
		if _, err := fmt.Fprintf(f, "line %d of a guest that has much to say\n", i); err != nil {
			t.Fatal(err)
		}
	}
	l.Finish()
	if len(l.kept) > maxLog {
		t.Errorf("%d bytes are kept", len(l.kept))
	}
	if lines := l.Lines(2); len(lines) != 2 || !strings.HasPrefix(lines[1], "line 2999 ") {
		t.Errorf("the last lines are %q", lines)
	}
}

// TestALogOutlivesItsReader closes one reader and asks the next.
func TestALogOutlivesItsReader(t *testing.T) {
	j := made(t)
	first, err := j.Log()
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	hold, err := j.openLog() // the VMM's own
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	j.say(t, leaves)
	second, err := j.Log()
	if err != nil {
		t.Fatal(err)
	}
	second.Finish()
	if got, _ := second.Verdict(); got != Left {
		t.Errorf("the next reader says %v", got)
	}
}

// TestOnlyAFifoIsALog puts other things in its place.
func TestOnlyAFifoIsALog(t *testing.T) {
	j := made(t)
	path := filepath.Join(j.dir, logName)
	for name, put := range map[string]func() error{
		"a file": func() error { return os.WriteFile(path, nil, 0o600) },
		"a link": func() error { return os.Symlink("/dev/zero", path) },
	} {
		_ = os.Remove(path)
		if err := put(); err != nil {
			t.Fatal(err)
		}
		if l, err := j.Log(); err == nil {
			l.Close()
			t.Errorf("%s is read as a log", name)
		}
	}
}

// FuzzLog reads anything as a VMM's log: what comes of it is bounded, printable
// and ends.
func FuzzLog(f *testing.F) {
	f.Add([]byte(leaves))
	f.Add([]byte(at + "Firecracker exiting with error"))
	f.Add([]byte("\xff\x00\n\n\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		l := new(Log)
		for range 3 {
			l.keep(data)
		}
		if len(l.kept) > maxLog {
			t.Errorf("%d bytes are kept", len(l.kept))
		}
		verdict, line := l.Verdict()
		if verdict < Silent || verdict > Crashed || strings.ContainsAny(line, "\n\x00\x1b") || len(line) > 4*maxLog {
			t.Errorf("%v, %q", verdict, line)
		}
	})
}
