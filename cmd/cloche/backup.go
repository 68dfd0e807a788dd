package main

import (
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/internal/server/backup"
)

func newBackup(a *app) *cobra.Command {
	var keys bool
	cmd := &cobra.Command{
		Use:   "backup DIR [flags]",
		Short: "Copy the state of the daemon on this host, while it runs",
		Long: `Copy the state directory of this host's daemon into a new directory: the rows of one instant, the templates and
snapshots that they name, and the logs of sessions. The daemon may run meanwhile. Left out are machines, which can't outlive their host, and
everything that is a key: the admin key, the key of tokens, and memory snapshots, which hold their guests' keys and
memory; --with-keys brings those too. Environments of sandboxes and output of commands are always in it, so keep it as
safe as the host. Files that never change are hard links where DIR lies on the same filesystem.

To restore, stop the daemon and put a copy of the directory in the place of the state directory.`,
		Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			paths := []string{a.stateDir, args[0]}
			for i, p := range paths {
				abs, err := filepath.Abs(p)
				if err != nil {
					return err
				}
				paths[i] = abs
			}
			// Interrupted, it still removes what it began.
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			p := a.begin("copying " + paths[0])
			r, err := backup.Write(ctx, backup.Options{StateDir: paths[0], To: paths[1], WithKeys: keys, Version: version})
			p.end()
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				return domain(err)
			}
			return a.printBackup(r, true)
		},
	}
	cmd.Flags().BoolVar(&keys, "with-keys", false, "copy keys and memory snapshots too")
	verify := &cobra.Command{
		Use: "verify DIR", Short: "Read every file of a backup and compare it with what was written", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p := a.begin("reading " + args[0])
			r, err := backup.Verify(cmd.Context(), args[0])
			p.end()
			if err != nil {
				return domain(err)
			}
			return a.printBackup(r, false)
		},
	}
	cmd.AddCommand(verify)
	return cmd
}

func (a *app) printBackup(r backup.Report, made bool) error {
	if a.json {
		return a.printJSON(r)
	}
	var b strings.Builder
	verb := "is whole"
	if made {
		verb = "was made"
	}
	fmt.Fprintf(&b, "The backup %s %s: %s of %s.\n", line(r.Dir), verb, amount(r.Bytes), r.At.Local().Format(time.DateTime))
	if made {
		fmt.Fprintf(&b, "%s of it share the space of the state directory.\n", amount(r.Linked))
	}
	fmt.Fprintf(&b, "It has %d sandboxes' rows, %d templates, %d snapshots and the logs of %d sessions.\n", r.Sandboxes, r.Templates, r.Snapshots, r.Sessions)
	if r.Keys {
		b.WriteString("It has the host's keys and the memory of sandboxes: who can read it can use them.\n")
	} else {
		fmt.Fprintf(&b, "It has no keys, and so none of the %d memory snapshots.\n", len(r.LeftOut))
	}
	for _, what := range slices.Sorted(maps.Keys(r.Missing)) {
		fmt.Fprintf(&b, "missing: %s: %s\n", line(what), line(r.Missing[what]))
	}
	_, err := fmt.Fprint(a.out, b.String())
	return err
}
