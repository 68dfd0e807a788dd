package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
)

func newFirecracker(a *app) *cobra.Command {
	cmd := group("firecracker", "Install Firecracker, which runs machines on hosts with KVM")
	cmd.AddCommand(newFirecrackerInstall(a), newFirecrackerList(a))
	return cmd
}

type firecrackerFlags struct {
	firecracker, jailer, archive, sha256 string
	path, vulnerable                     bool
}

func newFirecrackerInstall(a *app) *cobra.Command {
	var f firecrackerFlags
	cmd := &cobra.Command{
		Use:   "install (--firecracker FILE --jailer FILE | --archive URL-OR-FILE --sha256 HEX | --path) [flags]",
		Short: "Install a pair of firecracker and jailer on this host",
		Long: `Install firecracker and its jailer, which new machines will run in, into the state directory of this host. The daemon
may run meanwhile; machines that run keep theirs, and snapshots are restored by the version that made them. Both are
run once with --version: they must be of one release, and of none that is known to hang or to have a hole.

They come from two files, from an upstream release archive (release-vVERSION-ARCH.tgz; a URL needs --sha256), or from
where the shell would find them (--path).`,
		Example: "  cloche firecracker install --archive release-v1.15.1-x86_64.tgz\n  cloche firecracker install --path",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			if f.vulnerable {
				fmt.Fprintln(a.err, "cloche: WARNING: --allow-vulnerable lets in a jailer that is known to have a hole; it is for tests only")
			}
			return a.install(cmd, "installing Firecracker", func(ctx context.Context, in *installing) (func() error, error) {
				r, err := installPair(ctx, in, f)
				return func() error { return a.madePair(r) }, err
			})
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.firecracker, "firecracker", "", "the firecracker `FILE`")
	fs.StringVar(&f.jailer, "jailer", "", "the jailer `FILE`")
	fs.StringVar(&f.archive, "archive", "", "upstream release archive: `URL-OR-FILE`")
	fs.StringVar(&f.sha256, "sha256", "", "the archive's SHA-256 in `HEX`")
	fs.BoolVar(&f.path, "path", false, "take both from PATH")
	fs.BoolVar(&f.vulnerable, "allow-vulnerable", false, "let in a jailer with a known hole; for tests only")
	return cmd
}

func (f *firecrackerFlags) check() error {
	files := f.firecracker != "" || f.jailer != ""
	switch {
	case count([]bool{files, f.archive != "", f.path}) != 1:
		return usage("say where they come from: --firecracker with --jailer, or --archive, or --path")
	case files && (f.firecracker == "" || f.jailer == ""):
		return usage("--firecracker and --jailer go together: they must be of one release")
	case f.sha256 != "" && f.archive == "":
		return usage("--sha256 is the hash of an --archive")
	case installed.IsURL(f.archive) && f.sha256 == "":
		return usage("an archive from a URL needs --sha256")
	}
	return nil
}

func installPair(ctx context.Context, in *installing, f firecrackerFlags) (r installed.PairRecord, err error) {
	from := installed.Release{Firecracker: f.firecracker, Jailer: f.jailer}
	switch {
	case f.archive != "":
		if installed.IsURL(f.archive) {
			in.show.set("fetching the release")
		}
		file, err := installed.Fetch(ctx, f.archive, f.sha256, in.dir)
		if err != nil {
			return r, err
		}
		if from, err = installed.Unpack(ctx, file, in.dir); err != nil {
			return r, err
		}
	case f.path:
		for name, to := range map[string]*string{"firecracker": &from.Firecracker, "jailer": &from.Jailer} {
			if *to, err = exec.LookPath(name); err != nil {
				return r, &client.Error{
					Class: api.ClassNotFound, Code: "not_in_path", Message: "there is no " + name + " in PATH",
					Hint: "name the files with --firecracker and --jailer",
				}
			}
		}
	}
	firecracker, err := os.Open(from.Firecracker)
	if err != nil {
		return r, err
	}
	defer firecracker.Close()
	jailer, err := os.Open(from.Jailer)
	if err != nil {
		return r, err
	}
	defer jailer.Close()
	in.show.set("checking the versions")
	return in.store.PutPair(ctx, firecracker, jailer, installed.PairOptions{Version: from.Version, AllowVulnerable: f.vulnerable})
}

// madePair says what pair there is now.
func (a *app) madePair(r installed.PairRecord) error {
	if a.json {
		return a.printJSON(r)
	}
	_, err := fmt.Fprintf(a.out, "Firecracker %s\nfirecracker  sha256:%s\njailer       sha256:%s\n", line(r.Version), r.Firecracker, r.Jailer)
	return err
}

func newFirecrackerList(a *app) *cobra.Command {
	return listInstalled(a, "List the versions that are installed on this host", (*installed.Store).Pairs,
		[]string{"VERSION", "CURRENT", "FIRECRACKER", "JAILER", "AGE"}, func(r installed.ListedPair) []string {
			return []string{r.Version, currentMark(r.Current), short("sha256:" + r.Firecracker), short("sha256:" + r.Jailer), age(r.InstalledAt)}
		})
}
