package engine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/sys"
)

// children lists the child processes of pid, in the order in which they were
// made.
func children(pid int) ([]int, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return nil, err
	}
	var procs []sys.Process
	for _, task := range tasks {
		data, err := os.ReadFile(task)
		if err != nil {
			continue // that thread ended
		}
		for _, s := range strings.Fields(string(data)) {
			child, err := strconv.Atoi(s)
			if err != nil {
				return nil, err
			}
			if p, err := sys.FindProcess(child); err == nil {
				procs = append(procs, p)
			}
		}
	}
	return inOrder(procs), nil
}

// setScore sets a process's oom_score_adj. One that has ended is no error.
func setScore(pid, score int) error {
	err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(score)), 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// endTime is now, as it is told to people.
func endTime() time.Time { return time.Now().UTC().Truncate(time.Millisecond) }
