package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/sandbox"
)

// TestForbiddenCallsEndTheVMM makes threads of a VMM ask the kernel for what they
// must not, as whoever has taken it over would.
func TestForbiddenCallsEndTheVMM(t *testing.T) {
	f := newFixture(t)
	of := f.create()
	image := f.snapshot(of, sandbox.SnapshotMemory)
	f.rest(of)
	for name, number := range map[string]uint64{
		"execve": unix.SYS_EXECVE, "ptrace": unix.SYS_PTRACE, "unshare": unix.SYS_UNSHARE, "mount": unix.SYS_MOUNT, "bpf": unix.SYS_BPF,
		"process_vm_writev": unix.SYS_PROCESS_VM_WRITEV, "io_uring_setup": unix.SYS_IO_URING_SETUP, "userfaultfd": unix.SYS_USERFAULTFD, "fork": unix.SYS_FORK,
	} {
		m := f.restore(image)
		f.rest(m)
		if err := ask(m.record().Process.PID, number); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		end := f.ended(m)
		if want := fmt.Sprintf("intercepting signal %d", unix.SIGSYS); end.Reason != sandbox.EndCrashed || !strings.Contains(end.Detail, want) {
			t.Errorf("after %s its end is %+v", name, end)
		}
		if err := f.d.Discard(context.Background(), m.ID()); err != nil {
			t.Error(err)
		}
	}
}

// errAsked is about the asking, not about its end.
var errAsked = errors.New("the VMM can't be made to ask")

// ask makes the thread of a VMM that serves its API make a system call. It waits
// in one, whose instruction is used again.
func ask(pid int, number uint64) error {
	runtime.LockOSThread() // a tracer is a thread
	defer runtime.UnlockOSThread()
	thread, err := apiThread(pid)
	if err != nil {
		return err
	}
	if err := syscall.PtraceAttach(thread); err != nil {
		return fmt.Errorf("%w: attach: %w", errAsked, err)
	}
	var ws syscall.WaitStatus
	if _, err := syscall.Wait4(thread, &ws, syscall.WALL, nil); err != nil || !ws.Stopped() {
		return fmt.Errorf("%w: it does not stop: %v, %w", errAsked, ws, err)
	}
	var regs syscall.PtraceRegs
	if err := syscall.PtraceGetRegs(thread, &regs); err != nil {
		return fmt.Errorf("%w: read its registers: %w", errAsked, err)
	}
	code := make([]byte, 2)
	if _, err := syscall.PtracePeekText(thread, uintptr(regs.Rip-2), code); err != nil || code[0] != 0x0f || code[1] != 0x05 {
		return fmt.Errorf("%w: it is not in a system call: % x, %w", errAsked, code, err)
	}
	regs.Rip -= 2
	regs.Rax, regs.Orig_rax = number, ^uint64(0)
	if err := syscall.PtraceSetRegs(thread, &regs); err != nil {
		return fmt.Errorf("%w: write its registers: %w", errAsked, err)
	}
	if err := syscall.PtraceDetach(thread); err != nil {
		return fmt.Errorf("%w: let it go on: %w", errAsked, err)
	}
	return nil
}

// apiThread finds the thread that serves a VMM's API.
func apiThread(pid int) (int, error) {
	dir := fmt.Sprintf("/proc/%d/task/", pid)
	tasks, err := os.ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errAsked, err)
	}
	for _, t := range tasks {
		if name, err := os.ReadFile(dir + t.Name() + "/comm"); err == nil && string(name) == "fc_api\n" {
			return strconv.Atoi(t.Name())
		}
	}
	return 0, fmt.Errorf("%w: it has no such thread", errAsked)
}
