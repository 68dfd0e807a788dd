package agent_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/guestlink"
)

// privateDirs are what a private guest has of its own, besides /proc and /run.
var privateDirs = []string{"/etc", "/var/lib/dbus"}

// enterPrivate makes this process, the first of its namespaces, see the
// directories below root in place of the host's.
func enterPrivate(root string) error {
	if root == "" {
		return nil
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	if err := unix.Mount("run", "/run", "tmpfs", 0, ""); err != nil {
		return err
	}
	for _, dir := range privateDirs {
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		if err := unix.Mount(root+dir, dir, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return nil
}

// newPrivateGuest starts a guest that may name itself without naming this
// host: its supervisor is PID 1 of namespaces of its own. files is what /etc
// and /var/lib/dbus hold.
func newPrivateGuest(t *testing.T, files map[string]string) *guest {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: namespaces need root")
	}
	g := &guest{t: t, root: t.TempDir()}
	for _, dir := range privateDirs {
		if err := os.MkdirAll(g.root+dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	base := map[string]string{"/etc/passwd": "root:x:0:0:root:/root:/bin/sh\n", "/etc/hosts": "127.0.0.1 localhost\n"}
	for name, content := range base {
		g.put(name, content, 0o644)
	}
	for name, content := range files {
		mode := os.FileMode(0o644)
		if strings.HasPrefix(content, "#!") {
			mode = 0o755
		}
		g.put(name, content, mode)
	}
	g.startProcess()
	return g
}

// put writes a file of a private guest from outside.
func (g *guest) put(name, content string, mode os.FileMode) {
	g.t.Helper()
	path := filepath.Join(g.root, name)
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path, []byte(content), mode)
	}
	if err == nil {
		err = os.Chmod(path, mode)
	}
	if err != nil {
		g.t.Fatal(err)
	}
}

// connect links to the guest as a node does to a machine of one epoch, and
// returns the first answer to its setup.
func (g *guest) connect(cfg guestlink.Config) *guestv1.SetupResponse {
	g.t.Helper()
	if g.link != nil {
		g.link.Close()
	}
	answers := make(chan *guestv1.SetupResponse, 16)
	cfg.Listen, cfg.SetUp = g.listen, func(r *guestv1.SetupResponse) { answers <- r }
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	g.link = guestlink.Start(cfg)
	g.t.Cleanup(g.link.Close)
	var err error
	if g.c, err = g.link.Client(g.ctx(60 * time.Second)); err != nil {
		g.t.Fatal(err)
	}
	return <-answers
}

const (
	idA, idB     = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"
	bootA, bootB = "00000000-1111-4222-8333-444444444444", "55555555-6666-4777-8888-999999999999"
)

// TestIdentity: what a guest is told to be is what its processes see, once and
// again after a restore, and what it was before is nowhere left.
func TestIdentity(t *testing.T) {
	g := newPrivateGuest(t, map[string]string{"/var/lib/dbus/machine-id": "old\n"})
	key := guestapi.NewKey()
	g.connect(guestlink.Config{Key: key, Epoch: 3, Setup: &guestv1.SetupRequest{
		Hostname: "first", MachineId: idA, BootId: bootA, Generation: 3, Env: map[string]string{"SECRET": "one", "OLD": "x"},
	}})
	show := "cat /etc/machine-id /var/lib/dbus/machine-id /proc/sys/kernel/random/boot_id /run/cloche/generation; hostname; stat -c %a /etc/machine-id; echo ${SECRET}-${OLD}-; grep -c boot_id /proc/self/mountinfo"
	want := func(id, boot, generation, host, env string) {
		t.Helper()
		lines := []string{id, id, boot, generation, host, "444", env, "1", ""}
		if r := g.run(show); r.out.String() != strings.Join(lines, "\n") || r.err.Len() > 0 {
			t.Fatalf("%s %s", &r.out, &r.err)
		}
	}
	want(idA, bootA, "3", "first", "one-x-")
	// The same again changes no file.
	before := g.run("stat -c '%i %z' /etc/machine-id /run/cloche/generation /run/cloche/boot_id").out.String()
	g.killAgent()
	eventually(t, func() bool { n, _ := g.link.Generation(); return n > 1 && g.link.Live() })
	if after := g.run("stat -c '%i %z' /etc/machine-id /run/cloche/generation /run/cloche/boot_id").out.String(); after != before || before == "" {
		t.Errorf("%q became %q", before, after)
	}

	next := guestapi.NewKey()
	g.connect(guestlink.Config{Key: next, Former: key, Epoch: 9, Setup: &guestv1.SetupRequest{
		Hostname: "second", MachineId: idB, BootId: bootB, Generation: 9, Restored: true, Env: map[string]string{"SECRET": "two"},
	}})
	want(idB, bootB, "9", "second", "two--")
	// The key of the image is of no more use, also to an agent that starts anew.
	g.killAgent()
	g.connect(guestlink.Config{Key: next, Welcomed: true, Epoch: 9, Setup: &guestv1.SetupRequest{Generation: 9, Restored: true}})
	want(idB, bootB, "9", "second", "--")
}

// TestWatchers: whoever is woken by the generation file finds the rest done.
func TestWatchers(t *testing.T) {
	g := newPrivateGuest(t, nil)
	key := guestapi.NewKey()
	g.connect(guestlink.Config{Key: key, Epoch: 1, Setup: &guestv1.SetupRequest{Hostname: "first", MachineId: idA, BootId: bootA, Generation: 1}})
	ses := g.sh("echo ready; while [ $(cat /run/cloche/generation) = 1 ]; do :; done; cat /run/cloche/generation /etc/machine-id /proc/sys/kernel/random/boot_id; hostname")
	if _, err := g.link.Client(g.ctx(time.Second)); err != nil {
		t.Fatal(err)
	}
	g.connect(guestlink.Config{Key: guestapi.NewKey(), Former: key, Epoch: 2, Setup: &guestv1.SetupRequest{
		Hostname: "second", MachineId: idB, BootId: bootB, Generation: 2, Restored: true,
	}})
	if r := g.follow(ses, nil); r.out.String() != "ready\n2\n"+idB+"\n"+bootB+"\nsecond\n" {
		t.Errorf("%s %s", &r.out, &r.err)
	}
}

func TestBadIdentity(t *testing.T) {
	g := newPrivateGuest(t, nil)
	g.connect(guestlink.Config{Key: guestapi.NewKey(), Epoch: 1, Setup: &guestv1.SetupRequest{}})
	for _, m := range []*guestv1.SetupRequest{
		{MachineId: "x"}, {MachineId: idA + "\n"}, {BootId: "../../etc/passwd"}, {Hostname: "a/b"}, {Source: "a\x00b"}, {Env: map[string]string{"": "x"}},
	} {
		if _, err := g.c.Setup(t.Context(), request(m)); code(err) != "invalid_argument" {
			t.Errorf("%v: %v", m, err)
		}
	}
}
