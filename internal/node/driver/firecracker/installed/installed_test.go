package installed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/sandbox"
)

var ctx = context.Background()

func store(t testing.TB, state string) *Store {
	t.Helper()
	a, err := artifact.Open(filepath.Join(state, "artifacts"))
	if err != nil {
		t.Fatal(err)
	}
	return Open(state, a)
}

// script is a program that says its version as the real ones do; salt makes it
// another file.
func script(name, version, salt string) string {
	return fmt.Sprintf("#!/bin/sh\n# %s\n[ \"$*\" = --version ] || exit 9\nprintf '%s v%s\\n\\nmore\\n'\n", salt, name, version)
}

func putPair(t *testing.T, s *Store, version, salt string) PairRecord {
	t.Helper()
	r, err := s.PutPair(ctx, strings.NewReader(script("Firecracker", version, salt)), strings.NewReader(script("Jailer", version, salt)), PairOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func code(err error) string {
	if err == nil {
		return ""
	}
	return sandbox.AsError(err).Code
}

// tree is all that a state directory holds.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		fmt.Fprintln(&b, p, info.Mode(), info.ModTime().UnixNano())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestInstall(t *testing.T) {
	state := t.TempDir()
	s := store(t, state)
	if _, _, err := s.Current(); code(err) != "firecracker_missing" || !strings.Contains(err.Error(), "cloche firecracker install") {
		t.Errorf("nothing is installed: %v", err)
	}
	if all, err := s.Pairs(); err != nil || len(all) != 0 {
		t.Errorf("%v, %v", all, err)
	}
	one := putPair(t, s, "1.13.2", "a")
	if _, _, err := s.Current(); code(err) != "kernel_missing" || !strings.Contains(err.Error(), "cloche kernel install") {
		t.Errorf("no kernel is installed: %v", err)
	}
	if _, err := s.PutKernel(ctx, "6.1", strings.NewReader("image"), strings.NewReader("modules")); err != nil {
		t.Fatal(err)
	}
	p, k, err := s.Current()
	if err != nil || p.Version != "1.13.2" || p.Hash != one.Firecracker || k.Name != "6.1" {
		t.Fatalf("%+v, %+v, %v", p, k, err)
	}
	for path, want := range map[string]string{p.Firecracker: script("Firecracker", "1.13.2", "a"), p.Jailer: script("Jailer", "1.13.2", "a"), k.Image: "image", k.Modules: "modules"} {
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v", path, got, err)
		}
	}
	// The same again changes nothing.
	before := tree(t, state)
	if again := putPair(t, s, "1.13.2", "a"); again != one {
		t.Errorf("%+v, then %+v", one, again)
	}
	if _, err := s.PutKernel(ctx, "6.1", strings.NewReader("image"), strings.NewReader("modules")); err != nil {
		t.Fatal(err)
	}
	if after := tree(t, filepath.Join(state, "firecracker", "versions")); !strings.Contains(before, after) {
		t.Errorf("the same again wrote:\n%s", after)
	}
	// Others come beside it.
	two := putPair(t, s, "1.15.1", "a")
	if _, err := s.PutKernel(ctx, "6.1-mono", strings.NewReader("mono"), nil); err != nil {
		t.Fatal(err)
	}
	if p, k2, err := s.Current(); err != nil || p.Version != "1.15.1" || k2.Modules != "" || k2.Hash == k.Hash {
		t.Errorf("%+v, %+v, %v", p, k2, err)
	}
	for _, r := range []PairRecord{one, two} {
		if p, err := s.ByHash(r.Firecracker); err != nil || p.Version != r.Version {
			t.Errorf("ByHash(%s) = %+v, %v", r.Firecracker, p, err)
		}
	}
	if _, err := s.ByHash(strings.Repeat("0", 64)); code(err) != "firecracker_missing" {
		t.Error(err)
	}
	pairs, err := s.Pairs()
	kernels, err2 := s.Kernels()
	if err != nil || err2 != nil || len(pairs) != 2 || len(kernels) != 2 {
		t.Errorf("%v, %v, %v, %v", pairs, kernels, err, err2)
	}
	for _, r := range pairs {
		if r.Current != (r.Version == "1.15.1") {
			t.Errorf("%+v", r)
		}
	}
}

// Another build of a version leaves the one that snapshots may need.
func TestTwoBuildsOfAVersion(t *testing.T) {
	s := store(t, t.TempDir())
	at := time.Unix(1000, 0)
	s.now = func() time.Time { return at }
	var builds []PairRecord
	for _, salt := range []string{"a", "b", "a", "c"} {
		builds = append(builds, putPair(t, s, "1.13.2", salt))
		if sel, err := s.Selection(); err != nil || sel.Version != "1.13.2" {
			t.Errorf("%+v, %v", sel, err)
		}
		if p, err := s.pair("1.13.2"); err != nil || p.Hash != builds[len(builds)-1].Firecracker {
			t.Errorf("%+v, %v", p, err)
		}
		current := 0
		all, err := s.Pairs()
		for _, r := range all {
			if r.Current {
				current++
				if r.PairRecord != builds[len(builds)-1] {
					t.Errorf("%+v is the current one", r)
				}
			}
		}
		if err != nil || current != 1 {
			t.Errorf("%v, %v", all, err)
		}
	}
	for _, r := range builds {
		if p, err := s.ByHash(r.Firecracker); err != nil || p.Hash != r.Firecracker {
			t.Errorf("%+v, %v", p, err)
		}
	}
	if all, err := s.Pairs(); err != nil || len(all) != 3 {
		t.Errorf("%v, %v", all, err)
	}
}

func TestPutPairRefuses(t *testing.T) {
	state := t.TempDir()
	s := store(t, state)
	good := putPair(t, s, "1.13.2", "a")
	before := tree(t, state)
	f, j := script("Firecracker", "1.13.2", "a"), script("Jailer", "1.13.2", "a")
	for name, c := range map[string]struct {
		f, j string
		o    PairOptions
		code string
	}{
		"other versions": {script("Firecracker", "1.15.1", ""), j, PairOptions{}, "firecracker_mismatch"},
		"a hole":         {script("Firecracker", "1.12.1", ""), script("Jailer", "1.12.1", ""), PairOptions{}, "firecracker_vulnerable"},
		"hangs":          {script("Firecracker", "1.16.0", ""), script("Jailer", "1.16.0", ""), PairOptions{AllowVulnerable: true}, "firecracker_hangs"},
		"exchanged":      {j, f, PairOptions{}, "firecracker_version"},
		"not as named":   {f, j, PairOptions{Version: "1.15.1"}, "firecracker_version"},
		"no program":     {"hello", j, PairOptions{}, "firecracker_invalid"},
		"it fails":       {"#!/bin/sh\nexit 3\n", j, PairOptions{}, "firecracker_invalid"},
		"it says much":   {"#!/bin/sh\nhead -c 100000000 /dev/zero\n", j, PairOptions{}, "firecracker_version"},
	} {
		if _, err := s.PutPair(ctx, strings.NewReader(c.f), strings.NewReader(c.j), c.o); code(err) != c.code {
			t.Errorf("%s: %v", name, err)
		}
	}
	if p, err := s.ByHash(good.Firecracker); err != nil {
		t.Errorf("what was there is gone: %+v, %v", p, err)
	}
	if list, err := s.artifacts.List(); err != nil || len(list) != 2 {
		t.Errorf("left over: %v, %v\n%s", list, err, before)
	}
	if _, err := s.PutKernel(ctx, "../x", strings.NewReader("x"), nil); !sandbox.IsClass(err, sandbox.Invalid) {
		t.Error(err)
	}
	if _, err := s.put(ctx, "x", strings.NewReader("too long"), 3); !errors.Is(err, errTooLarge) {
		t.Error(err)
	}
	if _, err := s.PutPair(ctx, strings.NewReader(script("Firecracker", "1.12.1", "")), strings.NewReader(script("Jailer", "1.12.1", "")), PairOptions{AllowVulnerable: true}); err != nil {
		t.Errorf("allowed: %v", err)
	}
}

// A program that does not answer is ended, with all that it started.
func TestAskVersionEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "firecracker")
	pid := path + ".pid"
	if err := os.WriteFile(path, []byte("#!/bin/sh\nsleep 1000 & echo $! > "+pid+"; wait\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		for _, err := os.Stat(pid); err != nil; _, err = os.Stat(pid) {
			time.Sleep(time.Millisecond)
		}
	}()
	if _, err := AskVersion(short, path); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	b, err := os.ReadFile(pid)
	if err != nil {
		t.Fatal(err)
	}
	gone := func() bool {
		stat, err := os.ReadFile("/proc/" + strings.TrimSpace(string(b)) + "/stat")
		return err != nil || strings.Contains(string(stat), ") Z ")
	}
	for end := time.Now().Add(10 * time.Second); !gone(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("its child lives on")
		}
	}
}

func TestDamagedRecords(t *testing.T) {
	state := t.TempDir()
	s := store(t, state)
	other, r := putPair(t, s, "1.15.1", "b"), putPair(t, s, "1.13.2", "a")
	k, err := s.PutKernel(ctx, "6.1", strings.NewReader("image"), strings.NewReader("modules"))
	if err != nil {
		t.Fatal(err)
	}
	mend := func() {
		t.Helper()
		putPair(t, s, "1.13.2", "a")
		if _, err := s.PutKernel(ctx, "6.1", strings.NewReader("image"), strings.NewReader("modules")); err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.Current(); err != nil {
			t.Fatalf("an install did not mend it: %v", err)
		}
	}
	for _, file := range []string{s.currentFile(), s.pairFile("1.13.2"), s.kernelFile("6.1")} {
		for _, text := range []string{"", "{", `[]`, `{"version":"../x","kernel":"/","name":"x"}`, `{"version":"1.13.2","firecracker":"..","jailer":".."}`} {
			if file == s.currentFile() && strings.Contains(text, "jailer") {
				continue // which has all that a selection needs
			}
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := s.ByHash(other.Firecracker); err != nil {
				t.Errorf("%s with %q hides another: %v", filepath.Base(file), text, err)
			}
			if _, _, err := s.Current(); code(err) != "firecracker_record" || !strings.Contains(err.Error(), "install") {
				t.Errorf("%s with %q: %v", filepath.Base(file), text, err)
			}
			mend()
		}
		if file == s.currentFile() {
			continue
		}
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.Current(); code(err) != "firecracker_record" {
			t.Errorf("%s is gone: %v", filepath.Base(file), err)
		}
		mend()
	}
	for _, c := range [][3]string{{r.Firecracker, artifact.FirecrackerName, "firecracker"}, {r.Jailer, artifact.JailerName, "firecracker"}, {k.Vmlinux, artifact.VmlinuxName, "kernel"}, {k.Modules, artifact.ModulesName, "kernel"}} {
		a, err := s.artifacts.Get(c[0], c[1])
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(a.Path, []byte("evil"), 0o755); err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.Current(); code(err) != c[2]+"_missing" || !strings.Contains(err.Error(), "changed") {
			t.Errorf("a changed %s: %v", c[1], err)
		}
		mend()
		if err := s.artifacts.Remove(a); err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.Current(); code(err) != c[2]+"_missing" {
			t.Errorf("no %s: %v", c[1], err)
		}
		mend()
	}
}

func TestWork(t *testing.T) {
	s := store(t, t.TempDir())
	dir, done, err := s.Work(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Work(ctx); !sandbox.IsClass(err, sandbox.Conflict) {
		t.Errorf("two at once: %v", err)
	}
	done()
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	old := filepath.Join(s.dir, workPrefix+"old")
	if err := os.MkdirAll(filepath.Join(old, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, done, err = s.Work(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a killed install left: %v", err)
	}
}

// childState makes the test's binary install without end, to be killed.
const childState = "CLOCHE_TEST_INSTALL_IN"

func TestMain(m *testing.M) {
	state := os.Getenv(childState)
	if state == "" {
		os.Exit(m.Run())
	}
	a, err := artifact.Open(filepath.Join(state, "artifacts"))
	if err != nil {
		panic(err)
	}
	s := Open(state, a)
	for i := 0; ; i++ {
		v := []string{"1.13.2", "1.15.1"}[i%2]
		salt := fmt.Sprint(i % 5)
		if _, err := s.PutPair(ctx, strings.NewReader(script("Firecracker", v, salt)), strings.NewReader(script("Jailer", v, salt)), PairOptions{}); err != nil {
			panic(err)
		}
		if _, err := s.PutKernel(ctx, "6."+fmt.Sprint(i%3), strings.NewReader("image"+salt), strings.NewReader("modules"+salt)); err != nil {
			panic(err)
		}
		if i == 1 {
			fmt.Println("began")
		}
	}
}

// Killed at any point, an install leaves what was there before or what is there
// now.
func TestKilledInstall(t *testing.T) {
	state := t.TempDir()
	s := store(t, state)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 12 {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), childState+"="+state)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_, err = out.Read(make([]byte, 10))
		time.Sleep(time.Duration(i*7) * time.Millisecond)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if err != nil {
			t.Fatal(err)
		}
		p, k, err := s.Current()
		if err != nil {
			t.Fatalf("after kill %d: %v", i, err)
		}
		pairs, err := s.Pairs()
		if err != nil || len(pairs) == 0 {
			t.Fatalf("after kill %d: %v, %v", i, pairs, err)
		}
		for _, r := range pairs {
			if _, err := s.ByHash(r.Firecracker); err != nil {
				t.Errorf("after kill %d: %s: %v", i, r.Version, err)
			}
		}
		if out, err := exec.Command(p.Firecracker, "--version").Output(); err != nil || !strings.HasPrefix(string(out), "Firecracker v"+p.Version) {
			t.Errorf("after kill %d: %q, %v", i, out, err)
		}
		if b, err := os.ReadFile(k.Image); err != nil || !strings.HasPrefix(string(b), "image") {
			t.Errorf("after kill %d: %q, %v", i, b, err)
		}
	}
}

// TestRealPair takes the binaries in the directory that $CLOCHE_FIRECRACKER names.
func TestRealPair(t *testing.T) {
	dir := os.Getenv("CLOCHE_FIRECRACKER")
	if dir == "" {
		t.Skip("SKIP: no real Firecracker: $CLOCHE_FIRECRACKER names no directory with firecracker and jailer")
	}
	f, err := os.Open(filepath.Join(dir, "firecracker"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	j, err := os.Open(filepath.Join(dir, "jailer"))
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	r, err := store(t, t.TempDir()).PutPair(ctx, f, j, PairOptions{AllowVulnerable: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", r)
}
