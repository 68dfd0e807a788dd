package firecracker

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker/jail"
	"cloche.dev/cloche/internal/sandbox"
)

// What the installed unit sets holds for all tests of the package: another user's
// process depends on the files that we make, so that no mode may be left to it.
func init() { syscall.Umask(0o077) }

// jailRoot is a machine's jail as the host sees it.
func (f *fixture) jailRoot(m *machine) string { return filepath.Dir(m.jail.Socket()) }

// status reads a field of /proc/PID/status.
func status(t testing.TB, path, field string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.Join(strings.Fields(rest), " ")
		}
	}
	t.Fatalf("%s has no %s", path, field)
	return ""
}

// TestJail looks at the process of a machine and at what it can see.
func TestJail(t *testing.T) {
	f := newFixture(t)
	// A descriptor that a careless library has left without O_CLOEXEC.
	marker := filepath.Join(t.TempDir(), "marker")
	if err := os.WriteFile(marker, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := syscall.Open(marker, syscall.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)

	m := f.create()
	y := f.restore(f.snapshot(m, sandbox.SnapshotMemory))
	y.share() // else a little later
	for _, x := range []*machine{m, y} {
		f.confined(x)
		f.sees(x)
		f.limited(x)
		for _, to := range openFiles(x) {
			if strings.Contains(to, marker) {
				t.Errorf("it has %s open", to)
			}
		}
	}
}

func (f *fixture) confined(m *machine) {
	f.t.Helper()
	rec := m.record()
	proc := fmt.Sprintf("/proc/%d", rec.Process.PID)
	uid := strconv.Itoa(rec.UID)
	if rec.UID < jail.FirstUID || rec.UID >= jail.FirstUID+jail.UIDs {
		f.t.Errorf("its user is %d", rec.UID)
	}
	threads, err := filepath.Glob(proc + "/task/*/status")
	if err != nil || len(threads) < 3 {
		f.t.Fatalf("its threads: %v, %v", threads, err)
	}
	for _, th := range threads {
		for field, want := range map[string]string{
			"Uid": strings.TrimSpace(strings.Repeat(uid+" ", 4)), "Gid": strings.TrimSpace(strings.Repeat(uid+" ", 4)), "Groups": "",
			"CapEff": "0000000000000000", "CapPrm": "0000000000000000", "CapInh": "0000000000000000", "CapAmb": "0000000000000000",
			"NoNewPrivs": "1", "Seccomp": "2",
		} {
			if got := status(f.t, th, field); got != want {
				f.t.Errorf("%s: %s is %q, not %q", th, field, got, want)
			}
		}
	}
	if ids := strings.Fields(status(f.t, proc+"/status", "NSpid")); len(ids) != 2 || ids[1] != "1" {
		f.t.Errorf("its pids are %v: it is not the first of its namespace", ids)
	}
	ns, err := os.Stat(proc + "/ns/net")
	if err != nil {
		f.t.Fatal(err)
	}
	own, err := os.Stat(filepath.Join(f.dir, "net", m.ID()))
	if err != nil {
		f.t.Fatal(err)
	}
	if !os.SameFile(ns, own) {
		f.t.Error("it is in another network namespace")
	}
	if sid, err := os.ReadFile(proc + "/stat"); err != nil || strings.Fields(string(sid[strings.LastIndexByte(string(sid), ')')+1:]))[3] == strconv.Itoa(os.Getpid()) {
		f.t.Errorf("it is in the session of the test: %v", err)
	}
}

// sees looks at all files in the jail.
func (f *fixture) sees(m *machine) {
	f.t.Helper()
	rec := m.record()
	type file struct {
		mode fs.FileMode
		uid  int
	}
	seen := map[string]file{}
	root := fmt.Sprintf("/proc/%d/root", rec.Process.PID)
	err := filepath.WalkDir(root+"/", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := os.Lstat(path)
		if err != nil {
			return err
		}
		seen[strings.TrimPrefix(path, root)] = file{st.Mode(), int(st.Sys().(*syscall.Stat_t).Uid)}
		return nil
	})
	if err != nil {
		f.t.Fatal(err)
	}
	template := file{mode: 0o444}
	if st, err := os.Stat(f.image); err != nil {
		f.t.Fatal(err)
	} else if st.Mode().Perm()&0o004 != 0 {
		template.mode = st.Mode() // it is the very file
	}
	want := map[string]file{
		"/": {fs.ModeDir | 0o755, 0}, "/template": template, "/disk": {0o600, rec.UID},
		"/v.sock_1024": {fs.ModeSocket | 0o600, rec.UID},
	}
	for name, w := range want {
		if seen[name] != w {
			f.t.Errorf("%s is %v, not %v", name, seen[name], w)
		}
		delete(seen, name)
	}
	// What the VMM makes, whose modes are its own.
	made := []string{"/api.sock", "/v.sock"}
	for name, file := range seen {
		if !slices.Contains(made, name) {
			f.t.Errorf("it sees %s, which is %v", name, file)
		}
		if file.uid != rec.UID && file.mode.Perm()&0o022 != 0 {
			f.t.Errorf("%s is %v: it can be written to", name, file)
		}
	}
}

func (f *fixture) limited(m *machine) {
	f.t.Helper()
	rec := m.record()
	proc := fmt.Sprintf("/proc/%d", rec.Process.PID)
	groups, err := os.ReadFile(proc + "/cgroup")
	if err != nil {
		f.t.Fatal(err)
	}
	path := f.d.parent + "/" + jail.NameOf(m.ID())
	memory := strconv.FormatInt(int64(f.memory)<<20+overhead(int64(f.memory)<<20), 10)
	files := map[string]string{
		"memory/" + path + "/memory.limit_in_bytes": memory, "pids/" + path + "/pids.max": "17",
		"cpu/" + path + "/cpu.cfs_quota_us": "30000", "cpu/" + path + "/cpu.cfs_period_us": "100000",
	}
	lines := 4 // memory, pids, cpu, cpuacct
	if f.d.tree.Version() == 2 {
		files = map[string]string{path + "/memory.max": memory, path + "/pids.max": "17", path + "/cpu.max": "30000 100000"}
		lines = 1
	}
	for file, want := range map[string]string{"memory/" + path + "/memory.memsw.limit_in_bytes": memory, path + "/memory.swap.max": "0"} {
		if _, err := os.Stat("/sys/fs/cgroup/" + file); err == nil { // not every kernel counts swap
			files[file] = want
		}
	}
	if n := strings.Count(string(groups), ":"+path+"\n"); n < lines && n != 3 { // cpu and cpuacct may be one
		f.t.Errorf("it is in these control groups: %s", groups)
	}
	for name, want := range files {
		got, err := os.ReadFile("/sys/fs/cgroup/" + name)
		if err != nil || strings.TrimSpace(string(got)) != want {
			f.t.Errorf("%s is %q, not %q (%v)", name, got, want, err)
		}
	}
	limits, err := os.ReadFile(proc + "/limits")
	if err != nil {
		f.t.Fatal(err)
	}
	size := (f.memory + 1) << 20
	for _, want := range []string{fmt.Sprintf("Max file size %d %d bytes", size, size), "Max open files 2048 2048 files"} {
		found := false
		for line := range strings.Lines(string(limits)) {
			found = found || strings.Join(strings.Fields(line), " ") == want
		}
		if !found {
			f.t.Errorf("its limits lack %q", want)
		}
	}
}

// quota is what a machine's control group says of its share.
func (f *fixture) quota(m *machine) string {
	f.t.Helper()
	file := "cpu" + f.d.parent + "/" + jail.NameOf(m.ID()) + "/cpu.cfs_quota_us"
	if f.d.tree.Version() == 2 {
		file = f.d.parent + "/" + jail.NameOf(m.ID()) + "/cpu.max"
	}
	text, err := os.ReadFile("/sys/fs/cgroup/" + file)
	if err != nil {
		f.t.Fatal(err)
	}
	return strings.Fields(string(text))[0]
}

// TestARestoredMachineGetsItsShare when its agent has dialled, when it has not for
// some time, and when it is adopted.
func TestARestoredMachineGetsItsShare(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	image := f.snapshot(m, sandbox.SnapshotMemory)
	f.rest(m)
	const whole, share = "200000", "30000"
	check := func(what string, m *machine, want string) {
		t.Helper()
		if got := f.quota(m); got != want {
			t.Errorf("%s its quota is %s, not %s", what, got, want)
		}
	}
	f.d.test.at = func(step string) {
		if step == "make.loaded" {
			for _, id := range f.ids {
				if m := f.d.machines[id]; m != nil && id != f.ids[0] {
					check("when it is loaded", m, whole)
				}
			}
		}
	}
	y := f.restore(image)
	f.d.test.at = nil
	f.rest(y) // else its agent dials
	f.dials(y)
	for until := time.Now().Add(lendFor / 2); f.quota(y) == whole && time.Now().Before(until); {
		time.Sleep(time.Millisecond)
	}
	check("after it was dialled", y, share)
	z := f.restore(image)
	f.rest(z)
	z.share()
	check("after its time", z, share)
	z.share()
	x := f.restore(image)
	f.rest(x)
	f.restart()
	check("after the daemon ended", x, share)
	x = f.adopt(x.ID())
	check("adopted", x, share)
	if err := x.jail.Group().SetCPU(2000); err != nil {
		t.Fatal(err)
	}
	f.d.machines = map[string]*machine{} // as if the daemon had been killed
	x = f.adopt(x.ID())
	check("adopted after a kill", x, share)
}

// TestNoFileIsMadeForASnapshot looks at the room that a VMM has written it into.
func TestNoFileIsMadeForASnapshot(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	f.d.test.at = func(step string) {
		if step != "snapshot.saved" {
			return
		}
		f.d.test.at = nil
		dir := filepath.Join(f.jailRoot(m), roomName)
		st, err := os.Stat(dir)
		if err != nil {
			t.Error(err)
			return
		}
		if uid := st.Sys().(*syscall.Stat_t).Uid; uid != 0 || st.Mode() != fs.ModeDir|0o755 {
			t.Errorf("it is %v of %d", st.Mode(), uid)
		}
	}
	f.snapshot(m, sandbox.SnapshotMemory)
	if f.d.test.at != nil {
		t.Error("it was never saved")
	}
}

func openFiles(m *machine) []string {
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", m.record().Process.PID)) // the pattern is well-formed
	var targets []string
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil {
			targets = append(targets, to)
		}
	}
	return targets
}

// apart finds what two machines have in common that they must not have, and
// what one's user may do to the other's files.
func (f *fixture) apart(a, b *machine) (wrong []string) {
	ra, rb := a.record(), b.record()
	if ra.UID == rb.UID {
		wrong = append(wrong, "both have the same user")
	}
	for _, name := range []string{"ns/net", "ns/pid", "ns/mnt"} {
		one, err1 := os.Readlink(fmt.Sprintf("/proc/%d/%s", ra.Process.PID, name))
		two, err2 := os.Readlink(fmt.Sprintf("/proc/%d/%s", rb.Process.PID, name))
		if err1 != nil || err2 != nil || one == two {
			wrong = append(wrong, fmt.Sprintf("%s: %s, %s, %v, %v", name, one, two, err1, err2))
		}
	}
	for _, path := range []string{
		filepath.Join(f.jailRoot(b), diskName), filepath.Join(f.jailRoot(b), "v.sock_1024"), filepath.Join(f.d.machineDir(b.ID()), recordName),
	} {
		st, err := os.Stat(path)
		if err != nil {
			wrong = append(wrong, err.Error())
			continue
		}
		if uid := int(st.Sys().(*syscall.Stat_t).Uid); uid == ra.UID || st.Mode().Perm()&0o077 != 0 {
			wrong = append(wrong, fmt.Sprintf("%s is %v of %d: the other may use it", path, st.Mode(), uid))
		}
	}
	return wrong
}

// TestJailsAreApart compares two machines, and two that a broken driver made.
func TestJailsAreApart(t *testing.T) {
	f := newFixture(t)
	a, b := f.create(), f.create()
	if wrong := f.apart(a, b); len(wrong) > 0 {
		t.Errorf("they are not apart: %q", wrong)
	}
	if err := a.Kill(f.ctx()); err != nil {
		t.Fatal(err)
	}
	f.alive(b)
	f.d.test.sameUser = true
	c, d := f.create(), f.create()
	wrong := f.apart(c, d)
	if len(wrong) == 0 {
		t.Error("a driver that gives all jails one user is not noticed")
	}
	t.Logf("a broken driver is caught: %q", wrong)
}

// dials dials a machine's listener as its VMM does, by the name in the jail.
func (f *fixture) dials(m *machine) {
	f.t.Helper()
	l, err := m.Guest()
	if err != nil {
		f.t.Fatal(err)
	}
	if again, err := m.Guest(); err != nil || again != l {
		f.t.Errorf("a second listener: %v, %v", again, err)
	}
	root, err := os.Open(f.jailRoot(m))
	if err != nil {
		f.t.Fatal(err)
	}
	defer root.Close()
	conn, err := net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/%s", root.Fd(), agentName))
	if err != nil {
		f.t.Fatalf("dial: %v", err)
	}
	defer conn.Close()
	_ = l.(*driver.GuestListener).Listener.(*agentListener).SetDeadline(time.Now().Add(5 * time.Second))
	got, err := l.Accept()
	if err != nil {
		f.t.Fatalf("accept: %v", err)
	}
	_ = got.Close()
	_ = l.(*driver.GuestListener).Listener.(*agentListener).SetDeadline(time.Time{})
}

// TestGuest listens where the VMM dials, again after a close and a restart.
func TestGuest(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	f.dials(m)
	l, err := m.Guest()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Accept(); err == nil {
		t.Error("a closed listener accepts")
	}
	f.dials(m)
	f.restart()
	m = f.adopt(m.ID())
	f.dials(m)
	f.dials(f.restore(f.snapshot(m, sandbox.SnapshotMemory)))
	if err := f.d.Discard(f.ctx(), m.ID()); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Guest(); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("Guest of what was discarded = %v", err)
	}
	if _, err := m.Stats(f.ctx()); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("Stats of what was discarded = %v", err)
	}
	f.nothingLeft(m.ID())
}

// TestDescriptorsReturn makes and discards machines, and counts.
func TestDescriptorsReturn(t *testing.T) {
	f := newFixture(t)
	count := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	round := func() {
		m := f.create()
		y := f.restore(f.snapshot(m, sandbox.SnapshotMemory))
		for _, x := range []*machine{m, y} {
			if err := f.d.Discard(f.ctx(), x.ID()); err != nil {
				t.Fatal(err)
			}
		}
	}
	round()
	before := count()
	round()
	round()
	for until := time.Now().Add(3 * time.Second); count() > before && time.Now().Before(until); {
		time.Sleep(time.Millisecond)
	}
	if after := count(); after > before {
		t.Errorf("%d descriptors were open, %d are", before, after)
	}
}
