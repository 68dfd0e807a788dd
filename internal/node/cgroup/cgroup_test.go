package cgroup

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sys"
)

// fake builds a tree from files, for either version.
func fake(t *testing.T, v2 bool, files map[string]string) *Tree {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return &Tree{root: root, v2: v2, sleep: time.Microsecond, hold: func(int) (held, error) { return process{}, nil }}
}

// process is a fake one that survives, unless told otherwise.
type process struct {
	kill    func(os.Signal) error
	release func()
}

func (p process) Signal(sig os.Signal) error {
	if p.kill == nil {
		return nil
	}
	return p.kill(sig)
}

func (p process) Release() error {
	if p.release != nil {
		p.release()
	}
	return nil
}

func fakeV1(t *testing.T) *Tree {
	return fake(t, false, map[string]string{
		"memory/cloche/a/cgroup.procs":          "10\n11\n",
		"memory/cloche/a/memory.usage_in_bytes": "4096\n",
		"memory/cloche/a/memory.oom_control":    "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
		"cpuacct/cloche/a/cpuacct.usage":        "1500\n",
		"cpuacct/cloche/a/cgroup.procs":         "11\n12\n",
		"pids/cloche/a/pids.current":            "9\n",
		"pids/cloche/a/below/cgroup.procs":      "13\n0\n",
		"pids/cloche/b/cgroup.procs":            "",
	})
}

func fakeV2(t *testing.T) *Tree {
	return fake(t, true, map[string]string{
		"cloche/a/cgroup.procs":       "10\n11\n12\n",
		"cloche/a/below/cgroup.procs": "13\n",
		"cloche/a/memory.current":     "4096\n",
		"cloche/a/memory.events":      "low 0\nhigh 0\nmax 7\noom 5\noom_kill 3\noom_group_kill 0\n",
		"cloche/a/cpu.stat":           "usage_usec 1500\nuser_usec 1\nsystem_usec 2\n",
		"cloche/a/pids.current":       "9\n",
		"cloche/b/cgroup.procs":       "",
	})
}

func TestBothVersions(t *testing.T) {
	for _, c := range []struct {
		name string
		tree *Tree
		cpu  time.Duration
	}{
		{"v1", fakeV1(t), 1500 * time.Nanosecond},
		{"v2", fakeV2(t), 1500 * time.Microsecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := c.tree.Group("cloche/a")
			pids, err := g.Procs()
			if err != nil || !slices.Equal(pids, []int{10, 11, 12, 13}) {
				t.Errorf("Procs() = %v, %v", pids, err)
			}
			u, err := g.Usage()
			if want := (Usage{Memory: 4096, CPU: c.cpu, Tasks: 9}); err != nil || u != want {
				t.Errorf("Usage() = %+v, %v, want %+v", u, err, want)
			}
			if n, err := g.OOMKills(); err != nil || n != 3 {
				t.Errorf("OOMKills() = %d, %v", n, err)
			}
			names, err := c.tree.List("cloche")
			if err != nil || !slices.Equal(names, []string{"a", "b"}) {
				t.Errorf("List() = %v, %v", names, err)
			}
			if names, err := c.tree.List("absent"); err != nil || len(names) != 0 {
				t.Errorf("List(absent) = %v, %v", names, err)
			}
			for path, want := range map[string]bool{"cloche/a": true, "cloche/b": true, "cloche/c": false} {
				if have, err := c.tree.Group(path).Exists(); err != nil || have != want {
					t.Errorf("Exists(%s) = %v, %v", path, have, err)
				}
			}
			if pids, err := c.tree.Group("cloche/c").Procs(); err != nil || len(pids) != 0 {
				t.Errorf("Procs(absent) = %v, %v", pids, err)
			}
		})
	}
}

// TestKillWaitsForTheLast has processes die one by one, and a new one appear.
func TestKillWaitsForTheLast(t *testing.T) {
	tree := fakeV1(t)
	write := func(name, content string) {
		if err := os.WriteFile(filepath.Join(tree.root, name), []byte(content), 0o644); err != nil {
			t.Error(err)
		}
	}
	var killed []int
	kill := func(pid int, sig os.Signal) error {
		killed = append(killed, pid)
		switch {
		case sig != syscall.SIGKILL:
			t.Errorf("signal %v", sig)
		case len(killed) == 4: // the first round is over, and one was just forked
			write("memory/cloche/a/cgroup.procs", "20\n")
			write("cpuacct/cloche/a/cgroup.procs", "")
			write("pids/cloche/a/below/cgroup.procs", "")
		case pid == 20:
			write("memory/cloche/a/cgroup.procs", "")
			return syscall.ESRCH
		}
		return nil
	}
	open := 0
	tree.hold = func(pid int) (held, error) {
		open++
		return process{func(sig os.Signal) error { return kill(pid, sig) }, func() { open-- }}, nil
	}
	if err := tree.Group("cloche/a").Kill(context.Background()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(killed, []int{10, 11, 12, 13, 20}) {
		t.Errorf("killed %v", killed)
	}
	if open != 0 {
		t.Errorf("%d processes are still held", open)
	}
}

func TestKillGivesUpWithContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := fakeV2(t).Group("cloche/a").Kill(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Kill = %v", err)
	}
}

// TestHost makes real groups, with a process that has a child in one below.
func TestHost(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP: making cgroups needs root")
	}
	tree, err := Host()
	if err != nil {
		t.Skipf("SKIP: no cgroups here: %v", err)
	}
	hierarchies, err := tree.hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	name := "cloche-test-" + strconv.Itoa(os.Getpid())
	g := tree.Group(name + "/a")
	cmd := exec.Command("sh", "-c", "sleep 1000 & wait")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if err := tree.Group(name).Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	for _, h := range hierarchies {
		if strings.HasSuffix(h, "/cpuset") && !tree.v2 {
			continue // a v1 cpuset takes no process before it has CPUs and memory nodes
		}
		dir := filepath.Join(h, name, "a")
		if err := os.MkdirAll(filepath.Join(dir, "below"), 0o755); err != nil {
			t.Skipf("SKIP: cgroups can't be made here: %v", err)
		}
		if tree.v2 {
			dir = filepath.Join(dir, "below")
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
	if pids, err := g.Procs(); err != nil || !slices.Contains(pids, cmd.Process.Pid) {
		t.Fatalf("Procs() = %v, %v", pids, err)
	}
	if !tree.v2 {
		if u, err := g.Usage(); err != nil || u.Tasks < 1 {
			t.Errorf("Usage() = %+v, %v", u, err)
		}
		if _, err := g.OOMKills(); err != nil {
			t.Error(err)
		}
		for _, limit := range []int64{64 << 20, 128 << 20, 32 << 20} {
			if err := g.SetMemoryLimit(limit); err != nil {
				t.Error(err)
			}
			if got, err := g.number("memory", memoryAndSwap); g.CountsSwap() && (err != nil || got != limit) {
				t.Errorf("memory and swap together have %d bytes, %v", got, err)
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := g.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if err := g.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if have, err := g.Exists(); err != nil || have {
		t.Errorf("after Remove: %v, %v", have, err)
	}
	if err := g.Remove(ctx); err != nil {
		t.Errorf("Remove of nothing: %v", err)
	}
}

// TestSetMemoryLimit has it limit swap where there is a file for that.
func TestSetMemoryLimit(t *testing.T) {
	const v1, v1both, v2, v2swap = "memory/a/memory.limit_in_bytes", "memory/a/memory.memsw.limit_in_bytes", "a/memory.max", "a/memory.swap.max"
	for _, c := range []struct {
		v2   bool
		want map[string]string
	}{
		{false, map[string]string{v1: "4096"}},
		{false, map[string]string{v1: "4096", v1both: "4096"}},
		{true, map[string]string{v2: "4096"}},
		{true, map[string]string{v2: "4096", v2swap: "0"}},
	} {
		files := map[string]string{}
		for name := range c.want {
			files[name] = "max\n"
		}
		tree := fake(t, c.v2, files)
		if err := tree.Group("a").SetMemoryLimit(4096); err != nil {
			t.Error(err)
		}
		for _, name := range []string{v1, v1both, v2, v2swap} {
			got, _ := os.ReadFile(filepath.Join(tree.root, name)) // one that isn't there holds nothing
			if string(got) != c.want[name] {
				t.Errorf("v%d: %s is %q, not %q", tree.Version(), name, got, c.want[name])
			}
		}
	}
	if tree := fake(t, false, map[string]string{"memory/" + memoryAndSwap: ""}); !tree.Group("a").CountsSwap() {
		t.Error("swap is not counted where there is a file for it")
	}
	if tree := fake(t, false, map[string]string{"memory/a/" + memoryAndSwap: ""}); tree.Group("a").CountsSwap() {
		t.Error("swap is counted where there is no file for it")
	}
}

func TestSetCPU(t *testing.T) {
	v1 := fake(t, false, map[string]string{"cpu/a/cpu.cfs_period_us": "1\n", "cpu/a/cpu.cfs_quota_us": "-1\n", "cpuacct/cgroup.procs": ""})
	v2 := fake(t, true, map[string]string{"a/cpu.max": "max 100000\n"})
	for tree, want := range map[*Tree]map[string]string{
		v1: {"cpu/a/cpu.cfs_period_us": "100000", "cpu/a/cpu.cfs_quota_us": "25000"},
		v2: {"a/cpu.max": "25000 100000"},
	} {
		if err := tree.Group("a").SetCPU(250); err != nil {
			t.Errorf("v%d: %v", tree.Version(), err)
		}
		for name, content := range want {
			if got, err := os.ReadFile(filepath.Join(tree.root, name)); err != nil || string(got) != content {
				t.Errorf("v%d: %s is %q, %v", tree.Version(), name, got, err)
			}
		}
	}
	if err := v1.Group("none").SetCPU(250); err == nil {
		t.Error("the share of a group that is not there was set")
	}
}

// TestCountCPU has a process counted, and one that has ended by then: its number
// is put back, since it may be another's.
func TestCountCPU(t *testing.T) {
	self, err := sys.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	tree := fake(t, false, map[string]string{"cpuacct/cgroup.procs": ""})
	procs := func(name string) string {
		data, err := os.ReadFile(filepath.Join(tree.root, "cpuacct", name, "cgroup.procs"))
		if err != nil {
			t.Error(err)
		}
		return string(data)
	}
	if err := os.MkdirAll(filepath.Join(tree.root, "cpuacct/a"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree.root, "cpuacct/a/cgroup.procs"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := tree.Group("a").CountCPU(self); err != nil || procs("a") != strconv.Itoa(self.PID) || procs("") != "" {
		t.Errorf("a living process: %v, %q, %q", err, procs("a"), procs(""))
	}
	self.Start++ // another one, which has had the same number
	if err := tree.Group("a").CountCPU(self); !errors.Is(err, os.ErrProcessDone) || procs("") != strconv.Itoa(self.PID) {
		t.Errorf("one that has ended: %v, %q", err, procs(""))
	}
	if err := fake(t, true, nil).Group("a").CountCPU(self); err != nil {
		t.Errorf("in v2: %v", err)
	}
}
