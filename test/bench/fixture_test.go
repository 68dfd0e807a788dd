package bench

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

const (
	treeDirs  = 100
	treeFiles = 100  // in each directory
	fileBytes = 1200 // about what a source file of a package has
)

// fixture is a daemon with one template, and the bare engine beside it.
type fixture struct {
	t    *testing.T
	d    *harness.Daemon
	c    *client.Client
	b    *bare
	work string // the command, on the host
	tree string // the template's small files, on the host
	dig  string // the template's digest
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	d := harness.New(t)
	d.Serve()
	c, err := client.New(client.Options{URL: d.URL, Key: d.Key})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	f := &fixture{t: t, d: d, c: c, work: filepath.Join(dir, "work"), tree: filepath.Join(dir, "tree")}
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", f.work, "./testdata/work")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the command: %v\n%s", err, out)
	}
	f.makeTree()
	tpl, err := c.ImportTemplate(context.Background(), f.tar(), api.RuntimeConfig{User: "root", Workdir: "/"}, "bench:latest")
	if err != nil {
		t.Fatalf("import the template: %v\n%s", err, d.Log())
	}
	f.dig = tpl.Digest
	image := filepath.Join(d.State, "templates", strings.TrimPrefix(tpl.Digest, "sha256:"), "image.erofs")
	f.b = newBare(t, d.State, image)
	return f
}

// content is a small file's, the same on every run.
func content(i int) []byte {
	line := fmt.Sprintf("file %d holds little, but there are many of it\n", i)
	return []byte(strings.Repeat(line, fileBytes/len(line)))
}

func (f *fixture) makeTree() {
	for d := range treeDirs {
		dir := filepath.Join(f.tree, fmt.Sprintf("d%02d", d))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			f.t.Fatal(err)
		}
		for i := range treeFiles {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%02d", i)), content(d*treeFiles+i), 0o644); err != nil {
				f.t.Fatal(err)
			}
		}
	}
}

// tar is the template: the command, the tree, and two accounts.
func (f *fixture) tar() *bytes.Buffer {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	add := func(name string, mode int64, data []byte) {
		h := &tar.Header{Name: name, Mode: mode, Size: int64(len(data)), ModTime: time.Unix(1700000000, 0), Typeflag: tar.TypeReg, Format: tar.FormatPAX}
		if strings.HasSuffix(name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			f.t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			f.t.Fatal(err)
		}
	}
	program, err := os.ReadFile(f.work)
	if err != nil {
		f.t.Fatal(err)
	}
	add("./", 0o755, nil)
	for _, dir := range []string{"bin/", "etc/", "root/", "tree/"} {
		add(dir, 0o755, nil)
	}
	add("tmp/", 0o1777, nil)
	add("gofer/", 0o755, nil)
	add("bin/work", 0o755, program)
	add("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/:/bin/sh\n"))
	add("etc/group", 0o644, []byte("root:x:0:\nuser:x:1000:\n"))
	for d := range treeDirs {
		add(fmt.Sprintf("tree/d%02d/", d), 0o755, nil)
		for i := range treeFiles {
			add(fmt.Sprintf("tree/d%02d/f%02d", d, i), 0o644, content(d*treeFiles+i))
		}
	}
	if err := w.Close(); err != nil {
		f.t.Fatal(err)
	}
	return &buf
}

// request is what every sandbox of the benchmarks is made from.
func (f *fixture) request() api.CreateSandboxRequest {
	return api.CreateSandboxRequest{
		Template: "bench:latest", Resources: api.ResourcesRequest{MilliCpu: milliCPU, MemoryMib: memoryMiB, DiskMib: diskMiB},
	}
}

// sandboxes makes n sandboxes that are deleted when the test ends.
func (f *fixture) sandboxes(t *testing.T, n int) []string {
	t.Helper()
	ids := make([]string, n)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			s, err := f.c.CreateAndWait(context.Background(), f.request(), nil)
			if err != nil {
				t.Errorf("create: %v", err)
			}
			ids[i] = s.Id
		})
	}
	wg.Wait()
	t.Cleanup(func() { f.remove(t, ids) })
	if t.Failed() {
		t.FailNow()
	}
	return ids
}

func (f *fixture) remove(t *testing.T, ids []string) {
	var wg sync.WaitGroup
	for _, id := range ids {
		if id == "" {
			continue
		}
		wg.Go(func() {
			op, err := f.c.DeleteSandbox(context.Background(), id)
			if err == nil {
				_, err = f.c.Wait(context.Background(), op.Id, nil)
			}
			if err != nil {
				t.Errorf("delete %s: %v", id, err)
			}
		})
	}
	wg.Wait()
}

// bares makes n bare machines that are discarded when the test ends.
func (f *fixture) bares(t *testing.T, n int, create func(context.Context) (*box, error)) []*box {
	t.Helper()
	boxes := make([]*box, n)
	var wg sync.WaitGroup
	for i := range boxes {
		wg.Go(func() {
			x, err := create(context.Background())
			if err != nil {
				t.Errorf("create a bare machine: %v", err)
			}
			boxes[i] = x
		})
	}
	wg.Wait()
	t.Cleanup(func() { discardAll(boxes) })
	if t.Failed() {
		t.FailNow()
	}
	return boxes
}

func discardAll(boxes []*box) {
	var wg sync.WaitGroup
	for _, x := range boxes {
		if x != nil && !x.gone {
			wg.Go(x.discard)
		}
	}
	wg.Wait()
}

// must runs a command in a bare machine and demands exit code 0.
func (x *box) must(t *testing.T, args ...string) outcome {
	t.Helper()
	out, err := x.run(context.Background(), args...)
	if err != nil || out.code != 0 {
		t.Fatalf("%v in a bare machine: exit code %d, %v, %s", args, out.code, err, out.stderr)
	}
	return out
}

// exec runs a command in a sandbox and demands exit code 0.
func (f *fixture) exec(t *testing.T, id string, args ...string) api.ExecResult {
	t.Helper()
	r, err := f.c.Exec(context.Background(), id, api.ExecRequest{Args: args})
	if err != nil || r.Exit == nil || r.Exit.Code != 0 {
		t.Fatalf("%v: %+v, %v", args, r, err)
	}
	return r
}

// inside is what a command said it took, in milliseconds.
func inside(t *testing.T, stderr []byte) float64 {
	t.Helper()
	ns, err := strconv.ParseInt(strings.TrimSpace(string(stderr)), 10, 64)
	if err != nil {
		t.Fatalf("the command's own time: %v", err)
	}
	return float64(ns) / 1e6
}

// ms is the time since start in milliseconds.
func ms(start time.Time) float64 { return float64(time.Since(start).Microseconds()) / 1000 }
