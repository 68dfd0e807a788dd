package chaos

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// asked is a verb as a worker puts it.
type asked struct {
	verb string
	to   *image // of a rollback
	kind string // of a snapshot
	path string
	body any
}

// accept is what all of the lifecycle's answers have in common.
type accept struct {
	Sandbox   api.Sandbox           `json:"sandbox"`
	Snapshot  api.Snapshot          `json:"snapshot"`
	Operation api.Operation         `json:"operation"`
	Children  []api.AcceptedSandbox `json:"children"`
}

// choose picks a verb for b: mostly one that is allowed.
func (k *worker) choose(b *box) asked {
	var fit []string
	for _, m := range moves {
		if m.from == b.state {
			fit = append(fit, m.verb)
		}
	}
	a := asked{verb: verbs[k.rnd.IntN(len(verbs))]}
	if k.rnd.IntN(6) > 0 {
		a.verb = fit[k.rnd.IntN(len(fit))]
	}
	if a.verb == "rollback" && len(k.pool) == 0 {
		a.verb = "stop"
	}
	a.path = "/v1/sandboxes/" + b.id + "/" + a.verb
	switch a.verb {
	case "stop":
		a.path += fmt.Sprintf("?grace_seconds=%d", []int{0, 0, 5}[k.rnd.IntN(3)])
	case "snapshot":
		a.kind = []string{"memory", "disk"}[k.rnd.IntN(2)]
		a.path, a.body = a.path+"s", api.SnapshotRequest{Kind: api.SnapshotKind(a.kind), Name: "s"}
	case "fork":
		a.body = api.ForkRequest{Count: 1 + k.rnd.IntN(2)}
	case "rollback":
		a.to = k.pool[k.rnd.IntN(len(k.pool))]
		for _, i := range k.pool { // one of its own, if there is one
			if i.owner == b.id && k.rnd.IntN(3) > 0 {
				a.to = i
			}
		}
		a.body = api.RollbackRequest{Snapshot: a.to.id}
	}
	return a
}

// verb asks b for something and follows it to its end.
func (k *worker) verb(b *box) error {
	a := k.choose(b)
	if a.verb == "snapshot" && len(k.pool) >= maxPool || a.verb == "fork" && len(k.boxes) >= maxBoxes {
		return nil
	}
	want, refusal := b.wants(a.verb, a.to)
	m := k.mark()
	killed := k.sabotage(b, refusal == "" || refusal == either)
	var ans accept
	r, retried, err := k.ask(k.rnd, "POST", a.path, a.body, &ans)
	victim := killed()
	if err != nil {
		return err
	}
	if r != nil {
		return k.refused(b, a, r, refusal, victim)
	}
	if refusal != "" && refusal != either {
		return fmt.Errorf("%s was accepted, and should be refused with %s", a.verb, refusal)
	}
	b.ops[ans.Operation.Id] = a.verb
	b.note("%s %s of %s accepted", a.verb, ans.Operation.Id, b.state)
	if ans.Operation.Verb != a.verb || ans.Operation.Sandbox != b.id {
		return fmt.Errorf("%s was answered with an operation of %s: %+v", a.verb, ans.Operation.Sandbox, ans.Operation)
	}
	if ans.Sandbox.Id != "" && !retried && string(ans.Sandbox.State) != want.via {
		return fmt.Errorf("%s was accepted and the sandbox is %s instead of %s", a.verb, ans.Sandbox.State, want.via)
	}
	for _, c := range ans.Children { // they have rows from now on
		child := newBox(c.Sandbox.Id, b, nil)
		child.ops[c.Operation.Id] = "create"
		k.boxes = append(k.boxes, child)
	}
	if k.rnd.IntN(25) == 0 && a.verb != "fork" {
		time.Sleep(time.Duration(k.rnd.IntN(300)) * time.Millisecond)
		k.delete(b) // supersedes it, unless it was faster
		op, err := k.wait(ans.Operation.Id)
		if err == nil && op.State == api.OperationSucceeded {
			k.taken(b, a, op) // a named snapshot outlives its sandbox
		}
		return err
	}
	return k.follow(b, a, want, ans, m, victim)
}

// follow waits for an operation, and applies to the model what came of it.
func (k *worker) follow(b *box, a asked, want move, ans accept, m mark, victim bool) error {
	op, err := k.wait(ans.Operation.Id)
	if err != nil {
		return err
	}
	why := k.since(m)
	b.note("%s %s: %s; under %q, its machine killed: %v", a.verb, op.Id, outcome(op), why, victim)
	if victim {
		why = strings.TrimPrefix(why+"+machine", "+")
	}
	var living []*counter
	var made *image
	if op.State == api.OperationSucceeded {
		k.rep.count("operations", a.verb+": succeeded")
		made = k.taken(b, a, op)
		if a.verb == "stop" {
			for _, c := range b.counters {
				c.mayExit = true
			}
		}
		living = b.succeed(a.verb, want, made, a.to)
	} else {
		k.rep.count("operations", a.verb+": failed, under "+why)
		k.rep.count("failures", fmt.Sprintf("%s %s/%s, under %s", a.verb, op.Error.Class, op.Error.Code, why))
		if !excused(why) {
			return fmt.Errorf("%s failed by itself (%s): %s %s: %s", a.verb, why, op.Error.Class, op.Error.Code, op.Error.Message)
		}
		if a.verb == "stop" {
			for _, c := range b.counters {
				c.mayExit = true // its grace may have passed before it failed
			}
		}
		b.state = want.otherwise
		if a.verb == "rollback" && hasMachine(want.otherwise) {
			b.gaveUp = true // the machine that it was to replace, maybe
		}
	}
	if err := k.aftermath(b, victim || b.gaveUp); err != nil {
		return err
	}
	if b.state == "running" {
		if err := k.inherit(b, living); err != nil {
			return err
		}
	}
	if a.verb == "snapshot" && made != nil {
		if err := k.checkSnapshot(made); err != nil {
			return err
		}
	}
	if err := k.children(b, ans.Children, made, m); err != nil {
		return err
	}
	if b.state == "running" {
		return k.checkRunning(b)
	}
	return k.checkKept(b)
}

// checkSnapshot compares the row of a named snapshot with the model.
func (k *worker) checkSnapshot(i *image) error {
	var s api.Snapshot
	r, _, err := k.ask(k.rnd, "GET", "/v1/snapshots/"+i.id, nil, &s)
	if err != nil {
		return err
	}
	if r != nil {
		return fmt.Errorf("read the snapshot %s: %s", i.id, r)
	}
	if s.State != api.SnapshotReady || s.Purpose != "named" || s.Sandbox != i.owner || s.Parent != i.before ||
		(s.Kind == api.SnapshotMemory) != i.memory || s.SizeBytes <= 0 || s.TakenAt.IsZero() || s.Needs == nil {
		return fmt.Errorf("the snapshot %s is told as %+v; the model has %+v", i.id, s, *i)
	}
	k.rep.count("checks", "a snapshot's row is as the model has it")
	return nil
}

// taken is the image that a verb took.
func (k *worker) taken(b *box, a asked, op api.Operation) *image {
	switch a.verb {
	case "suspend", "fork":
		return b.snapshotOf(op.Snapshot, true, false)
	case "stop":
		return b.snapshotOf(op.Snapshot, false, false)
	case "snapshot":
		i := b.snapshotOf(op.Snapshot, a.kind == "memory", true)
		k.pool = append(k.pool, i)
		return i
	}
	return nil
}

// children follows the children of a fork.
func (k *worker) children(b *box, list []api.AcceptedSandbox, made *image, m mark) error {
	for _, c := range list {
		i := slices.IndexFunc(k.boxes, func(o *box) bool { return o.id == c.Sandbox.Id })
		child := k.boxes[i]
		if made == nil {
			op, err := k.wait(c.Operation.Id)
			if err != nil {
				return err
			}
			if op.State != api.OperationFailed {
				return fmt.Errorf("the fork failed, and its child %s was made", child.id)
			}
			child.state = "failed"
			k.delete(child)
			continue
		}
		k.blame(child, k.created(child, c.Operation.Id, made, m))
	}
	return nil
}

// refused holds a refusal to what the model wants.
func (k *worker) refused(b *box, a asked, r *refusal, want string, victim bool) error {
	k.rep.count("refusals", fmt.Sprintf("%s/%s", r.Class, r.Code))
	if victim { // it may have been failed by then
		return k.aftermath(b, true)
	}
	if want == "" {
		return fmt.Errorf("%s was refused: %s", a.verb, r)
	}
	if want == either {
		want = "has_snapshot"
	}
	if r.Code != want || r.Class != api.ClassFailedPrecondition || r.status != 409 {
		return fmt.Errorf("%s was refused with %s instead of %s", a.verb, r, want)
	}
	k.rep.count("checks", "a refusal has the right class and code")
	return k.settled(b)
}

// delete deletes b, whatever it does, and compares its operations with what
// was asked of it: none lost, none doubled.
func (k *worker) delete(b *box) {
	k.remove(b)
	var op api.Operation
	r, _, err := k.ask(k.rnd, "DELETE", "/v1/sandboxes/"+b.id, nil, &op)
	if r != nil || err != nil {
		k.rep.wrong("worker %d: delete %s: %v %v", k.n, b.id, r, err)
		return
	}
	b.ops[op.Id] = "delete"
	if op, err = k.wait(op.Id); err != nil || op.State != api.OperationSucceeded {
		k.rep.wrong("worker %d: delete %s: %+v: %v", k.n, b.id, op.Error, err)
		return
	}
	k.rep.count("operations", "delete: succeeded")
	if s, err := k.row(b.id); err != nil || s.State != api.SandboxDeleted {
		k.rep.wrong("worker %d: %s was deleted and is %s: %v", k.n, b.id, s.State, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	list, err := k.c.Operations(ctx, client.OperationFilter{Sandbox: b.id})
	if err != nil {
		k.rep.wrong("worker %d: list the operations of %s: %v", k.n, b.id, err)
		return
	}
	seen := map[string]bool{}
	for _, o := range list {
		if b.ops[o.Id] != o.Verb {
			k.rep.wrong("worker %d: %s has the operation %s (%s, key %s), which nobody asked for", k.n, b.id, o.Id, o.Verb, o.Key)
		}
		if seen[o.Id] || o.State != api.OperationSucceeded && o.State != api.OperationFailed {
			k.rep.wrong("worker %d: %s is deleted and its operation %s (%s) is %s", k.n, b.id, o.Id, o.Verb, o.State)
		}
		seen[o.Id] = true
	}
	for id, verb := range b.ops {
		if !seen[id] {
			k.rep.wrong("worker %d: the operation %s (%s of %s) is lost", k.n, id, verb, b.id)
		}
	}
	k.rep.count("checks", "a sandbox's operations are those that were asked for")
}

// deleteSnapshot deletes a named snapshot.
func (k *worker) deleteSnapshot() error {
	if len(k.pool) == 0 {
		return nil
	}
	n := k.rnd.IntN(len(k.pool))
	i := k.pool[n]
	used, sure := false, true
	for _, b := range k.boxes {
		if b.image == i {
			used = true
			sure = sure && !b.checkpoints
		}
	}
	r, _, err := k.ask(k.rnd, "DELETE", "/v1/snapshots/"+i.id, nil, nil)
	switch {
	case err != nil:
		k.rep.wrong("worker %d: delete the snapshot %s: %v", k.n, i.id, err)
	case r == nil && used && sure:
		k.rep.wrong("worker %d: the snapshot %s was deleted, and a sandbox needs it", k.n, i.id)
	case r != nil && r.Code == "snapshot_in_use" && used:
		k.rep.count("refusals", "failed_precondition/snapshot_in_use")
		return nil
	case r != nil && r.Class != api.ClassNotFound: // a retry may find it gone
		k.rep.wrong("worker %d: delete the snapshot %s: %s", k.n, i.id, r)
	default:
		k.rep.count("operations", "delete a snapshot: succeeded")
	}
	for _, o := range k.pool { // what came after it comes after the one before it now
		if o.before == i.id {
			o.before = i.before
		}
	}
	for _, b := range k.boxes {
		if b.base == i.id {
			b.base = i.before
		}
		if b.image != nil && b.image.before == i.id {
			b.image.before = i.before
		}
	}
	k.pool = slices.Delete(k.pool, n, n+1)
	return nil
}
