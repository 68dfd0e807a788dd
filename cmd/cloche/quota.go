package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
)

func newUsage(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "usage", Short: "Show what the key's project has, and may have", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			u, err := c.Usage(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(u)
			}
			row := func(what string, used, most int64, show func(int64) string) []string {
				bound := "-"
				if most > 0 {
					bound = show(most)
				}
				return []string{what, show(used), bound}
			}
			plain := func(n int64) string { return fmt.Sprint(n) }
			cores := func(n int64) string { return fmt.Sprintf("%g", float64(n)/1000) }
			mib := func(n int64) string { return amount(n << 20) }
			has, may := u.Usage, u.Quotas
			return a.table([]string{"WHAT", "USED", "QUOTA"}, [][]string{
				row("running sandboxes", int64(has.Running), int64(may.Running), plain),
				row("sandboxes without a machine", int64(has.Suspended), int64(may.Suspended), plain),
				row("cores", int64(has.MilliCpu), int64(may.MilliCpu), cores),
				row("memory", int64(has.MemoryMib), int64(may.MemoryMib), mib),
				row("disk", has.DiskMib, may.DiskMib, mib),
				row("named snapshots", int64(has.Snapshots), int64(may.Snapshots), plain),
			})
		},
	}
}

func newQuota(a *app) *cobra.Command {
	cmd := group("quota", "Bound what projects may have")
	cmd.AddCommand(newQuotaSet(a))
	return cmd
}

func newQuotaSet(a *app) *cobra.Command {
	var project, memory, disk string
	var running, suspended, snapshots int
	var cpu float64
	cmd := &cobra.Command{
		Use: "set [flags]", Short: "Set a project's quotas (admin keys only)", Args: noArgs,
		Long: `Set a project's quotas; 0 is no bound. For this key's own project, those that are not named stay as they are; for another
(--project) they become no bound. What is there already stays.`,
	}
	fs := cmd.Flags()
	fs.StringVar(&project, "project", "", "id of the project (default: this key's)")
	fs.IntVar(&running, "running", 0, "sandboxes with a machine")
	fs.IntVar(&suspended, "suspended", 0, "sandboxes without a machine, the stopped and failed included")
	fs.IntVar(&snapshots, "snapshots", 0, "named snapshots")
	fs.Float64Var(&cpu, "cpu", 0, "cores of sandboxes with a machine")
	fs.StringVar(&memory, "memory", "", "memory of sandboxes with a machine, e.g. 64GiB")
	fs.StringVar(&disk, "disk", "", "what sandboxes may write and snapshots hold, e.g. 500GiB")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		var q api.Quotas
		if project == "" {
			u, err := c.Usage(cmd.Context())
			if err != nil {
				return err
			}
			project, q = u.Project, u.Quotas
		}
		named := false
		for name, set := range map[string]func() error{
			"running":   func() error { q.Running = running; return nil },
			"suspended": func() error { q.Suspended = suspended; return nil },
			"snapshots": func() error { q.Snapshots = snapshots; return nil },
			"cpu":       func() error { q.MilliCpu = int(cpu*1000 + 0.5); return nil },
			"memory":    func() error { n, err := bound(memory); q.MemoryMib = n; return err },
			"disk":      func() error { n, err := bound(disk); q.DiskMib = int64(n); return err },
		} {
			if !fs.Changed(name) {
				continue
			}
			named = true
			if err := set(); err != nil {
				return err
			}
		}
		if !named {
			return usage("no quota was named")
		}
		if min(q.Running, q.Suspended, q.Snapshots, q.MilliCpu) < 0 {
			return usage("a quota can't be negative; 0 is no bound")
		}
		p, err := c.SetQuotas(cmd.Context(), project, q)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(p)
		}
		return nil
	}
	return cmd
}

// bound is an amount of MiB, or 0.
func bound(s string) (int, error) {
	if s == "0" {
		return 0, nil
	}
	return mebibytes(s)
}
