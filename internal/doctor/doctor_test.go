package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sys"
)

// machine makes a root with the given files.
func machine(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		p := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const (
	mountsV2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
	mountsV1 = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n32 23 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" +
		"33 23 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n34 23 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)

func TestReadChecks(t *testing.T) {
	for name, tc := range map[string]struct {
		check func(context.Context, Options) Check
		files map[string]string
		want  Status
		says  string
	}{
		"old kernel":         {checkKernel, map[string]string{"proc/sys/kernel/osrelease": "4.19.0-1-amd64\n"}, Fail, "too old"},
		"ageing kernel":      {checkKernel, map[string]string{"proc/sys/kernel/osrelease": "5.4.1\n"}, Warn, "maintenance"},
		"kernel":             {checkKernel, map[string]string{"proc/sys/kernel/osrelease": "6.1.0-57-cloud-amd64\n"}, OK, "6.1"},
		"strange kernel":     {checkKernel, map[string]string{"proc/sys/kernel/osrelease": "linux\n"}, Warn, "linux"},
		"no proc":            {checkKernel, nil, Fail, "osrelease"},
		"cgroup v2":          {checkCgroups, map[string]string{"proc/self/mountinfo": mountsV2, "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"}, OK, "v2"},
		"cgroup v1":          {checkCgroups, map[string]string{"proc/self/mountinfo": mountsV1, "sys/fs/cgroup/unified/cgroup.controllers": "\n"}, OK, "v1"},
		"v2 without memory":  {checkCgroups, map[string]string{"proc/self/mountinfo": mountsV2, "sys/fs/cgroup/cgroup.controllers": "cpu pids\n"}, Fail, "memory"},
		"no cgroups":         {checkCgroups, map[string]string{"proc/self/mountinfo": "\n"}, Fail, "cpu, memory, pids"},
		"little memory":      {checkMemory, map[string]string{"proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 500000 kB\n"}, Warn, "488.3 MiB free of 1.9 GiB"},
		"memory":             {checkMemory, map[string]string{"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 5000000 kB\n"}, OK, "GiB"},
		"low limit":          {checkLimits, map[string]string{"proc/sys/vm/max_map_count": "100"}, Warn, "vm.max_map_count is 100"},
		"no user namespaces": {checkUserNamespaces, map[string]string{"proc/sys/user/max_user_namespaces": "0"}, Warn, "max_user_namespaces"},
		"apparmor":           {checkUserNamespaces, map[string]string{"proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}, Warn, "AppArmor"},
		"deb822 sources":     {checkSources, map[string]string{"etc/apt/sources.list.d/debian.sources": "Types: deb\nURIs: x\n"}, OK, "1 apt"},
		"one-line sources":   {checkSources, map[string]string{"etc/apt/sources.list": "# deb x\ndeb [a=b] x y z\n"}, OK, "1 apt"},
		"commented sources":  {checkSources, map[string]string{"etc/apt/sources.list": "# deb x\n"}, Warn, "no apt source"},
	} {
		t.Run(name, func(t *testing.T) {
			c := tc.check(t.Context(), Options{Root: machine(t, tc.files)})
			if c.Status != tc.want || !strings.Contains(c.Detail, tc.says) {
				t.Errorf("got %+v, want %s with %q", c, tc.want, tc.says)
			}
			if (c.Status == OK) != (c.Mend == "") {
				t.Errorf("status %s with mend %q: exactly what is not ok says how to mend it", c.Status, c.Mend)
			}
		})
	}
}

func TestJudgeState(t *testing.T) {
	for _, tc := range []struct {
		magic, free int64
		readOnly    bool
		want        Status
	}{
		{0xef53, 50 << 30, false, OK},
		{0xef53, 5 << 30, false, Warn},
		{0xef53, 1 << 20, false, Fail},
		{0xef53, 50 << 30, true, Fail},
		{0x01021994, 50 << 30, false, Warn},
		{0x6969, 50 << 30, false, Warn},
		{0x1, 50 << 30, false, OK},
	} {
		if c := judgeState("/d", tc.magic, tc.free, 1<<20, tc.readOnly); c.Status != tc.want {
			t.Errorf("%#x, %d free, read-only %v: %+v, want %s", tc.magic, tc.free, tc.readOnly, c, tc.want)
		}
	}
}

// A KVM that opens, answers and runs every step, but interprets, is not said
// to work.
func TestJudgeKVM(t *testing.T) {
	ran := sys.KVMReport{Exists: true, Opens: true, Runs: true, LoopSteps: 2_000_000}
	slow, fast := ran, ran
	slow.LoopTime, fast.LoopTime = 1200*time.Millisecond, 2*time.Millisecond
	for name, tc := range map[string]struct {
		r    sys.KVMReport
		want Status
		says string
	}{
		"absent":     {sys.KVMReport{}, Warn, "no /dev/kvm"},
		"forbidden":  {sys.KVMReport{Exists: true, Problem: "permission denied"}, Warn, "permission denied"},
		"stuck":      {sys.KVMReport{Exists: true, Opens: true, Step: "enter long mode", Problem: "exit reason 17"}, Warn, "enter long mode"},
		"interprets": {slow, Warn, "can't boot"},
		"real":       {fast, OK, "only a boot proves"},
	} {
		if c := judgeKVM(tc.r); c.Status != tc.want || !strings.Contains(c.Detail, tc.says) {
			t.Errorf("%s: %+v, want %s with %q", name, c, tc.want, tc.says)
		}
	}
}

// A trial that prints no report, or never ends, is not a success.
func TestKVMChildThatFails(t *testing.T) {
	for _, script := range []string{"exit 3", "echo nonsense", "kill -9 $$"} {
		if c := checkKVM(t.Context(), Options{KVM: []string{"/bin/sh", "-c", script}}); c.Status != Warn {
			t.Errorf("%q: %+v", script, c)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	c := checkKVM(ctx, Options{KVM: []string{"/bin/sh", "-c", "echo the last step >&2; exec sleep 60"}})
	if c.Status != Warn || !strings.Contains(c.Detail, "the last step") {
		t.Errorf("a trial that hangs: %+v", c)
	}
}

func TestRunDecides(t *testing.T) {
	root := machine(t, map[string]string{
		"proc/sys/kernel/osrelease": "6.1.0", "proc/self/mountinfo": mountsV2, "sys/fs/cgroup/cgroup.controllers": "cpu memory pids",
	})
	o := Options{
		Root: root, StateDir: root, Driver: "gvisor",
		LookPath: func(string) (string, error) { return "", errors.New("not here") },
		Daemon:   func(context.Context) (string, error) { return "", errors.New("connection refused") },
	}
	o.Firecracker = func(context.Context, bool) driver.Capability { return driver.Capability{Reason: "it can't boot"} }
	for _, ok := range []bool{true, false} {
		o.Probe = func(context.Context) driver.Capability {
			return driver.Capability{OK: ok, Reason: "tried", Hint: "mend it so"}
		}
		r := Run(t.Context(), o)
		if r.CanRun != ok {
			t.Errorf("probe %v: can run %v; checks %+v", ok, r.CanRun, r.Checks)
		}
		for _, c := range r.Checks {
			if c.Name == "" || c.Status == "" || c.Detail == "" {
				t.Errorf("a check that says nothing: %+v", c)
			}
		}
	}
}

// What can't be booted is not tried, and never means that nothing can run.
func TestFirecracker(t *testing.T) {
	var tried []bool
	says := driver.Capability{Reason: "Firecracker 1.15.1: it can't boot", Hint: "use another machine"}
	o := Options{
		Root: machine(t, nil), KVM: []string{"/bin/sh", "-c", "exit 3"},
		Firecracker: func(ctx context.Context, try bool) driver.Capability {
			if _, bounded := ctx.Deadline(); !bounded {
				t.Error("it has no deadline")
			}
			tried = append(tried, try)
			return says
		},
	}
	find := func() Check {
		t.Helper()
		for _, c := range Run(t.Context(), o).Checks {
			if c.Name == "firecracker" {
				return c
			}
		}
		t.Fatal("it was not looked at")
		return Check{}
	}
	if c := find(); c.Status != Warn || c.Detail != says.Reason || !strings.Contains(c.Mend, "use another machine") || !strings.Contains(c.Mend, "gVisor") {
		t.Errorf("%+v", c)
	}
	o.KVM = nil // nobody knows better
	says.OK = true
	if c := find(); c.Status != OK || c.Mend != "" || c.Detail != says.Reason {
		t.Errorf("%+v", c)
	}
	if len(tried) != 2 || tried[0] || !tried[1] {
		t.Errorf("tried: %v", tried)
	}
	o.Firecracker = nil
	if c := find(); c.Status != Warn || c.Mend == "" {
		t.Errorf("as a user: %+v", c)
	}
}
