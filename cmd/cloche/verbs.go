package main

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// noWait adds the flag by which a command does not wait for its operation.
func noWait(cmd *cobra.Command) *bool {
	return cmd.Flags().Bool("no-wait", false, "return when the request is recorded; cloche op wait waits for it")
}

// asking asks for a verb on one sandbox.
type asking func(ctx context.Context, c *client.Client, id string) (api.AcceptedSandbox, error)

// newVerbs makes the commands that move sandboxes and need nothing but them.
func newVerbs(a *app) []*cobra.Command {
	var grace time.Duration
	stop := newVerb(a, "stop", "stopping", "Save sandboxes' disks and end their machines; memory is lost",
		func(ctx context.Context, c *client.Client, id string) (api.AcceptedSandbox, error) {
			return c.Stop(ctx, id, grace)
		})
	stop.Flags().DurationVar(&grace, "grace", 10*time.Second, "how long commands have to end after SIGTERM; 0 asks none of them")
	return []*cobra.Command{
		newVerb(a, "pause", "pausing", "Stop every process of sandboxes where it is; memory stays in RAM", by((*client.Client).Pause)),
		newVerb(a, "resume", "resuming", "Let paused sandboxes go on", by((*client.Client).Resume)),
		newVerb(a, "suspend", "suspending", "Save sandboxes' memory and disk, and free what they have on the host", by((*client.Client).Suspend)),
		newVerb(a, "restore", "restoring", "Let suspended sandboxes go on where they stood", by((*client.Client).Restore)),
		stop,
		newVerb(a, "start", "starting", "Boot stopped or failed sandboxes from their disk", by((*client.Client).Start)),
		newVerb(a, "wake", "waking", "Resume, restore or start, whichever a sandbox's state asks for", by((*client.Client).Wake)),
	}
}

func by(f func(*client.Client, context.Context, string) (api.AcceptedSandbox, error)) asking {
	return func(ctx context.Context, c *client.Client, id string) (api.AcceptedSandbox, error) {
		return f(c, ctx, id)
	}
}

func newVerb(a *app, name, doing, short string, ask asking) *cobra.Command {
	cmd := &cobra.Command{Use: name + " [flags] SANDBOX…", Short: short, Args: between(1, -1)}
	leave := noWait(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		c, err := a.client()
		if err != nil {
			return err
		}
		ops := []api.Operation{}
		err = a.each(args, func(arg string) error {
			id, err := a.sandbox(ctx, c, arg)
			if err != nil {
				return err
			}
			p := a.begin(doing + " " + id)
			defer p.end()
			accepted, err := ask(ctx, c, id)
			op := accepted.Operation
			if err == nil && !*leave {
				op, err = c.Wait(ctx, op.Id, p.operation(doing+" "+id))
			}
			if op.Id != "" {
				ops = append(ops, op)
			}
			if err != nil || a.json {
				return err
			}
			_, err = fmt.Fprintln(a.out, id)
			return err
		})
		if a.json {
			if printed := a.printJSON(api.OperationList{Items: ops}); err == nil {
				err = printed
			}
		}
		return err
	}
	return cmd
}

func newFork(a *app) *cobra.Command {
	var count int
	var labels, env []string
	var egress string
	var wait time.Duration
	cmd := &cobra.Command{
		Use: "fork [flags] SANDBOX", Short: "Make new sandboxes that begin where a running one stands", Args: exactly(1),
		Long: `Make new sandboxes with the memory and the disk of a running one, which goes on at once, and print their ids. What runs
in it goes on in each of them as new sessions. They have its labels but for the name, unless --label says others.`,
	}
	leave := noWait(cmd)
	fs := cmd.Flags()
	fs.IntVarP(&count, "count", "n", 1, "how many, 1 to 20")
	fs.StringArrayVarP(&labels, "label", "l", nil, "a label `NAME=VALUE` of the new ones (repeatable)")
	fs.StringArrayVarP(&env, "env", "e", nil, "environment `NAME=VALUE` of the new ones instead of its own (repeatable); a bare NAME takes its value from here")
	fs.StringVar(&egress, "egress", "", "their egress `PROFILE` instead of its own")
	fs.DurationVar(&wait, "wait", 0, "how long tunnels and transfers may take to end before they are cut")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if count < 1 || count > 20 || wait < 0 {
			return usage("--count must lie between 1 and 20, and --wait can't be negative")
		}
		req := api.ForkRequest{Count: count, Egress: egress, WaitSeconds: int(wait.Seconds())}
		ctx := cmd.Context()
		c, id, err := a.dialFor(ctx, args[0])
		if err != nil {
			return err
		}
		if req.Labels, err = a.forkLabels(ctx, c, id, labels); err != nil {
			return err
		}
		if len(env) > 0 {
			if req.Env, err = pairs(env, "--env", true); err != nil {
				return err
			}
		}
		return a.fork(ctx, c, id, req, *leave)
	}
	return cmd
}

// forkLabels are the labels of a fork's children: two sandboxes of one name
// could not be told apart.
func (a *app) forkLabels(ctx context.Context, c *client.Client, id string, asked []string) (map[string]string, error) {
	if len(asked) > 0 {
		return pairs(asked, "--label", false)
	}
	s, err := c.Sandbox(ctx, id)
	if err != nil || s.Labels[nameLabel] == "" {
		return nil, err
	}
	labels := maps.Clone(s.Labels)
	delete(labels, nameLabel)
	return labels, nil
}

func (a *app) fork(ctx context.Context, c *client.Client, id string, req api.ForkRequest, leave bool) error {
	p := a.begin("forking " + id)
	defer p.end()
	forked, err := c.Fork(ctx, id, req)
	if err != nil {
		return err
	}
	if leave && a.json {
		return a.printJSON(forked)
	}
	if !leave {
		if _, err := c.Wait(ctx, forked.Operation.Id, p.operation("forking "+id)); err != nil {
			return err
		}
	}
	byID, children := map[string]string{}, api.SandboxList{Items: []api.Sandbox{}}
	var ids []string
	for _, child := range forked.Children {
		ids, byID[child.Sandbox.Id] = append(ids, child.Sandbox.Id), child.Operation.Id
	}
	err = a.each(ids, func(child string) error {
		if !leave {
			if _, err := c.Wait(ctx, byID[child], p.operation("creating "+child)); err != nil {
				return err
			}
		}
		if !a.json {
			_, err := fmt.Fprintln(a.out, child)
			return err
		}
		s, err := c.Sandbox(ctx, child)
		children.Items = append(children.Items, s)
		return err
	})
	if a.json {
		if printed := a.printJSON(children); err == nil {
			err = printed
		}
	}
	return err
}

func newRollback(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "rollback [flags] SANDBOX SNAPSHOT", Short: "Take a sandbox back to an earlier snapshot of its past", Args: exactly(2),
		Long: `Take a sandbox back to an earlier snapshot of itself or of one that it comes from, in place. What runs now ends; what
ran when a memory snapshot was taken goes on as new sessions.`,
	}
	leave := noWait(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		c, id, err := a.dialFor(ctx, args[0])
		if err != nil {
			return err
		}
		snapshot, err := a.snapshot(ctx, c, args[1], id)
		if err != nil {
			return err
		}
		p := a.begin("taking " + id + " back")
		defer p.end()
		accepted, err := c.Rollback(ctx, id, snapshot)
		s := accepted.Sandbox
		if err == nil && !*leave {
			if _, err = c.Wait(ctx, accepted.Operation.Id, p.operation("taking "+id+" back")); err == nil {
				s, err = c.Sandbox(ctx, id)
			}
		}
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(s)
		}
		_, err = fmt.Fprintln(a.out, id)
		return err
	}
	return cmd
}
