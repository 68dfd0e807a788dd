package jail

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"
)

const (
	// maxLog is how much of a VMM's log is kept: its end.
	maxLog = 16 << 10
	// logPause is the time between two reads of a log. A guest can make its VMM
	// write as much as it likes; what does not fit into the FIFO meanwhile is
	// lost, by the VMM's own choice.
	logPause = 5 * time.Millisecond
)

func (j *Jail) makeLog(uid int) error {
	path := filepath.Join(j.dir, logName)
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		return diskError(&fs.PathError{Op: "mkfifo", Path: path, Err: err})
	}
	return j.Own(logName, uid)
}

// openLog opens the FIFO so that neither end ever waits, nor finds that there
// is no other: whoever has it open can do both.
func (j *Jail) openLog() (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(j.dir, logName), os.O_RDWR|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Mode()&fs.ModeNamedPipe == 0 {
		err = errors.New("the log is not a FIFO")
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Log reads what a VMM says, and keeps the end of it.
type Log struct {
	f    *os.File
	stop chan struct{} // closed: nothing more is read in passing
	done chan struct{} // closed: the reader has ended

	mu    sync.Mutex
	kept  []byte
	ended bool
}

// Log begins to read the VMM's log. Close or Finish ends it.
func (j *Jail) Log() (*Log, error) {
	f, err := j.openLog()
	if err != nil {
		return nil, err
	}
	l := &Log{f: f, stop: make(chan struct{}), done: make(chan struct{})}
	go l.read()
	return l, nil
}

func (l *Log) read() {
	defer close(l.done)
	buf := make([]byte, 64<<10)
	for {
		n, err := l.f.Read(buf)
		l.keep(buf[:n])
		if err != nil {
			return // a deadline: somebody ends it
		}
		select {
		case <-l.stop:
			return
		case <-time.After(logPause):
		}
	}
}

func (l *Log) keep(data []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept = append(l.kept, data...)
	if over := len(l.kept) - maxLog; over > 0 {
		l.kept = append(l.kept[:0], l.kept[over:]...)
	}
}

// Close ends the reading. What the VMM says from now on waits for the next
// reader. What was read can still be asked for.
func (l *Log) Close() { l.end(false) }

// Finish is Close for a VMM that has ended: all that it said is read before.
func (l *Log) Finish() { l.end(true) }

func (l *Log) end(drain bool) {
	l.mu.Lock()
	again := l.ended
	l.ended = true
	l.mu.Unlock()
	if again {
		return
	}
	close(l.stop)
	_ = l.f.SetReadDeadline(time.Unix(1, 0))
	<-l.done
	if drain {
		_ = l.f.SetReadDeadline(time.Time{})
		l.drain()
	}
	_ = l.f.Close()
}

// drain reads what is in the FIFO, as much as one holds at most, so that a
// writer can't keep it at that.
func (l *Log) drain() {
	conn, err := l.f.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, 64<<10)
	for range 16 {
		n := 0
		err := conn.Read(func(fd uintptr) bool {
			n, _ = syscall.Read(int(fd), buf) // nothing more: -1 and EAGAIN
			return true
		})
		if err != nil || n <= 0 {
			return
		}
		l.keep(buf[:n])
	}
}

// Lines are the last lines that were read, at most n, without what is not
// printable.
func (l *Log) Lines(n int) []string {
	l.mu.Lock()
	text := string(l.kept)
	l.mu.Unlock()
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	lines = lines[max(0, len(lines)-n):]
	for i, line := range lines {
		lines[i] = strings.Map(func(r rune) rune {
			if !unicode.IsPrint(r) {
				return ' '
			}
			return r
		}, strings.ToValidUTF8(line, "?"))
	}
	return lines
}

// Verdict is how a VMM says that it ended.
type Verdict int

// The verdicts.
const (
	Silent  Verdict = iota // it said nothing: a signal that can't be caught
	Left                   // it ended by itself, since its guest did
	Crashed                // it ended on an error
)

// leaving is Firecracker's last line when its guest has ended.
const leaving = "] Firecracker exiting successfully. exit_code=0"

// failing are the beginnings of the lines by which it ends otherwise.
var failing = []string{
	"] Firecracker exiting with error", "] Shutting down VM after intercepting signal", "] RunWithApiError", "] RunWithoutApiError", "panicked at",
}

// causes are what it says before those: why a processor stopped.
var causes = []string{"] Received KVM_EXIT_", "] Failure during vcpu run", "] Unexpected exit reason on vcpu run"}

// Verdict tells how the VMM ended, and the line that says so; of a crash the one
// that says why, where there is one. Only lines near the end count; a guest has no
// way to have a line of its own written.
func (l *Log) Verdict() (Verdict, string) {
	lines := l.Lines(8)
	for i := len(lines) - 1; i >= 0; i-- {
		line := lines[i]
		if strings.HasSuffix(line, leaving) {
			return Left, line
		}
		if mentions(line, failing) {
			if why := slices.IndexFunc(lines[:i], func(l string) bool { return mentions(l, causes) }); why >= 0 {
				line = lines[why]
			}
			return Crashed, line
		}
	}
	return Silent, ""
}

func mentions(line string, any []string) bool {
	return slices.ContainsFunc(any, func(a string) bool { return strings.Contains(line, a) })
}
