package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
)

// maxDetail bounds the part of an end's detail that a guest may have written.
const maxDetail = 400

// ending is what is known about a sentry that has ended.
type ending struct {
	watched bool            // we were its parent, and have status
	status  unix.WaitStatus // of the sentry; gVisor makes PID 1's its own
	asked   bool            // the driver asked us to kill it
	oom     bool            // the kernel killed in its cgroup, not long ago
	panicky string          // what the sentry wrote when it crashed
	console string          // the last words of PID 1
}

// end tells the reason. The sentry ends with PID 1's exit code, or 128 plus
// the signal that killed it, so those are told apart from the sentry's own.
func (e ending) end() sandbox.End {
	reason, detail := sandbox.EndUnknown, "it ended while no process watched it"
	ws := e.status
	switch {
	case e.asked:
		reason, detail = sandbox.EndKilled, "killed on request"
	case !e.watched && e.oom:
		reason, detail = sandbox.EndOOM, "the kernel killed processes of it for want of memory"
	case !e.watched:
	case ws.Signaled() && ws.Signal() == unix.SIGKILL && e.oom:
		reason, detail = sandbox.EndOOM, "the kernel killed the sentry for want of memory"
	case ws.Signaled() && (ws.Signal() == unix.SIGKILL || ws.Signal() == unix.SIGTERM):
		reason, detail = sandbox.EndKilled, fmt.Sprintf("the sentry was killed by signal %d (%s) from the host", ws.Signal(), ws.Signal())
	case ws.Signaled():
		reason, detail = sandbox.EndCrashed, fmt.Sprintf("the sentry was ended by signal %d (%s)", ws.Signal(), ws.Signal())
	case e.panicky != "":
		reason, detail = sandbox.EndCrashed, "the sentry crashed: "+cut(e.panicky)
	case ws.ExitStatus() == 128+int(unix.SIGKILL) && e.oom:
		reason, detail = sandbox.EndOOM, "the kernel killed the guest's PID 1 for want of memory"
	case ws.ExitStatus() > 128 && ws.ExitStatus() <= 128+64:
		sig := unix.Signal(ws.ExitStatus() - 128)
		reason, detail = sandbox.EndExited, fmt.Sprintf("the guest's PID 1 was killed by signal %d (%s)", sig, sig)
	default:
		reason, detail = sandbox.EndExited, fmt.Sprintf("the guest's PID 1 exited with code %d", ws.ExitStatus())
		if e.console != "" {
			detail += "; its last words: " + cut(e.console)
		}
	}
	return sandbox.End{Reason: reason, Detail: detail, At: endTime()}
}

func cut(s string) string {
	if len(s) > maxDetail {
		s = strings.ToValidUTF8(s[:maxDetail], "") + "…"
	}
	return s
}

// lastWords collects what the machine's directory says about an end.
func (e *ending) lastWords(dir string) {
	if data, err := os.ReadFile(filepath.Join(dir, enginerpc.PanicName)); err == nil {
		e.panicky = printable(string(data[:min(len(data), maxDetail)]))
	}
	e.console = readTail(filepath.Join(dir, enginerpc.ConsoleName), maxDetail)
}
