// Command run runs Cloche's drivers and their real engines in L1, a machine with
// a working KVM and cgroup v2 (package nested): it gets the parts, builds what
// is put in, boots one L1 for each suite and passes on what the tests print.
// `make e2e-firecracker` calls it, from the root of the tree, through
// dist/testreport; with -json it prints the events of go test -json.
//
// Exit status: 0 all passed or was skipped with its reason; 1 tests failed, or
// something of ours could not be built; 3 nothing of that, but an L1 failed
// (ended without an EXIT line) and did so again when it was run once more.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/node/driver/drivertest"
	"cloche.dev/cloche/test/nested"
)

const (
	exitFailed         = 1
	exitUsage          = 2
	exitInfrastructure = 3
)

type options struct {
	part, run, only, cache, program, vmlinux string
	gvisor, json                             bool
	parallel                                 int
}

func main() {
	var o options
	flag.StringVar(&o.part, "part", "all", "`all` or ci, the part that CI runs")
	flag.StringVar(&o.run, "run", "", "a `regexp` of tests to run, in place of each suite's own choice")
	flag.StringVar(&o.only, "suite", "", "run only the suites whose names begin with that `regexp`")
	flag.BoolVar(&o.gvisor, "gvisor", true, "also run the gVisor driver's conformance there, over cgroup v2")
	flag.BoolVar(&o.json, "json", false, "print the events of go test -json instead of lines")
	flag.StringVar(&o.cache, "cache", "dist/nested", "`directory` of downloads, builds and logs")
	flag.StringVar(&o.program, "cloche", "bin/cloche", "the built `program`, for the suite that runs it whole")
	flag.StringVar(&o.vmlinux, "vmlinux", "", "a kernel `image` with all built in that a guest needs, which guests boot in place of the distribution's")
	flag.IntVar(&o.parallel, "parallel", min(2, runtime.NumCPU()), "how many L1 run at a time")
	only := flag.Bool("programs", false, "only get the real Firecracker and a kernel, and print the environment of tests that use them on this host")
	flag.Parse()
	if _, err := regexp.Compile(o.only); err != nil || flag.NArg() > 0 || o.part != "all" && o.part != "ci" {
		flag.Usage()
		os.Exit(exitUsage)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *only {
		if err := programs(ctx, os.Stdout, o.cache); err != nil {
			os.Exit(status([]error{err}))
		}
		return
	}
	r := &runner{o: o, out: &printer{w: os.Stdout, json: o.json}}
	os.Exit(status(r.all(ctx)))
}

// status prints what went wrong and returns the exit status for it.
func status(errs []error) (status int) {
	for _, err := range errs {
		fmt.Fprintln(os.Stderr, "nested:", err)
		switch {
		case !errors.Is(err, nested.ErrNoExit):
			status = exitFailed
		case status == 0:
			status = exitInfrastructure
		}
	}
	return status
}

// runner runs the suites.
type runner struct {
	o      options
	out    *printer
	tools  nested.Tools
	kernel *nested.Kernel
	debs   []string    // the packages that the kernel is of
	files  nested.Tree // what is in every L1
}

// all runs the suites that were asked for. Whatever can't be had skips the
// suites that need it.
func (r *runner) all(ctx context.Context) (errs []error) {
	began := time.Now()
	suites := r.choose()
	if len(suites) == 0 {
		return []error{errors.New("there is no such suite")}
	}
	suites, err := r.prepare(ctx, suites)
	if err != nil {
		return []error{err}
	}
	r.out.note("prepared in %v; %d suites, %d at a time", time.Since(began).Round(time.Second/10), len(suites), r.o.parallel)
	errs = make([]error, len(suites))
	free := make(chan struct{}, max(1, r.o.parallel))
	var wg sync.WaitGroup
	for i, s := range suites {
		free <- struct{}{} // they begin in order
		wg.Go(func() {
			defer func() { <-free }()
			errs[i] = r.suite(ctx, s)
		})
	}
	wg.Wait()
	return slices.DeleteFunc(errs, func(err error) bool { return err == nil })
}

// choose picks the suites, and what of them runs.
func (r *runner) choose() []nested.Suite {
	suites := nested.All()
	if r.o.part == "ci" {
		suites = nested.CI()
	}
	only := regexp.MustCompile("^(?:" + r.o.only + ")")
	var chosen []nested.Suite
	type tests struct {
		pkg    string
		faults bool
	}
	seen := map[tests]bool{}
	for _, s := range suites {
		if !only.MatchString(s.Name) || !r.o.gvisor && !s.Firecracker {
			continue
		}
		if r.o.run != "" {
			if seen[tests{s.Package, s.Faults}] {
				continue // it is one suite: the parts differ in what they run
			}
			s.Run, s.Skip = r.o.run, ""
			if !s.Faults { // else it has another title than the suite without them
				s.Part = ""
			}
		}
		seen[tests{s.Package, s.Faults}] = true
		chosen = append(chosen, s)
	}
	return chosen
}

// prepare gets the parts and builds. It returns the suites that can run.
func (r *runner) prepare(ctx context.Context, suites []nested.Suite) ([]nested.Suite, error) {
	var err error
	if r.tools, err = nested.FindTools(); err != nil {
		return r.skip(suites, err)
	}
	if err := os.MkdirAll(r.o.cache, 0o755); err != nil {
		return nil, err
	}
	if err := lock(r.o.cache); err != nil {
		return nil, err
	}
	log := filepath.Join(r.o.cache, "log")
	if err := errors.Join(os.RemoveAll(log), os.MkdirAll(log, 0o755)); err != nil {
		return nil, err
	}
	debs, err := nested.KernelPackages(ctx, r.o.cache)
	if err != nil {
		return r.skip(suites, err)
	}
	if r.kernel, err = nested.UnpackKernel(ctx, debs, filepath.Join(r.o.cache, "kernel")); err != nil {
		return nil, err
	}
	firecracker, err := nested.Firecracker(ctx, r.o.cache)
	if err != nil {
		var need, rest []nested.Suite
		for _, s := range suites {
			if s.Firecracker {
				need = append(need, s)
			} else {
				rest = append(rest, s)
			}
		}
		if _, err := r.skip(need, err); err != nil || len(rest) == 0 {
			return nil, err
		}
		suites, firecracker = rest, ""
	}
	prebuilt, guests := filepath.Join(r.o.cache, "prebuilt"), *r.kernel
	if r.o.vmlinux != "" {
		guests.Vmlinux, guests.Modules = r.o.vmlinux, ""
	}
	if err := nested.Prebuild(prebuilt, firecracker, &guests); err != nil {
		return nil, err
	}
	r.debs = debs
	r.describe(debs, prebuilt)
	r.files = nested.Tree{}
	err = errors.Join(r.files.AddDir(nested.Prebuilt, prebuilt), r.files.AddProgram("mkfs.ext4"), r.files.AddProgram("mkfs.erofs"))
	if _, statErr := os.Stat("/etc/mke2fs.conf"); statErr == nil {
		r.files["etc/mke2fs.conf"] = nested.Node{Host: "/etc/mke2fs.conf"}
	}
	built := map[string]bool{}
	for _, s := range suites {
		if !built[s.Package] {
			err = errors.Join(err, build(ctx, s, r.binary(s)))
		}
		built[s.Package] = true
		if s.Faults {
			err = errors.Join(err, drivertest.Build(r.faults(), "cmd/cloche", "clochefaults"))
		}
	}
	return suites, err
}

// lock keeps a second run out of the directory for as long as this process is.
func lock(dir string) error {
	fd, err := syscall.Open(filepath.Join(dir, "lock"), syscall.O_CREAT|syscall.O_RDWR|syscall.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	if err := syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("another run uses %s (-cache names another directory): %w", dir, err)
	}
	return nil
}

// skip tells that suites can't run here because err, a Missing, is missing;
// another error is one.
func (r *runner) skip(suites []nested.Suite, err error) ([]nested.Suite, error) {
	var missing *nested.Missing
	if !errors.As(err, &missing) {
		return nil, err
	}
	for _, s := range suites {
		r.out.skip(s, missing)
	}
	return nil, nil
}

// faults is where the build of cloche is that can be killed at its failpoints.
func (r *runner) faults() string { return filepath.Join(r.o.cache, "cloche-faults") }

// binary is where the tests of the suite's package are built.
func (r *runner) binary(s nested.Suite) string {
	return filepath.Join(r.o.cache, path.Base(s.Package)+".test")
}

func build(ctx context.Context, s nested.Suite, out string) error {
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-trimpath", "-ldflags=-s -w", "-o", out, s.Package)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if msg, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the tests of %s: %w: %s", s.Package, err, msg)
	}
	return nil
}

// describe prints what the run is made of, for whoever reads its log.
func (r *runner) describe(debs []string, prebuilt string) {
	version, _ := exec.Command(r.tools.QEMU, "--version").Output()
	first, _, _ := strings.Cut(string(version), "\n")
	r.out.note("%s", first)
	files := append([]string{r.kernel.Image}, debs...)
	entries, _ := os.ReadDir(prebuilt)
	for _, e := range entries {
		files = append(files, filepath.Join(prebuilt, e.Name()))
	}
	for _, f := range files {
		sum, err := nested.Sum(f)
		if err != nil {
			sum = err.Error()
		}
		r.out.note("%s %s", sum, filepath.Base(f))
	}
}
