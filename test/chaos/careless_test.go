package chaos

import (
	"context"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/node"
	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/test/harness"
)

// The scenarios below provoke, each by itself, what one precaution is there
// for. They pass with it, and the tests beside them demand that they fail
// without it.

// TestAFailedCreateLeavesNothing kills each machine of a create as it comes up,
// until the create fails: nothing of it may be left on the host.
func TestAFailedCreateLeavesNothing(t *testing.T) {
	w := newWorld(t, settings{}, 0)
	k := &worker{world: w, rnd: newRand(seedOf(t), 0)}
	w.level() // the control process runs from here on
	var a api.AcceptedSandbox
	if r, _, err := w.ask(k.rnd, "POST", "/v1/sandboxes", api.CreateSandboxRequest{Template: "base"}, &a); r != nil || err != nil {
		t.Fatal(r, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	killed := make(chan int)
	go func() { // ends with ctx
		n := 0
		for ctx.Err() == nil {
			if harness.KillSentry(a.Sandbox.Id) > 0 {
				n++
			}
			time.Sleep(5 * time.Millisecond)
		}
		killed <- n
	}()
	op, err := w.wait(a.Operation.Id)
	stop()
	n := <-killed
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("after %d kills: %s, %+v", n, op.State, op.Error)
	if op.State != api.OperationFailed {
		t.Skipf("SKIP: NOT CHECKED: the create was faster than its %d kills", n)
	}
	if left := w.d.WaitCensus(15 * time.Second); len(left) > 0 {
		t.Errorf("left by a create that failed:\n%s", strings.Join(left, "\n"))
	}
	if b := newBox(a.Sandbox.Id, nil, nil); true {
		b.ops[a.Operation.Id] = "create"
		k.delete(b)
	}
}

// TestASnapshotIsNeverHalf kills the daemon between a snapshot's files and its
// manifest: what bears a snapshot's name at that instant must be one, and the
// suspend goes on when the daemon is back.
func TestASnapshotIsNeverHalf(t *testing.T) {
	w := newWorld(t, settings{}, 0)
	k := &worker{world: w, rnd: newRand(seedOf(t), 0)}
	id := w.d.Must("create", "base")
	w.d.Must("exec", "-u", "root", id, "--", "sh", "-c", "echo kept > /var/tmp/kept")
	w.d.Kill9()
	w.arm("node.snapshot.written")
	w.d.Serve()
	var ans accept
	came := make(chan error, 1)
	go func() { // ends when the daemon is back
		_, _, err := w.ask(k.rnd, "POST", "/v1/sandboxes/"+id+"/suspend", nil, &ans)
		came <- err
	}()
	for end := time.Now().Add(time.Minute); w.d.Running(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the failpoint is not hit")
		}
	}
	s, err := snapshot.Open(filepath.Join(w.d.State, "snapshots"))
	if err != nil {
		t.Fatal(err)
	}
	ids, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, snap := range ids {
		if _, err := s.Verify(t.Context(), snap); err != nil {
			t.Errorf("what bears a snapshot's name is none: %v", err)
		}
	}
	w.arm("")
	w.d.Serve()
	if err := <-came; err != nil {
		t.Fatal(err)
	}
	if op, err := w.wait(ans.Operation.Id); err != nil || op.State != api.OperationSucceeded {
		t.Fatalf("the suspend ended as %s: %+v %v", op.State, op.Error, err)
	}
	if r, _, err := w.ask(k.rnd, "POST", "/v1/sandboxes/"+id+"/restore", nil, &ans); r != nil || err != nil {
		t.Fatal(r, err)
	}
	if op, err := w.wait(ans.Operation.Id); err != nil || op.State != api.OperationSucceeded {
		t.Fatalf("the restore ended as %s: %+v %v", op.State, op.Error, err)
	}
	if got := w.d.Must("exec", "-u", "root", id, "--", "cat", "/var/tmp/kept"); got != "kept" {
		t.Errorf("the file holds %q after the restore", got)
	}
}

// TestAStaleCallIsRefused calls a node with a generation that is older than one
// that it has seen.
func TestAStaleCallIsRefused(t *testing.T) {
	nothing := idle{}
	n, err := node.New(node.Options{
		StateDir: t.TempDir(), Networks: nothing, Recorder: nothing, Concurrency: 1, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- n.Run(ctx) }() // ends with ctx
	defer func() { stop(); <-ended }()
	id := sandbox.NewID(sandbox.KindSandbox)
	if err := n.DeleteMachine(ctx, id, 5); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"delete":  n.DeleteMachine(ctx, id, 3),
		"release": n.ReleaseMachine(ctx, id, 4, sandbox.End{Reason: sandbox.EndStopped}),
	} {
		if e := sandbox.AsError(err); e == nil || e.Class != sandbox.Conflict || e.Code != "stale_generation" {
			t.Errorf("a stale call is taken: %s: %v", what, err)
		}
	}
}

// idle is a host on which there is nothing.
type idle struct{}

func (idle) Create(context.Context, string) (string, error)            { return "", io.EOF }
func (idle) Delete(context.Context, string) error                      { return nil }
func (idle) List(context.Context) ([]string, error)                    { return nil, nil }
func (idle) MachineReady(context.Context, string) error                { return nil }
func (idle) MachineEnded(context.Context, string, sandbox.End) error   { return nil }
func (idle) MachineHeld(context.Context, string) error                 { return nil }
func (idle) MachineBack(string)                                        {}
func (idle) DeleteSandbox(context.Context, string) error               { return nil }
func (idle) Barrier(context.Context, string) error                     { return nil }
func (idle) Living(context.Context, string) ([]sandbox.Session, error) { return nil, nil }
func (idle) Terminate(context.Context, string, time.Duration) error    { return nil }
func (idle) Active(string) int                                         { return 0 }
func (idle) Inherit(context.Context, string, string, int64, []sandbox.Session) ([]sandbox.Session, error) {
	return nil, nil
}

// TestASkippedUndoIsCaught, TestASkippedRenameIsCaught and
// TestASkippedFenceIsCaught show that the scenarios bite.
func TestASkippedUndoIsCaught(t *testing.T) {
	mustFail(t, "TestAFailedCreateLeavesNothing", failpoint.SkipUndo, "left by a create that failed")
}

func TestASkippedRenameIsCaught(t *testing.T) {
	mustFail(t, "TestASnapshotIsNeverHalf", failpoint.SkipRename, "what bears a snapshot's name is none")
}

func TestASkippedFenceIsCaught(t *testing.T) {
	mustFail(t, "TestAStaleCallIsRefused", failpoint.SkipFence, "a stale call is taken")
}
