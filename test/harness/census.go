package harness

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Census lists what a daemon's sandboxes occupy on the host: processes,
// mounts, network namespaces, cgroups, and files that belong to one sandbox.
// It is empty when every sandbox and every named
// snapshot has been deleted.
func (d *Daemon) Census() []string {
	var found []string
	found = append(found, d.processes()...)
	found = append(found, d.mounts()...)
	found = append(found, d.cgroups()...)
	for _, dir := range []string{
		filepath.Join(d.State, "machines"), filepath.Join(d.State, "sessions"), filepath.Join(d.State, "tmp"), filepath.Join(d.State, "snapshots"),
		filepath.Join(d.Run, "m"), filepath.Join(d.Run, "netns"),
	} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if inside, err := os.ReadDir(path); err == nil && len(inside) == 0 && filepath.Base(dir) == "tmp" {
				continue // a room's own place for what it makes, kept from start to start
			}
			found = append(found, "file "+path)
		}
	}
	return found
}

// WaitCensus waits until the census is empty; it returns what is left after
// the time is over.
func (d *Daemon) WaitCensus(patience time.Duration) []string {
	deadline := time.Now().Add(patience)
	for {
		left := d.Census()
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// processes lists the processes that name this daemon's directories, but for
// the daemon, the engine's control process and the egress gateway, which belong
// to no sandbox.
func (d *Daemon) processes() []string {
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range dirs {
		cmdline, err := os.ReadFile(filepath.Join(p, "cmdline"))
		if err != nil || len(cmdline) == 0 {
			continue
		}
		args := strings.Split(strings.TrimSuffix(string(cmdline), "\x00"), "\x00")
		text := strings.Join(args, " ")
		if !strings.Contains(text, d.State) && !strings.Contains(text, d.Run) {
			continue
		}
		if len(args) > 1 && (args[1] == "serve" || args[1] == "control" || args[1] == "egress-gateway") {
			continue
		}
		found = append(found, fmt.Sprintf("process %s %.200s", filepath.Base(p), text))
	}
	return found
}

// ControlProcesses lists the pids of the engine's control processes that
// serve this daemon.
func (d *Daemon) ControlProcesses() []string {
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range dirs {
		cmdline, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		args := strings.Split(string(cmdline), "\x00")
		if len(args) > 1 && args[1] == "control" && strings.Contains(string(cmdline), d.Run) {
			found = append(found, filepath.Base(p))
		}
	}
	return found
}

func (d *Daemon) mounts() []string {
	var found []string
	b, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && (strings.HasPrefix(f[4], d.State+"/") || strings.HasPrefix(f[4], d.Run+"/")) {
			found = append(found, "mount "+f[4])
		}
	}
	return found
}

// cgroups lists the cgroups of sandboxes that this daemon's log names: other
// daemons' sandboxes live below the same parent.
func (d *Daemon) cgroups() []string {
	var found []string
	log, _ := os.ReadFile(d.log.Name())
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return nil //nolint:nilerr // cgroups come and go while we walk
		}
		if name := e.Name(); strings.HasPrefix(name, "sbx_") && strings.Contains(string(log), name) {
			found = append(found, "cgroup "+path)
			return fs.SkipDir
		}
		return nil
	})
	return found
}

// cleanup deletes every sandbox and named snapshot, demands an empty census and stops the daemon.
// After a failed test it shows the log.
func (d *Daemon) cleanup() {
	if d.Running() {
		for id := range strings.Lines(d.CLI("ls", "--ids").Stdout) {
			d.CLI("rm", "--force", strings.TrimSpace(id))
		}
		for id := range strings.Lines(d.CLI("snapshot", "ls", "--ids").Stdout) {
			d.CLI("snapshot", "rm", strings.TrimSpace(id))
		}
		if left := d.WaitCensus(20 * time.Second); len(left) > 0 {
			d.tb.Errorf("left on the host after every sandbox was deleted:\n%s", strings.Join(left, "\n"))
		}
		d.Stop()
	}
	if d.tb.Failed() {
		d.tb.Logf("daemon's log:\n%s", d.Log())
	}
	_ = d.log.Close()
}
