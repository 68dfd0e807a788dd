package sys

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestProcess(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := FindProcess(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if !p.Exists() {
		t.Error("a living process does not exist")
	}
	other := p
	other.Start--
	if other.Exists() {
		t.Error("an earlier process of the same number exists")
	}
	if err := other.Kill(); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait for a living process = %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- p.Wait(context.Background()) }()
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("Wait = %v", err)
	}
	if !p.Exists() {
		t.Error("a process that nobody reaped does not exist")
	}
	_ = cmd.Wait()
	if p.Exists() {
		t.Error("a reaped process exists")
	}
	if err := errors.Join(p.Kill(), p.Wait(context.Background())); err != nil {
		t.Error(err)
	}
	if _, err := FindProcess(p.PID); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("FindProcess of a reaped process = %v", err)
	}
}

// TestALivingProcessThatCanNotBeLookedAtIsNotDead has no descriptor to look with:
// none at all, or but one.
func TestALivingProcessThatCanNotBeLookedAtIsNotDead(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	p, err := FindProcess(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	_ = p.Wait(soon) // what the runtime opens for the first wait, it has then
	ended := make(chan error, 1)
	free := useDescriptors(t)
	for _, left := range []int{0, 1} {
		for range left {
			_ = free[len(free)-1].Close()
			free = free[:len(free)-1]
		}
		if _, err := FindProcess(p.PID); left == 0 && !errors.Is(err, unix.EMFILE) {
			t.Errorf("%d left: FindProcess = %v", left, err)
		}
		if !p.Exists() {
			t.Errorf("%d left: it does not exist", left)
		}
		if err := p.Kill(); !errors.Is(err, unix.EMFILE) {
			t.Errorf("%d left: Kill = %v", left, err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		if err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, unix.EMFILE) {
			t.Errorf("%d left: Wait = %v", left, err)
		}
		cancel()
	}
	go func() { ended <- p.Wait(context.Background()) }()
	select {
	case err := <-ended:
		t.Errorf("Wait = %v while it lives", err)
	case <-time.After(50 * time.Millisecond):
	}
	for _, f := range free {
		_ = f.Close()
	}
	if err := p.Kill(); err != nil {
		t.Error(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("Wait = %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("its end is not seen")
	}
}

// useDescriptors has none left but those that it returns, until the test ends.
func useDescriptors(t *testing.T) (free []*os.File) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, f := range free {
			_ = f.Close()
		}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.EMFILE) {
			return free
		}
		if err != nil {
			t.Fatal(err)
		}
		free = append(free, os.NewFile(uintptr(fd), "null"))
	}
}

func FuzzStartTime(f *testing.F) {
	f.Add("1 (init) S 0 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 42 1 2")
	f.Add("1 (a) b) S")
	f.Add("")
	f.Fuzz(func(_ *testing.T, s string) { _, _ = startTime(s) })
}
