package engine

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// startMain starts a control process in a session of its own and ends when it
// serves, so that the daemon that asked is neither its parent nor needed.
func startMain(dir string) int {
	if err := start(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func start(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	errPath := filepath.Join(dir, "control.err")
	stderr, err := os.OpenFile(errPath, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer stderr.Close()
	ready, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	proc, err := os.StartProcess("/proc/self/exe", []string{"cloche-gvisor", "control", dir}, &os.ProcAttr{
		Dir: "/", Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, Files: []*os.File{null, w, stderr},
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	_ = w.Close()
	if err != nil {
		return err
	}
	line, _ := bufio.NewReader(ready).ReadString('\n')
	if strings.TrimSpace(line) == "ready" {
		return proc.Release()
	}
	_, _ = proc.Wait()
	return fmt.Errorf("the control process did not start: %s", cut(readTail(errPath, 4*maxDetail)))
}
