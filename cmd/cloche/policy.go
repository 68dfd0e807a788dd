package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
)

// policyFlags are the flags by which a sandbox's policy is said.
type policyFlags struct {
	idle, onExpiry, onCrash, checkpoint string
	wake                                bool
	set                                 func(string) bool // whether a flag was named
}

func (f *policyFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.idle, "idle", "", "what is done when nothing has used it for so long: `DURATION[:ACTION]`, e.g. 6h:suspend (or stop, delete); none for nothing")
	fs.StringVar(&f.onExpiry, "on-expiry", "", "what the end of the TTL does: delete, suspend or stop")
	fs.StringVar(&f.onCrash, "on-crash", "", "what follows when its machine ends by itself: none, or start (from the recovery point)")
	fs.BoolVar(&f.wake, "wake-on-access", false, "commands, input, file changes and tunnels wake it")
	fs.StringVar(&f.checkpoint, "checkpoint", "", "how often its disk is saved while it runs, e.g. 5m; never for not at all")
	f.set = fs.Changed
}

// request is what the flags change; nil where none was named.
func (f *policyFlags) request() (*api.PolicyRequest, error) {
	var p api.PolicyRequest
	named := false
	for name, read := range map[string]func() error{
		"idle": func() error { return f.readIdle(&p.Idle) },
		"on-expiry": func() error {
			return reaction("--on-expiry", f.onExpiry, &p.OnExpiry, api.ReactDelete, api.ReactSuspend, api.ReactStop)
		},
		"on-crash":       func() error { return reaction("--on-crash", f.onCrash, &p.OnCrash, api.ReactNone, api.ReactStart) },
		"wake-on-access": func() error { p.WakeOnAccess = &f.wake; return nil },
		"checkpoint":     func() error { return f.readCheckpoint(&p) },
	} {
		if !f.set(name) {
			continue
		}
		named = true
		if err := read(); err != nil {
			return nil, err
		}
	}
	if !named {
		return nil, nil
	}
	return &p, nil
}

func (f *policyFlags) readIdle(to *api.IdleRequest) error {
	if f.idle == "none" {
		to.Action = api.ReactNone
		return nil
	}
	after, action, ok := strings.Cut(f.idle, ":")
	d, err := time.ParseDuration(after)
	if err != nil || d < 10*time.Second {
		return usage("--idle must be like 6h or 6h:suspend (at least 10s), or none, not %q", f.idle)
	}
	to.AfterSeconds = int64(d / time.Second)
	if !ok {
		action = string(api.ReactSuspend)
	}
	return reaction("--idle", action, &to.Action, api.ReactSuspend, api.ReactStop, api.ReactDelete, api.ReactNone)
}

func (f *policyFlags) readCheckpoint(p *api.PolicyRequest) error {
	var n int64
	if f.checkpoint != "never" {
		d, err := time.ParseDuration(f.checkpoint)
		if err != nil || d < time.Second {
			return usage("--checkpoint must be like 5m (at least 1s), or never, not %q", f.checkpoint)
		}
		n = int64(d / time.Second)
	}
	p.CheckpointSeconds = &n
	return nil
}

func reaction(flag, s string, to *api.Reaction, may ...api.Reaction) error {
	*to = api.Reaction(s)
	if slices.Contains(may, *to) {
		return nil
	}
	names := make([]string, 0, len(may))
	for _, m := range may {
		names = append(names, string(m))
	}
	return usage("%s can't be %q, but %s", flag, s, strings.Join(names, ", "))
}

// policyText says a policy in words.
func policyText(p api.Policy) string {
	parts := []string{"never idle"}
	if p.Idle.Action != api.ReactNone {
		parts[0] = fmt.Sprintf("%s after %s idle", p.Idle.Action, span(seconds(p.Idle.AfterSeconds)))
	}
	parts = append(parts, fmt.Sprintf("%s when the TTL ends", p.OnExpiry))
	if p.OnCrash == api.ReactStart {
		parts = append(parts, "start again after a crash")
	}
	if p.WakeOnAccess {
		parts = append(parts, "woken by access")
	}
	if p.CheckpointSeconds > 0 {
		parts = append(parts, "disk saved every "+span(seconds(p.CheckpointSeconds)))
	}
	return strings.Join(parts, ", ")
}

func seconds(n int64) time.Duration { return time.Duration(n) * time.Second }
