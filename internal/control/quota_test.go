package control_test

import (
	"context"
	"testing"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

func TestCapacityAndQuotas(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		asked := 0
		w.node.set(func(n *fakeNode) {
			n.host = sandbox.Capacity{MilliCPU: 1 << 20, MemoryMiB: 2500}
			n.before = func(_ context.Context, call, _ string) error {
				if call == "capacity" {
					asked++
				}
				return nil
			}
		})
		time.Sleep(2 * time.Second)
		first, second := w.running(), w.running()
		if asked != 1 {
			t.Errorf("the node was asked %d times within a second", asked)
		}
		_, _, _, err := w.c.CreateSandbox(ctx, w.user, control.CreateRequest{Template: "base"}, sandbox.Idempotency{})
		if !sandbox.IsClass(err, sandbox.NoCapacity) {
			t.Errorf("a third GiB of 2.5: %v", err)
		}
		w.done(first, sandbox.VerbSuspend)
		third := w.running()
		if _, err := w.do(first, sandbox.VerbRestore); !sandbox.IsClass(err, sandbox.NoCapacity) {
			t.Errorf("restore: %v", err)
		}
		time.Sleep(2 * time.Second)
		w.node.fails("capacity", errBusy)
		if _, err := w.do(first, sandbox.VerbRestore); !sandbox.IsClass(err, sandbox.Unavailable) {
			t.Errorf("restore on a host that can't tell: %v", err)
		}
		w.done(second, sandbox.VerbSuspend) // frees, whatever the node can tell
		w.ended(w.del(third.ID))
		w.node.heals()
		w.done(first, sandbox.VerbRestore)

		project, err := w.c.SetQuotas(ctx, w.admin, w.user.Project, sandbox.Quotas{Running: 1})
		if err != nil || project.Quotas.Running != 1 {
			t.Errorf("%+v %v", project, err)
		}
		if _, err := w.do(second, sandbox.VerbRestore); !sandbox.IsClass(err, sandbox.Quota) {
			t.Errorf("beyond the quota: %v", err)
		}
		u, q, err := w.c.Usage(ctx, w.reader)
		if err != nil || q.Running != 1 || u.Running != 1 || u.Suspended != 1 {
			t.Errorf("%+v %+v %v", u, q, err)
		}
		if _, err := w.c.SetQuotas(ctx, w.user, w.user.Project, sandbox.Quotas{}); !sandbox.IsClass(err, sandbox.Denied) {
			t.Errorf("a user sets his quotas: %v", err)
		}
		if _, err := w.c.SetQuotas(ctx, w.admin, w.user.Project, sandbox.Quotas{DiskMiB: -1}); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("a negative quota: %v", err)
		}
	})
}
