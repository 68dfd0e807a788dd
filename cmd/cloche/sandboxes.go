package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

func newCreate(a *app) *cobra.Command {
	var cf createFlags
	var snapshot string
	cmd := &cobra.Command{
		Use:   "create [flags] [TEMPLATE]",
		Short: "Create a sandbox and wait until it is ready",
		Args:  between(0, 1),
	}
	leave := noWait(cmd)
	cf.add(cmd)
	cmd.Flags().StringVar(&snapshot, "snapshot", "", "begin from this `SNAPSHOT` (id or name) instead of a template")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if (len(args) == 1) == (snapshot != "") {
			return usage("a sandbox is created from a template or, with --snapshot, from a snapshot")
		}
		what := snapshot
		if len(args) == 1 {
			what = args[0]
		}
		req, err := cf.request(what)
		if err != nil {
			return err
		}
		c, err := a.client()
		if err == nil && snapshot != "" {
			req.Template = ""
			req.Snapshot, err = a.snapshot(cmd.Context(), c, snapshot, "")
		}
		if err != nil {
			return err
		}
		s, err := a.create(cmd.Context(), c, req, what, *leave)
		if err != nil {
			if s.Id != "" {
				return fmt.Errorf("sandbox %s: %w", s.Id, err)
			}
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

func (a *app) create(ctx context.Context, c *client.Client, req api.CreateSandboxRequest, what string, leave bool) (api.Sandbox, error) {
	p := a.begin("creating a sandbox from " + what)
	defer p.end()
	if leave {
		accepted, err := c.CreateSandbox(ctx, req)
		return accepted.Sandbox, err
	}
	return c.CreateAndWait(ctx, req, p.operation("creating"))
}

func newList(a *app) *cobra.Command {
	var labels, states []string
	var all, idsOnly bool
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"}, Short: "List sandboxes, newest first", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f := client.SandboxFilter{}
			var err error
			if f.Labels, err = pairs(labels, "--label", false); err != nil {
				return err
			}
			for _, s := range states {
				if !api.SandboxState(s).Valid() {
					return usage("%q is no state of a sandbox", s)
				}
				f.States = append(f.States, api.SandboxState(s))
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Sandboxes(cmd.Context(), f)
			if err != nil {
				return err
			}
			if !all && len(states) == 0 {
				list = slices.DeleteFunc(list, func(s api.Sandbox) bool { return s.State == api.SandboxDeleted })
			}
			return a.printSandboxes(list, idsOnly)
		},
	}
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "only those with the label `NAME=VALUE` (repeatable: all must match)")
	cmd.Flags().StringSliceVarP(&states, "state", "s", nil, "only those in a state, e.g. running (repeatable)")
	cmd.Flags().BoolVarP(&all, "all", "a", false, "deleted ones too")
	cmd.Flags().BoolVar(&idsOnly, "ids", false, "print ids only")
	return cmd
}

func (a *app) printSandboxes(list []api.Sandbox, idsOnly bool) error {
	if a.json {
		return a.printJSON(api.SandboxList{Items: append([]api.Sandbox{}, list...)})
	}
	if idsOnly {
		for _, s := range list {
			if _, err := fmt.Fprintln(a.out, s.Id); err != nil {
				return err
			}
		}
		return nil
	}
	var rows [][]string
	for _, s := range list {
		state := string(s.State)
		if s.State == api.SandboxFailed && s.End != nil {
			state += " (" + s.End.Reason + ")"
		}
		ttl := "-"
		if !s.ExpiresAt.IsZero() {
			ttl = span(time.Until(s.ExpiresAt))
		}
		saved := "-"
		if s.RecoveryPoint != nil {
			saved = age(s.RecoveryPoint.At) + " ago"
		}
		rows = append(rows, []string{s.Id, orDash(s.Labels[nameLabel]), s.Template, state, age(s.CreatedAt), saved, ttl, labelText(s.Labels)})
	}
	return a.table([]string{"ID", "NAME", "TEMPLATE", "STATE", "AGE", "SAVED", "TTL", "LABELS"}, rows)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func labelText(m map[string]string) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if k != nameLabel {
			parts = append(parts, k+"="+m[k])
		}
	}
	return orDash(strings.Join(parts, ","))
}

func newInspect(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "inspect SANDBOX", Short: "Show a sandbox and its sessions", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			c, id, err := a.dialFor(ctx, args[0])
			if err != nil {
				return err
			}
			s, err := c.Sandbox(ctx, id)
			if err != nil {
				return err
			}
			sessions, err := c.Sessions(ctx, id)
			if err != nil && !client.IsClass(err, api.ClassDenied) && !client.Ended(s.State) {
				return err
			}
			if a.json {
				return a.printJSON(struct {
					api.Sandbox
					Sessions []api.Session `json:"sessions"`
				}{s, append([]api.Session{}, sessions...)})
			}
			return a.printSandbox(s, a.recovery(ctx, c, s), sessions)
		},
	}
}

// recovery says in words what of a sandbox outlives its machine.
func (a *app) recovery(ctx context.Context, c *client.Client, s api.Sandbox) string {
	if client.Ended(s.State) && s.State != api.SandboxFailed {
		return ""
	}
	point := s.RecoveryPoint
	if point == nil {
		if s.Source != "" {
			return "nothing yet: a crash would take it back to the snapshot " + s.Source
		}
		return "nothing yet: a crash would take it back to its template"
	}
	what := "saved"
	if snap, err := c.Snapshot(ctx, point.Snapshot); err == nil {
		what = map[api.SnapshotKind]string{api.SnapshotMemory: "memory and disk", api.SnapshotDisk: "disk"}[snap.Kind]
	}
	if point.At.IsZero() {
		return what + " in " + point.Snapshot
	}
	return fmt.Sprintf("%s as of %s (%s ago), in %s", what, point.At.Local().Format(time.TimeOnly), age(point.At), point.Snapshot)
}

var durabilityText = map[api.SandboxDurability]string{
	api.DurabilitySnapshot: "what was written after the recovery point is lost when the machine ends by itself",
	api.DurabilityCrash:    "what was synced outlives the machine's sudden end",
}

func (a *app) printSandbox(s api.Sandbox, recovery string, sessions []api.Session) error {
	var b strings.Builder
	field := func(name, value string) {
		if value != "" {
			fmt.Fprintf(&b, "%-12s %s\n", name, line(value))
		}
	}
	field("id", s.Id)
	field("state", string(s.State))
	if s.End != nil {
		field("ended", fmt.Sprintf("%s %s ago %s", s.End.Reason, age(s.End.At), s.End.Detail))
	}
	field("template", s.Template)
	field("digest", s.Digest)
	field("driver", s.Driver)
	field("resources", fmt.Sprintf("%g cores, %d MiB memory, %d MiB disk", float64(s.Resources.MilliCpu)/1000, s.Resources.MemoryMib, s.Resources.DiskMib))
	for _, k := range slices.Sorted(maps.Keys(s.Labels)) {
		field("label", k+"="+s.Labels[k])
	}
	for _, k := range slices.Sorted(maps.Keys(s.Env)) {
		field("env", k+"="+s.Env[k])
	}
	field("egress", s.Egress)
	field("recovery", recovery)
	field("durability", durabilityText[s.Durability])
	if s.Policy.Idle.Action != "" {
		field("policy", policyText(s.Policy))
	}
	field("forked from", s.Parent)
	field("made of", s.Source)
	field("base", s.Base)
	field("created", s.CreatedAt.Local().Format(time.RFC3339)+" ("+age(s.CreatedAt)+" ago)")
	if !s.TouchedAt.IsZero() {
		field("last used", age(s.TouchedAt)+" ago")
	}
	if !s.ExpiresAt.IsZero() {
		field("expires", s.ExpiresAt.Local().Format(time.RFC3339)+" (in "+span(time.Until(s.ExpiresAt))+")")
	}
	field("operation", s.Operation)
	if _, err := fmt.Fprint(a.out, b.String()); err != nil || len(sessions) == 0 {
		return err
	}
	var rows [][]string
	for _, x := range sessions {
		state := string(x.State)
		if x.Exit != nil {
			state = fmt.Sprintf("%s (%d)", state, x.Exit.Code)
		}
		if x.Held {
			state += " (held)"
		}
		command := strings.Join(x.Args, " ")
		if r := []rune(command); len(r) > 60 {
			command = string(r[:59]) + "…"
		}
		rows = append(rows, []string{x.Id, state, amount(x.OffsetNext), age(x.CreatedAt), command})
	}
	if _, err := fmt.Fprintln(a.out); err != nil {
		return err
	}
	return a.table([]string{"SESSION", "STATE", "OUTPUT", "AGE", "COMMAND"}, rows)
}

func newUpdate(a *app) *cobra.Command {
	var set, unset []string
	var ttl string
	var policy policyFlags
	cmd := &cobra.Command{
		Use: "update [flags] SANDBOX", Short: "Change a sandbox's labels, TTL or policy", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			var ch client.Change
			add, err := pairs(set, "--label", false)
			if err != nil {
				return err
			}
			if ttl != "" {
				var d time.Duration
				if ttl != "none" {
					if d, err = time.ParseDuration(ttl); err != nil || d < time.Second {
						return usage("--ttl must be like 30m (at least 1s), or none, not %q", ttl)
					}
				}
				ch.TTL = &d
			}
			if ch.Policy, err = policy.request(); err != nil {
				return err
			}
			if len(add)+len(unset) == 0 && ch.TTL == nil && ch.Policy == nil {
				return usage("nothing was asked to be changed")
			}
			c, id, err := a.dialFor(ctx, args[0])
			if err != nil {
				return err
			}
			if len(add)+len(unset) > 0 {
				s, err := c.Sandbox(ctx, id)
				if err != nil {
					return err
				}
				labels := map[string]string{}
				maps.Copy(labels, s.Labels)
				for _, k := range unset {
					delete(labels, k)
				}
				maps.Copy(labels, add)
				ch.Labels = &labels
			}
			s, err := c.UpdateSandbox(ctx, id, ch)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(s)
			}
			return nil
		},
	}
	cmd.Flags().StringArrayVarP(&set, "label", "l", nil, "set the label `NAME=VALUE` (repeatable)")
	cmd.Flags().StringArrayVar(&unset, "unlabel", nil, "remove the label `NAME` (repeatable)")
	cmd.Flags().StringVar(&ttl, "ttl", "", "end it so long after now, e.g. 30m; none clears it")
	policy.add(cmd)
	return cmd
}

func newRemove(a *app) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "rm [flags] SANDBOX…", Aliases: []string{"delete"}, Short: "Delete sandboxes, whatever they do", Args: between(1, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			c, err := a.client()
			if err != nil {
				return err
			}
			var ops []api.Operation
			err = a.each(args, func(arg string) error {
				id, err := a.sandbox(ctx, c, arg)
				if err == nil {
					var op api.Operation
					op, err = a.removeOp(ctx, c, id)
					if err == nil {
						ops = append(ops, op)
						if !a.json {
							_, err = fmt.Fprintln(a.out, id)
						}
					}
				}
				if force && client.IsClass(err, api.ClassNotFound) {
					return nil
				}
				return err
			})
			if a.json {
				if printed := a.printJSON(api.OperationList{Items: append([]api.Operation{}, ops...)}); err == nil {
					err = printed
				}
			}
			return err
		},
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "one that is not there counts as deleted")
	return cmd
}

// remove deletes a sandbox and waits until it is gone.
func (a *app) remove(ctx context.Context, c *client.Client, id string) error {
	_, err := a.removeOp(ctx, c, id)
	return err
}

func (a *app) removeOp(ctx context.Context, c *client.Client, id string) (api.Operation, error) {
	p := a.begin("deleting " + id)
	defer p.end()
	op, err := c.DeleteSandbox(ctx, id)
	if err != nil {
		return op, err
	}
	return c.Wait(ctx, op.Id, p.operation("deleting "+id))
}

func newLogs(a *app) *cobra.Command {
	var follow bool
	var offset int64
	cmd := &cobra.Command{
		Use:   "logs [flags] SANDBOX [SESSION]",
		Short: "Print what a command has printed",
		Long: `Print a session's output; without a session the newest one's. With --follow it goes on until the command ends;
Ctrl-C ends only the printing. A session that was never attached has no output yet.`,
		Args: between(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			c, id, err := a.dialFor(ctx, args[0])
			if err != nil {
				return err
			}
			info, err := a.session(ctx, c, id, args[1:])
			if err != nil {
				return err
			}
			if follow || info.State == api.SessionExited || info.State == api.SessionLost {
				return a.followLog(ctx, c.Session(id, info.Id), offset)
			}
			return a.printLog(ctx, c.Session(id, info.Id), offset, info.OffsetNext)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the command ends")
	cmd.Flags().Int64Var(&offset, "since-offset", 0, "leave out so many bytes of output")
	return cmd
}

// followLog prints a log to its end, which has no influence on the exit code.
func (a *app) followLog(ctx context.Context, s *client.Session, offset int64) error {
	st := s.Follow(client.StreamOptions{Offset: offset})
	defer st.Close()
	_, err := a.show(ctx, st, func() {})
	var e *client.Error
	if errors.As(err, &e) && e.Code == "session_lost" {
		fmt.Fprintf(a.err, "cloche: %s\n", line(e.Message))
		return nil
	}
	return err
}

// printLog prints a log of a command that still runs up to an offset.
func (a *app) printLog(ctx context.Context, s *client.Session, offset, end int64) error {
	st := s.Follow(client.StreamOptions{Offset: offset})
	defer st.Close()
	out, errOut := cut{a.out, st, end}, cut{a.err, st, end}
	for st.Offset() < end {
		e, err := st.Next(ctx)
		if err != nil {
			return err
		}
		switch {
		case a.json:
			err = a.printLine(e)
		case e.Type == api.EventStdout:
			err = out.write(e)
		case e.Type == api.EventStderr:
			err = errOut.write(e)
		case e.Type == api.EventGap:
			a.note("cloche: bytes %d to %d of the output are gone: %s", e.Offset, e.To, line(e.Reason))
		case e.Type == api.EventExit || e.Type == api.EventLost:
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// cut writes output that lies before an offset.
type cut struct {
	to  *os.File
	st  *client.Stream
	end int64
}

func (c cut) write(e api.StreamEvent) error {
	data := e.Data
	if over := c.st.Offset() - c.end; over > 0 {
		data = data[:int64(len(data))-over]
	}
	_, err := c.to.Write(data)
	return err
}
