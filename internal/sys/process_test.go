package sys

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"
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

func FuzzStartTime(f *testing.F) {
	f.Add("1 (init) S 0 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 42 1 2")
	f.Add("1 (a) b) S")
	f.Add("")
	f.Fuzz(func(_ *testing.T, s string) { _, _ = startTime(s) })
}
