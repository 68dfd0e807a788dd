package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// needed are the controllers by which sandboxes are bounded.
var needed = []string{"cpu", "memory", "pids"}

// checkCgroups finds where the controllers are and tries to make a group.
func checkCgroups(_ context.Context, o Options) Check {
	info, err := o.read("proc/self/mountinfo")
	if err != nil {
		return Check{Status: Fail, Detail: err.Error(), Mend: "mount /proc"}
	}
	where, unified := cgroupMounts(info)
	if unified != "" {
		have, _ := o.read(filepath.Join(unified, "cgroup.controllers"))
		for _, c := range strings.Fields(have) {
			if where[c] == "" {
				where[c] = unified
			}
		}
	}
	var missing []string
	dirs := map[string]bool{}
	for _, c := range needed {
		if where[c] == "" {
			missing = append(missing, c)
			continue
		}
		dirs[where[c]] = true
	}
	version := "v2"
	if where["memory"] != unified {
		version = "v1"
	}
	if len(missing) > 0 {
		return Check{
			Status: Fail, Detail: "controllers that can't be found: " + strings.Join(missing, ", "),
			Mend: "mount the cgroup filesystem (`mount -t cgroup2 none /sys/fs/cgroup`), or boot with cgroup_enable=memory",
		}
	}
	if err := o.tryGroups(dirs); err != nil {
		return Check{Status: Fail, Detail: err.Error(), Mend: "run as root; in a container, mount /sys/fs/cgroup writable"}
	}
	return Check{Status: OK, Detail: fmt.Sprintf("%s with %s, writable", version, strings.Join(needed, ", "))}
}

// tryGroups makes and removes a group in each directory.
func (o Options) tryGroups(dirs map[string]bool) error {
	if o.Root != "" {
		return nil
	}
	for dir := range dirs {
		group := filepath.Join(dir, fmt.Sprintf("cloche-doctor-%d", os.Getpid()))
		if err := os.Mkdir(group, 0o755); err != nil {
			return err
		}
		if err := os.Remove(group); err != nil {
			return err
		}
	}
	return nil
}

// cgroupMounts returns the directory of each v1 controller and the v2
// hierarchy's, from the text of mountinfo(5).
func cgroupMounts(info string) (v1 map[string]string, v2 string) {
	v1 = map[string]string{}
	for line := range strings.Lines(info) {
		before, after, ok := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		switch right[0] {
		case "cgroup2":
			if v2 == "" {
				v2 = left[4]
			}
		case "cgroup":
			for _, opt := range strings.Split(right[2], ",") {
				if slices.Contains(needed, opt) {
					v1[opt] = left[4]
				}
			}
		}
	}
	return v1, v2
}

// checkUserNamespaces matters to Debian builds alone, which run without root.
func checkUserNamespaces(_ context.Context, o Options) Check {
	mend := "needed for `cloche template build` from Debian packages only"
	if o.number("proc/sys/user/max_user_namespaces") == 0 {
		return Check{Status: Warn, Detail: "user.max_user_namespaces is 0", Mend: "sysctl -w user.max_user_namespaces=10000; " + mend}
	}
	if o.number("proc/sys/kernel/unprivileged_userns_clone") == 0 {
		return Check{Status: Warn, Detail: "kernel.unprivileged_userns_clone is 0", Mend: "sysctl -w kernel.unprivileged_userns_clone=1; " + mend}
	}
	if o.number("proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1 {
		return Check{Status: Warn, Detail: "AppArmor restricts them", Mend: "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; " + mend}
	}
	return Check{Status: OK, Detail: "allowed"}
}

// checkTools looks for what builds Debian templates.
func checkTools(_ context.Context, o Options) Check {
	var missing []string
	for _, t := range []struct{ program, pkg string }{{"mmdebstrap", "mmdebstrap"}, {"newuidmap", "uidmap"}} {
		if _, err := o.LookPath(t.program); err != nil {
			missing = append(missing, t.pkg)
		}
	}
	if len(missing) > 0 {
		return Check{
			Status: Warn, Detail: "missing: " + strings.Join(missing, ", ") + "; templates can be made from a tar, but not from Debian packages",
			Mend: "apt-get install " + strings.Join(missing, " "),
		}
	}
	return Check{Status: OK, Detail: "mmdebstrap and newuidmap are here"}
}

// checkSources looks for the machine's own apt sources, from which Debian
// templates are built.
func checkSources(_ context.Context, o Options) Check {
	files := []string{"etc/apt/sources.list"}
	dir, _ := os.ReadDir(filepath.Join(o.Root+"/", "etc/apt/sources.list.d"))
	for _, e := range dir {
		if ext := filepath.Ext(e.Name()); ext == ".list" || ext == ".sources" {
			files = append(files, "etc/apt/sources.list.d/"+e.Name())
		}
	}
	n := 0
	for _, f := range files {
		s, err := o.read(f)
		if err != nil {
			continue
		}
		for line := range strings.Lines(s) {
			line = strings.TrimSpace(line)
			if strings.HasPrefix(line, "deb ") || strings.HasPrefix(line, "deb\t") || strings.HasPrefix(line, "URIs:") {
				n++
			}
		}
	}
	if n == 0 {
		return Check{
			Status: Warn, Detail: "no apt source is set up; templates can be made from a tar, but not from Debian packages",
			Mend: "write /etc/apt/sources.list (a Debian or Ubuntu machine has one)",
		}
	}
	return Check{Status: OK, Detail: fmt.Sprintf("%d apt sources", n)}
}
