package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/node/driver/firecracker/kernel"
)

func newKernel(a *app) *cobra.Command {
	cmd := group("kernel", "Install the kernel that Firecracker's machines boot")
	cmd.AddCommand(newKernelInstall(a), newKernelList(a))
	return cmd
}

type kernelFlags struct {
	packages      []string
	vmlinux, name string
}

func newKernelInstall(a *app) *cobra.Command {
	var f kernelFlags
	cmd := &cobra.Command{
		Use:   "install [flags]",
		Short: "Install a guest kernel on this host",
		Long: `Install the kernel that new machines boot, into the state directory of this host. The daemon may run meanwhile, and
machines that run keep theirs. Nothing is installed on the host itself.

Without a flag the distribution's own kernel for virtual machines is downloaded with apt, from the sources that this
host has, and checked against apt's signed index. --package takes a package that is here already (a .deb, or a directory
with the tree of one), --vmlinux an image with everything built in that a sandbox needs.`,
		Example: "  cloche kernel install\n  cloche kernel install --package linux-image-6.1.0-57-cloud-amd64.deb",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if b := []bool{len(f.packages) > 0, f.vmlinux != "", f.name != ""}; count(b) > 1 {
				return usage("--package, --vmlinux and --name exclude each other")
			}
			return a.install(cmd, "installing a kernel", func(ctx context.Context, in *installing) (func() error, error) {
				r, loads, err := installKernel(ctx, in, f)
				return func() error { return a.madeKernel(r, loads) }, err
			})
		},
	}
	fs := cmd.Flags()
	fs.StringArrayVar(&f.packages, "package", nil, "kernel package `FILE.deb`, or a directory with its tree (repeatable, where image and modules are apart)")
	fs.StringVar(&f.vmlinux, "vmlinux", "", "kernel image `FILE`, ELF or bzImage, that needs no modules")
	fs.StringVar(&f.name, "name", "", "`PACKAGE` to download, or the metapackage that depends on it (default "+strings.Join(kernel.Metapackages, ", else ")+")")
	return cmd
}

func count(all []bool) (n int) {
	for _, b := range all {
		if b {
			n++
		}
	}
	return n
}

// installing is one install that runs.
type installing struct {
	store *installed.Store
	dir   string // for its files; gone when it has ended
	show  *progress
}

// install runs one install on this host; what do returns says what was
// installed. Interrupted, it still removes what it began.
func (a *app) install(cmd *cobra.Command, step string, do func(context.Context, *installing) (func() error, error)) error {
	state, err := filepath.Abs(a.stateDir)
	if err != nil {
		return err
	}
	artifacts, err := artifact.Open(filepath.Join(state, "artifacts"))
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	in := &installing{store: installed.Open(state, artifacts)}
	dir, done, err := in.store.Work(ctx)
	if err != nil {
		return domain(err)
	}
	defer done()
	in.dir, in.show = dir, a.begin(step)
	say, err := do(ctx, in)
	in.show.end()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return domain(err)
	}
	return say()
}

func installKernel(ctx context.Context, in *installing, f kernelFlags) (r installed.KernelRecord, loads []string, err error) {
	sources := f.packages
	switch {
	case f.vmlinux != "":
		sources = []string{f.vmlinux}
	case len(sources) == 0:
		if sources, err = kernel.Download(ctx, f.name, in.dir, in.show.set); err != nil {
			return r, nil, err
		}
	}
	in.show.set("unpacking the kernel")
	files, err := kernel.Build(ctx, sources, in.dir)
	if err != nil {
		return r, nil, err
	}
	image, err := os.Open(files.Image)
	if err != nil {
		return r, nil, err
	}
	defer image.Close()
	var modules io.Reader
	if files.Modules != "" {
		m, err := os.Open(files.Modules)
		if err != nil {
			return r, nil, err
		}
		defer m.Close()
		modules = m
	}
	r, err = in.store.PutKernel(ctx, files.Name, image, modules)
	return r, files.Loads, err
}

// madeKernel says what kernel there is now.
func (a *app) madeKernel(r installed.KernelRecord, loads []string) error {
	if a.json {
		return a.printJSON(struct {
			installed.KernelRecord
			Loads []string `json:"loads"` // in the order of loading
		}{r, append([]string{}, loads...)})
	}
	modules := "none needed"
	if r.Modules != "" {
		modules = fmt.Sprintf("sha256:%s  %s", r.Modules, strings.Join(loads, " "))
	}
	_, err := fmt.Fprintf(a.out, "kernel %s\nvmlinux  sha256:%s\nmodules  %s\n", line(r.Name), r.Vmlinux, line(modules))
	return err
}

func newKernelList(a *app) *cobra.Command {
	return listInstalled(a, "List the kernels that are installed on this host", (*installed.Store).Kernels,
		[]string{"KERNEL", "CURRENT", "VMLINUX", "MODULES", "AGE"}, func(r installed.ListedKernel) []string {
			modules := "-"
			if r.Modules != "" {
				modules = short("sha256:" + r.Modules)
			}
			return []string{r.Name, currentMark(r.Current), short("sha256:" + r.Vmlinux), modules, age(r.InstalledAt)}
		})
}

// listInstalled is the command that lists what all finds on this host, a row each.
func listInstalled[T any](a *app, what string, all func(*installed.Store) ([]T, error), heads []string, row func(T) []string) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: what, Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			items, err := all(installed.Open(a.stateDir, nil))
			if err != nil {
				return domain(err)
			}
			if a.json {
				return a.printJSON(map[string]any{"items": items})
			}
			var rows [][]string
			for _, r := range items {
				rows = append(rows, row(r))
			}
			return a.table(heads, rows)
		},
	}
}

// currentMark says which of several is the current one.
func currentMark(current bool) string {
	if current {
		return "yes"
	}
	return "-"
}
