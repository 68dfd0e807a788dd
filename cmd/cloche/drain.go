package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

const (
	drainWithin = 90 * time.Second
	// drainMargin is what the answer may take beyond the time that it is about.
	drainMargin = 20 * time.Second
)

func newDrain(a *app) *cobra.Command {
	var within time.Duration
	var ifStops bool
	cmd := &cobra.Command{
		Use:   "drain [flags]",
		Short: "Save every sandbox before the host goes down",
		Long: `Suspend every sandbox that has a machine, or save its disk where it can't be suspended, and say what did not fit
into the time. It needs an admin key. The exit code is 5 when something was left, which the host's end would take back
to its last image. A daemon's stop or restart needs no drain, since machines outlive it.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if within < time.Second {
				return usage("--within must be at least a second, not %s", within)
			}
			ctx := cmd.Context()
			if ifStops {
				stops, err := hostStops(ctx)
				if err != nil {
					return err
				}
				if !stops {
					a.note("this host is not going down: nothing was drained")
					return nil
				}
			}
			return a.drain(ctx, within)
		},
	}
	cmd.Flags().DurationVar(&within, "within", drainWithin, "how long it may take")
	cmd.Flags().BoolVar(&ifStops, "if-host-stops", false, "do nothing unless systemd is taking the host down")
	return cmd
}

func (a *app) drain(ctx context.Context, within time.Duration) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, within+drainMargin)
	defer cancel()
	p := a.begin("saving the sandboxes")
	r, err := c.Drain(ctx, within)
	p.end()
	if err != nil {
		return err
	}
	if err := a.printDrain(r); err != nil {
		return err
	}
	if len(r.Left) > 0 {
		return exitError(exitUnavailable)
	}
	return nil
}

func (a *app) printDrain(r api.DrainReport) error {
	if a.json {
		return a.printJSON(r)
	}
	var b strings.Builder
	for _, id := range slices.Sorted(slices.Values(r.Done)) {
		fmt.Fprintf(&b, "saved  %s\n", line(id))
	}
	for _, id := range slices.Sorted(maps.Keys(r.Left)) {
		fmt.Fprintf(&b, "LEFT   %s  %s\n", line(id), line(r.Left[id]))
	}
	fmt.Fprintf(&b, "%d saved, %d left\n", len(r.Done), len(r.Left))
	_, err := fmt.Fprint(a.out, b.String())
	return err
}

// systemctlWait bounds a question to systemd.
const systemctlWait = 10 * time.Second

// systemctl asks systemd something. The answer is what it printed, also where it
// ended with an exit code, which some of its questions have for answers.
func systemctl(ctx context.Context, args ...string) (string, error) {
	return systemctlIn(ctx, systemctlWait, args...)
}

func systemctlIn(ctx context.Context, within time.Duration, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	cmd := exec.CommandContext(ctx, "systemctl", args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "SYSTEMD_PAGER=", "SYSTEMD_COLORS=0")
	out, err := cmd.Output()
	text := strings.TrimSpace(string(out))
	var ended *exec.ExitError
	switch {
	case err == nil:
		return text, nil
	case errors.As(err, &ended) && ended.Exited():
		why := line(string(ended.Stderr))
		if why == "" {
			why = ended.String()
		}
		return text, systemdError("systemctl %s: %s", strings.Join(args, " "), why)
	}
	return text, systemdError("systemctl %s: %v", strings.Join(args, " "), err)
}

func systemdError(format string, args ...any) error {
	return &client.Error{Class: api.ClassUnavailable, Code: "systemd", Message: fmt.Sprintf(format, args...), Hint: "is this host run by systemd?"}
}

// hostStops tells whether systemd is taking the host down. Where it can't be
// told that is an error, and neither answer.
func hostStops(ctx context.Context) (bool, error) {
	state, err := systemctl(ctx, "is-system-running")
	switch state {
	case "stopping":
		return true, nil
	case "running", "degraded", "starting", "initializing", "maintenance":
		return false, nil // some of them with an exit code
	case "":
		return false, err
	}
	jobs, err := systemctl(ctx, "list-jobs", "--no-legend", "--plain")
	if err != nil {
		return false, err
	}
	for _, job := range strings.Split(jobs, "\n") {
		if f := strings.Fields(job); slices.Contains(f, "shutdown.target") && slices.Contains(f, "start") {
			return true, nil
		}
	}
	return false, nil
}
