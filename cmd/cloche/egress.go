package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

func newEgress(a *app) *cobra.Command {
	cmd := group("egress", "Decide what leaves sandboxes, and see what did")
	set := &cobra.Command{
		Use: "set SANDBOX PROFILE", Short: "Give a sandbox another egress profile", Args: exactly(2),
		Long: `Give a sandbox another egress profile: one of the project's, or none, public or packages. It is in force within a second;
connections that no longer comply are reset.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, id, err := a.dialFor(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			s, err := c.SetEgress(cmd.Context(), id, args[1])
			if err != nil || !a.json {
				return err
			}
			return a.printJSON(s)
		},
	}
	cmd.AddCommand(newProfile(a), set, newTail(a))
	return cmd
}

func newProfile(a *app) *cobra.Command {
	cmd := group("profile", "Manage egress profiles")
	list := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the presets and the project's profiles", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			all, err := c.EgressProfiles(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(api.EgressProfileList{Items: append([]api.EgressProfile{}, all...)})
			}
			var rows [][]string
			for _, p := range all {
				version, notes := strconv.FormatInt(p.Version, 10), "-"
				if p.Preset {
					version, notes = "-", "preset"
				}
				if p.DryRun {
					notes = "dry run"
				}
				rows = append(rows, []string{p.Name, version, strconv.Itoa(len(p.Rules)), string(p.Default), ago(p.UpdatedAt), notes})
			}
			return a.table([]string{"NAME", "VERSION", "RULES", "DEFAULT", "CHANGED", "NOTES"}, rows)
		},
	}
	get := &cobra.Command{
		Use: "get PROFILE", Short: "Show a profile as JSON, which `set` takes", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			p, err := c.EgressProfile(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.printJSON(p)
		},
	}
	remove := &cobra.Command{
		Use: "rm PROFILE…", Aliases: []string{"delete"}, Short: "Delete profiles that no sandbox has", Args: between(1, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.each(args, func(name string) error { return c.DeleteEgressProfile(cmd.Context(), name) })
		},
	}
	cmd.AddCommand(list, get, newProfileSet(a), remove)
	return cmd
}

func ago(at time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return age(at) + " ago"
}

func newProfileSet(a *app) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "set [flags] FILE", Short: "Make a profile of a file, or change it", Args: exactly(1),
		Long: `Make the profile that a JSON file describes, or change it where there is one of that name; - is standard input. Where the file
has a version, as what "get" prints does, it replaces that one and no later one. Sandboxes that have the profile follow within a second.`,
		Example: `  echo '{"name": "web", "default": "deny", "rules": [{"action": "allow", "hosts": ["*.example.com"], "methods": ["GET"]}]}' |
    cloche egress profile set -
  cloche egress profile get web >web.json && $EDITOR web.json && cloche egress profile set web.json`,
	}
	cmd.Flags().StringVar(&name, "name", "", "the profile's name, instead of the file's")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		in, err := a.profileFile(args[0])
		if err != nil {
			return err
		}
		if name != "" && name != in.Name {
			in.Name, in.Version = name, 0
		}
		if in.Name == "" {
			return &usageError{text: "the file names no profile", hint: `add "name", or use --name`}
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		p, err := putProfile(cmd.Context(), c, in)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(p)
		}
		_, err = fmt.Fprintf(a.out, "%s %d\n", p.Name, p.Version)
		return err
	}
	return cmd
}

// maxProfileFile is more than the daemon takes.
const maxProfileFile = 2 << 20

// input opens a file, or standard input for "-".
func (a *app) input(path string) (io.ReadCloser, error) {
	if path == "-" {
		return io.NopCloser(a.in), nil
	}
	return os.Open(filepath.Clean(path))
}

// profileFile reads a profile. A field that nothing knows is a slip that would
// leave a rule wider than it was meant.
func (a *app) profileFile(path string) (p api.EgressProfile, err error) {
	f, err := a.input(path)
	if err != nil {
		return p, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxProfileFile))
	if err != nil {
		return p, err
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p); err != nil {
		return p, usage("%s is no egress profile: %s", path, strings.TrimPrefix(err.Error(), "json: "))
	}
	if dec.More() {
		return p, usage("%s holds more than one egress profile", path)
	}
	return p, nil
}

// putProfile makes or replaces a profile. With a version it replaces that one.
func putProfile(ctx context.Context, c *client.Client, p api.EgressProfile) (api.EgressProfile, error) {
	req := api.ReplaceEgressProfileRequest{Version: p.Version, Rules: p.Rules, Default: p.Default, DryRun: p.DryRun, Limits: p.Limits}
	if req.Version == 0 {
		is, err := c.EgressProfile(ctx, p.Name)
		if client.IsClass(err, api.ClassNotFound) {
			return c.CreateEgressProfile(ctx, api.CreateEgressProfileRequest{
				Name: p.Name, Rules: p.Rules, Default: p.Default, DryRun: p.DryRun, Limits: p.Limits,
			})
		}
		if err != nil {
			return is, err
		}
		req.Version = max(is.Version, 1) // a preset has none, and the daemon says that it is one
	}
	return c.ReplaceEgressProfile(ctx, p.Name, req)
}

func newTail(a *app) *cobra.Command {
	var sandbox string
	var denied, follow bool
	var most int
	cmd := &cobra.Command{
		Use: "tail [flags]", Short: "Show what the egress gateway decided, oldest first", Args: noArgs,
		Long: `Show the newest decisions of the egress gateway, oldest first: DNS questions, connections, HTTP requests, and packets that were
dropped. With --follow it goes on until Ctrl-C; a daemon that goes away is waited for.`,
	}
	fs := cmd.Flags()
	fs.StringVar(&sandbox, "sandbox", "", "only those about a sandbox")
	fs.BoolVar(&denied, "denied", false, "only what was denied, or would have been but for a dry run")
	fs.BoolVarP(&follow, "follow", "f", false, "go on until Ctrl-C")
	fs.IntVarP(&most, "limit", "n", 50, "at most so many of those that are there, up to 1000; 0 is none")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if most < 0 || most > 1000 {
			return usage("--limit must lie between 0 and 1000")
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		var f client.EgressFilter
		if sandbox != "" {
			if f.Sandbox, err = a.sandbox(cmd.Context(), c, sandbox); err != nil {
				return err
			}
		}
		if denied {
			f.Verdict, f.WouldDeny = api.EgressDenied, true
		}
		return a.tail(cmd.Context(), c, f, most, follow)
	}
	return cmd
}

func (a *app) tail(ctx context.Context, c *client.Client, f client.EgressFilter, most int, follow bool) error {
	l, err := c.EgressRecords(ctx, f, max(most, 1))
	if err != nil {
		return err
	}
	if most == 0 {
		l.Items = nil
	}
	for _, r := range l.Items {
		if err := a.printRecord(r); err != nil {
			return err
		}
	}
	if !follow {
		return nil
	}
	ctx, release := interruptible(ctx)
	defer release()
	f.After = &l.NextAfter
	s := c.EgressTail(f,
		func(err error) { a.note("cloche: %s; waiting for the daemon to come back", line(err.Error())) },
		func() { a.note("cloche: the daemon is back") })
	defer s.Close()
	for {
		r, err := s.Next(ctx)
		if ctx.Err() != nil {
			return nil // Ctrl-C is how it ends
		}
		if err == nil {
			err = a.printRecord(r)
		}
		if err != nil {
			return err
		}
	}
}

func (a *app) printRecord(r api.EgressRecord) error {
	if a.json {
		return a.printLine(r)
	}
	verdict := string(r.Verdict)
	if r.WouldDeny {
		verdict = "dry run"
	}
	// What follows comes from inside a sandbox.
	_, err := fmt.Fprintf(a.out, "%s  %s  %-7s  %-6s  %s\n", r.At.Local().Format(time.DateTime), line(r.Sandbox), verdict, r.Kind, line(recordText(r)))
	return err
}

// recordText says in one line what was asked for and why it was decided so.
func recordText(r api.EgressRecord) string {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	if r.Count > 0 {
		say("%d packets ", r.Count)
	}
	if r.Method != "" {
		say("%s ", r.Method)
	}
	switch {
	case r.Kind == api.EgressHTTP:
		say("%s://%s%s", r.Scheme, r.Host, r.Path)
	case r.Host != "" && r.Dialled != "":
		say("%s (%s)", r.Host, r.Dialled)
	default:
		say("%s", orDash(r.Host+r.Dialled))
	}
	if r.Status > 0 {
		say(" %d", r.Status)
	}
	if r.SentBytes+r.ReceivedBytes > 0 {
		say(", %s out, %s in", amount(r.SentBytes), amount(r.ReceivedBytes))
	}
	if len(r.Injected) > 0 {
		say(", with %s", strings.Join(r.Injected, ", "))
	}
	if r.Rule != "" {
		say(", by %s %s@%d", r.Rule, r.Profile, r.Version)
	}
	if r.Reason != "" {
		say(": %s", r.Reason)
	}
	return b.String()
}
