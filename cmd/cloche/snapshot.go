package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

func newSnapshot(a *app) *cobra.Command {
	cmd := group("snapshot", "Take, look at and delete snapshots")
	remove := &cobra.Command{
		Use: "rm SNAPSHOT…", Aliases: []string{"delete"}, Short: "Delete snapshots that no sandbox lives on", Args: between(1, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			c, err := a.client()
			if err != nil {
				return err
			}
			list := api.SnapshotList{Items: []api.Snapshot{}}
			err = a.each(args, func(arg string) error {
				id, err := a.snapshot(ctx, c, arg, "")
				if err != nil {
					return err
				}
				s, err := c.DeleteSnapshot(ctx, id)
				if err != nil || a.json {
					list.Items = append(list.Items, s)
					return err
				}
				_, err = fmt.Fprintln(a.out, id)
				return err
			})
			if a.json && err == nil {
				return a.printJSON(list)
			}
			return err
		},
	}
	inspect := &cobra.Command{
		Use: "inspect SNAPSHOT", Short: "Show a snapshot as JSON", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			c, err := a.client()
			if err != nil {
				return err
			}
			id, err := a.snapshot(ctx, c, args[0], "")
			if err != nil {
				return err
			}
			s, err := c.Snapshot(ctx, id)
			if err != nil {
				return err
			}
			return a.printJSON(s)
		},
	}
	cmd.AddCommand(newSnapshotCreate(a), newSnapshotList(a), inspect, newSnapshotTree(a), remove)
	return cmd
}

func newSnapshotCreate(a *app) *cobra.Command {
	var name string
	var disk bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use: "create [flags] SANDBOX", Short: "Take a snapshot of a sandbox, which goes on, and print its id", Args: exactly(1),
	}
	leave := noWait(cmd)
	fs := cmd.Flags()
	fs.StringVar(&name, "name", "", "a name for it, by which other commands find it")
	fs.BoolVar(&disk, "disk", false, "the disk only, which cuts no connection")
	fs.DurationVar(&wait, "wait", 0, "how long tunnels and transfers may take to end before they are cut")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		req := api.SnapshotRequest{Name: name, Kind: api.SnapshotMemory, WaitSeconds: int(wait.Seconds())}
		if disk {
			req.Kind = api.SnapshotDisk
		}
		if wait < 0 {
			return usage("--wait can't be negative")
		}
		ctx := cmd.Context()
		c, id, err := a.dialFor(ctx, args[0])
		if err != nil {
			return err
		}
		p := a.begin("taking a snapshot of " + id)
		defer p.end()
		accepted, err := c.TakeSnapshot(ctx, id, req)
		s := accepted.Snapshot
		if err == nil && !*leave {
			if _, err = c.Wait(ctx, accepted.Operation.Id, p.operation("taking a snapshot of "+id)); err == nil {
				s, err = c.Snapshot(ctx, s.Id)
			}
		}
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(s)
		}
		_, err = fmt.Fprintln(a.out, s.Id)
		return err
	}
	return cmd
}

func newSnapshotList(a *app) *cobra.Command {
	var sandbox string
	var idsOnly bool
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"}, Short: "List snapshots, newest first", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			c, err := a.client()
			if err != nil {
				return err
			}
			id := ""
			if sandbox != "" {
				if id, err = a.sandbox(ctx, c, sandbox); err != nil {
					return err
				}
			}
			list, err := c.Snapshots(ctx, id)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(api.SnapshotList{Items: append([]api.Snapshot{}, list...)})
			}
			var rows [][]string
			for _, s := range list {
				if idsOnly {
					fmt.Fprintln(a.out, s.Id)
					continue
				}
				what := string(s.Kind)
				if s.Purpose != purposeNamed {
					what += " (" + s.Purpose + ")"
				}
				rows = append(rows, []string{s.Id, orDash(s.Name), s.Sandbox, what, string(s.State), amount(s.SizeBytes), age(s.CreatedAt), orDash(s.Parent)})
			}
			if idsOnly {
				return nil
			}
			return a.table([]string{"ID", "NAME", "SANDBOX", "KIND", "STATE", "SIZE", "AGE", "PARENT"}, rows)
		},
	}
	cmd.Flags().BoolVar(&idsOnly, "ids", false, "print ids only")
	cmd.Flags().StringVar(&sandbox, "sandbox", "", "all of a sandbox, those too that Cloche took by itself")
	return cmd
}

const (
	purposeNamed     = "named"
	snapshotIDLength = len("snp_") + 20
)

// snapshot finds the snapshot that an argument means: an id, the beginning of
// one, or a name; of a name that several have, the one of the sandbox, where one
// is said.
func (a *app) snapshot(ctx context.Context, c *client.Client, arg, sandbox string) (string, error) {
	if strings.HasPrefix(arg, "snp_") && len(arg) == snapshotIDLength {
		return arg, nil
	}
	if arg == "" {
		return "", usage("a snapshot's name can't be empty")
	}
	scopes := []string{""}
	if sandbox != "" {
		scopes = []string{sandbox, ""}
	}
	for _, scope := range scopes {
		all, err := c.Snapshots(ctx, scope)
		if err != nil {
			return "", err
		}
		var found []string
		for _, s := range all {
			if s.Name == arg || strings.HasPrefix(arg, "snp_") && strings.HasPrefix(s.Id, arg) {
				found = append(found, s.Id)
			}
		}
		switch {
		case len(found) == 1:
			return found[0], nil
		case len(found) > 1:
			return "", &client.Error{
				Class: api.ClassConflict, Code: "ambiguous", Message: fmt.Sprintf("%q means %d snapshots", arg, len(found)),
				Hint: "say one of: " + strings.Join(found[:min(len(found), 5)], ", "),
			}
		}
	}
	return "", &client.Error{
		Class: api.ClassNotFound, Code: "snapshot_not_found", Message: fmt.Sprintf("there is no snapshot %q", arg), Hint: "`cloche snapshot ls` lists them",
	}
}

// branch is a snapshot and those that name it as their parent, oldest first.
type branch struct {
	api.Snapshot
	Children []*branch `json:"children,omitempty"`
}

// grow makes trees of a list. A snapshot whose parent is not listed is a root.
func grow(list []api.Snapshot) []*branch {
	all := map[string]*branch{}
	for _, s := range list {
		all[s.Id] = &branch{Snapshot: s}
	}
	roots := []*branch{}
	for _, s := range slices.Backward(list) {
		if up := all[s.Parent]; up != nil && s.Parent != s.Id {
			up.Children = append(up.Children, all[s.Id])
			continue
		}
		roots = append(roots, all[s.Id])
	}
	return roots
}

// has tells whether a snapshot of the sandbox, or its base, is in the tree.
func (b *branch) has(sandbox, base string) bool {
	return b.Sandbox == sandbox || b.Id == base || slices.ContainsFunc(b.Children, func(c *branch) bool { return c.has(sandbox, base) })
}

func newSnapshotTree(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "tree [SANDBOX]", Short: "Show which snapshot came from which, and their sizes", Args: between(0, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Snapshots(ctx, "")
			if err != nil {
				return err
			}
			roots, base := grow(list), ""
			if len(args) > 0 {
				id, err := a.sandbox(ctx, c, args[0])
				if err != nil {
					return err
				}
				s, err := c.Sandbox(ctx, id)
				if err != nil {
					return err
				}
				base = s.Base
				roots = slices.DeleteFunc(roots, func(b *branch) bool { return !b.has(id, base) })
			}
			if a.json {
				return a.printJSON(struct {
					Items []*branch `json:"items"`
				}{roots})
			}
			return a.printTree(roots, base)
		},
	}
}

// printTree prints the trees below the templates that they begin at.
func (a *app) printTree(roots []*branch, base string) error {
	var out strings.Builder
	var total int64
	var draw func(list []*branch, indent string)
	draw = func(list []*branch, indent string) {
		for i, b := range list {
			mark, further := "├─ ", "│  "
			if i == len(list)-1 {
				mark, further = "└─ ", "   "
			}
			here := ""
			if b.Id == base {
				here = "  ← here"
			}
			total += b.SizeBytes
			fmt.Fprintf(&out, "%s%s%s  %s  %s  %s  %s ago  of %s%s\n", indent, mark, b.Id, line(orDash(b.Name)), b.Kind, amount(b.SizeBytes), age(b.CreatedAt), b.Sandbox, here)
			draw(b.Children, indent+further)
		}
	}
	byTemplate, order := map[string][]*branch{}, []string{}
	for _, r := range roots {
		key := r.Digest
		if byTemplate[key] == nil {
			order = append(order, key)
		}
		byTemplate[key] = append(byTemplate[key], r)
	}
	for _, key := range order {
		fmt.Fprintf(&out, "%s (%s)\n", line(byTemplate[key][0].Template), short(key))
		draw(byTemplate[key], "")
	}
	if len(roots) > 0 {
		fmt.Fprintf(&out, "%s in all\n", amount(total))
	}
	_, err := fmt.Fprint(a.out, out.String())
	return err
}
