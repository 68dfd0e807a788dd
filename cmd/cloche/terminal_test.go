package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/term"
)

// openTerminal makes a pair of terminal ends.
func openTerminal(t *testing.T) (far, near *os.File) {
	t.Helper()
	far, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("SKIP: no terminal can be made here: %v", err)
	}
	t.Cleanup(func() { _ = far.Close() })
	var number, unlocked int32
	for _, c := range []struct {
		request uintptr
		arg     *int32
	}{{syscall.TIOCSPTLCK, &unlocked}, {syscall.TIOCGPTN, &number}} {
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, far.Fd(), c.request, uintptr(unsafe.Pointer(c.arg))); errno != 0 {
			t.Fatal(errno)
		}
	}
	near, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("SKIP: no terminal can be made here: %v", err)
	}
	t.Cleanup(func() { _ = near.Close() })
	return far, near
}

func setSize(t *testing.T, far *os.File, rows, cols uint16) {
	t.Helper()
	size := [4]uint16{rows, cols, 0, 0}
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, far.Fd(), syscall.TIOCSWINSZ, uintptr(unsafe.Pointer(&size))); errno != 0 {
		t.Fatal(errno)
	}
}

// readUntil reads the far end until a text comes.
func readUntil(t *testing.T, far *os.File, want string) string {
	t.Helper()
	var got bytes.Buffer
	found := make(chan struct{})
	go func() {
		defer close(found)
		b := make([]byte, 4096)
		for !strings.Contains(got.String(), want) {
			n, err := far.Read(b)
			got.Write(b[:n])
			if err != nil {
				return
			}
		}
	}()
	select {
	case <-found:
	case <-time.After(15 * time.Second):
		t.Fatalf("%q did not come", want)
	}
	return got.String()
}

// onTerminal starts this test's program as `cloche` on a terminal of its own.
func onTerminal(t *testing.T, f *fake, args ...string) (cmd *exec.Cmd, far, near *os.File) {
	t.Helper()
	far, near = openTerminal(t)
	setSize(t, far, 24, 80)
	cmd = exec.Command(os.Args[0], args...)
	cmd.Args[0] = "cloche"
	cmd.Env = append(os.Environ(), asProgram+"=1", "CLOCHE_URL="+f.url(), "CLOCHE_API_KEY=clk_test", "TERM=xterm")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = near, near, near
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd, far, near
}

func exitOf(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait()
	}()
	select {
	case <-done:
	case <-time.After(15 * time.Second):
		t.Fatal("the program did not end")
	}
	return cmd.ProcessState.ExitCode()
}

// On a terminal keys go to the command as they are, Ctrl-C too, and the
// terminal is as it was afterwards.
func TestTerminalIsRawAndRestored(t *testing.T) {
	f := newFake()
	defer f.close()
	cmd, far, near := onTerminal(t, f, "run", "--rm", "-it", "base", "cat")
	before, err := term.GetState(int(near.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	readUntil(t, far, "") // it has a reader
	// Keys are taken once the command runs; what is typed before waits.
	if _, err := far.Write([]byte("xyzzy")); err != nil {
		t.Fatal(err)
	}
	readUntil(t, far, "xyzzy")
	waitRaw(t, near)
	if _, err := far.Write([]byte{3}); err != nil {
		t.Fatal(err)
	}
	if code := exitOf(t, cmd); code != 42 {
		t.Errorf("exit code %d, want the command's 42", code)
	}
	after, err := term.GetState(int(near.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(before) != fmt.Sprint(after) {
		t.Error("the terminal is not as it was")
	}
}

// waitRaw waits until the terminal no longer makes signals of keys.
func waitRaw(t *testing.T, near *os.File) {
	t.Helper()
	for range 1000 {
		var tio syscall.Termios
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, near.Fd(), syscall.TCGETS, uintptr(unsafe.Pointer(&tio))); errno == 0 && tio.Lflag&syscall.ISIG == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the terminal never became raw")
}

func TestWindowSizeIsPassedOn(t *testing.T) {
	f := newFake()
	defer f.close()
	cmd, far, near := onTerminal(t, f, "run", "--rm", "-it", "base", "size")
	waitRaw(t, near)
	setSize(t, far, 33, 101) // the kernel tells the program by SIGWINCH
	readUntil(t, far, "33x101")
	if code := exitOf(t, cmd); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// Without a terminal in the sandbox Ctrl-C becomes a SIGINT there.
func TestInterruptIsPassedOn(t *testing.T) {
	f := newFake()
	defer f.close()
	cmd, far, _ := onTerminal(t, f, "run", "base", "signal")
	for range 1000 { // until the session exists; an earlier Ctrl-C would end the creation
		f.mu.Lock()
		n := len(f.sessions)
		f.mu.Unlock()
		if n > 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(50 * time.Millisecond) // the program asks for signals right after
	if _, err := far.Write([]byte{3}); err != nil {
		t.Fatal(err)
	}
	readUntil(t, far, "got SIGINT")
	if code := exitOf(t, cmd); code != 9 {
		t.Errorf("exit code %d, want the command's 9", code)
	}
}
