package control

import (
	"context"
	"slices"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// PolicyPatch changes a policy; nil fields stay as they are.
type PolicyPatch struct {
	IdleAfter    *time.Duration    `json:"idle_after,omitempty"`
	IdleAction   *sandbox.Reaction `json:"idle_action,omitempty"`
	OnExpiry     *sandbox.Reaction `json:"on_expiry,omitempty"`
	OnCrash      *sandbox.Reaction `json:"on_crash,omitempty"`
	WakeOnAccess *bool             `json:"wake_on_access,omitempty"`
	Checkpoint   *time.Duration    `json:"checkpoint,omitempty"`
}

// apply is p as the patch changes it, validated.
func (patch PolicyPatch) apply(p sandbox.Policy) (sandbox.Policy, error) {
	set(&p.Idle.After, patch.IdleAfter)
	set(&p.Idle.Action, patch.IdleAction)
	set(&p.OnExpiry, patch.OnExpiry)
	set(&p.OnCrash, patch.OnCrash)
	set(&p.WakeOnAccess, patch.WakeOnAccess)
	set(&p.Checkpoint, patch.Checkpoint)
	return p, ValidatePolicy(p)
}

func set[T any](v, to *T) {
	if to != nil {
		*v = *to
	}
}

// ValidatePolicy checks a whole policy.
func ValidatePolicy(p sandbox.Policy) error {
	for _, f := range []struct {
		name string
		is   sandbox.Reaction
		may  []sandbox.Reaction
	}{
		{"idle action", p.Idle.Action, []sandbox.Reaction{sandbox.ReactSuspend, sandbox.ReactStop, sandbox.ReactDelete, sandbox.ReactNone}},
		{"expiry action", p.OnExpiry, []sandbox.Reaction{sandbox.ReactDelete, sandbox.ReactSuspend, sandbox.ReactStop}},
		{"crash action", p.OnCrash, []sandbox.Reaction{sandbox.ReactNone, sandbox.ReactStart}},
	} {
		if !slices.Contains(f.may, f.is) {
			return invalid("bad_policy", "%s can't be the %s", quote(string(f.is)), f.name).WithHint("one of %v", f.may)
		}
	}
	if p.Idle.Action != sandbox.ReactNone && (p.Idle.After < sandbox.MinIdle || p.Idle.After > sandbox.MaxIdle) {
		return invalid("bad_policy", "the idle time must lie between %s and %s, not %s", sandbox.MinIdle, sandbox.MaxIdle, p.Idle.After).
			WithHint("to do nothing, make the idle action none")
	}
	if p.Checkpoint != 0 && (p.Checkpoint < sandbox.MinCheckpoint || p.Checkpoint > sandbox.MaxCheckpoint) {
		return invalid("bad_policy", "the time between checkpoints must lie between %s and %s or be 0 (none), not %s",
			sandbox.MinCheckpoint, sandbox.MaxCheckpoint, p.Checkpoint)
	}
	return nil
}

// SetPolicy changes what Cloche does to a sandbox on its own.
func (c *Control) SetPolicy(ctx context.Context, who sandbox.Caller, id string, patch PolicyPatch) (sandbox.Sandbox, error) {
	if err := c.allowed(who, sandbox.ActChange, sandbox.KindSandbox, "sandbox", id); err != nil {
		return sandbox.Sandbox{}, err
	}
	// A patch is read, changed and written: two at once must not undo each other.
	c.policies.Lock()
	defer c.policies.Unlock()
	sb, err := c.store.Sandbox(ctx, who.Scope(), id)
	if err != nil {
		return sb, err
	}
	p, err := patch.apply(sb.Policy)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err = c.store.SetPolicy(ctx, who.Scope(), id, p)
	c.bell.ring("")
	return seen(who, sb), err
}
