package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// worker owns a few sandboxes, and nobody else touches those: so a model that
// knows one thing after the other is exact.
type worker struct {
	*world
	n     int
	rnd   *rand.Rand
	boxes []*box
	pool  []*image // named snapshots that are not deleted
	names int
}

// The most that a worker has at once.
const (
	maxBoxes     = 3
	maxPool      = 6
	maxCounters  = 2
	machineKills = 14 // one in so many verbs has its machine killed under it
	agentKills   = 9
)

// run works until the run is over.
func (k *worker) run() {
	for !k.over() {
		k.step()
	}
}

// step does one thing at random.
func (k *worker) step() {
	if len(k.boxes) == 0 || len(k.boxes) < maxBoxes && k.rnd.IntN(8) == 0 {
		k.create()
		return
	}
	b := k.boxes[k.rnd.IntN(len(k.boxes))]
	var err error
	switch n := k.rnd.IntN(100); {
	case n < 6:
		k.delete(b)
		return
	case n < 10:
		err = k.deleteSnapshot()
	case n < 62:
		err = k.verb(b)
	case b.state != "running":
		err = k.checkKept(b)
	case n < 72:
		err = k.write(b)
	case n < 80 && len(b.counters) < maxCounters:
		err = k.startCounter(b)
	case n < 84 && len(b.counters) > 0:
		err = k.finish(b, b.counters[k.rnd.IntN(len(b.counters))])
	case n < 88:
		err = k.killMachine(b)
	default:
		err = k.checkRunning(b)
	}
	k.blame(b, err)
}

// blame tells what is wrong with a sandbox and gives it up.
func (k *worker) blame(b *box, err error) {
	if err == nil {
		return
	}
	k.rep.wrong("worker %d, sandbox %s (model: %s): %v\n\t%s", k.n, b.id, b.state, err, strings.Join(b.history, "\n\t"))
	k.delete(b)
}

// create makes a sandbox of the template or of a snapshot.
func (k *worker) create() {
	no := int64(0)
	req := api.CreateSandboxRequest{
		Resources: api.ResourcesRequest{MemoryMib: 256, DiskMib: 512},
		Policy:    &api.PolicyRequest{CheckpointSeconds: &no},
	}
	checkpoints := k.rnd.IntN(4) == 0
	if checkpoints {
		*req.Policy.CheckpointSeconds = 2
	}
	var from *image
	if len(k.pool) > 0 && k.rnd.IntN(3) == 0 {
		from = k.pool[k.rnd.IntN(len(k.pool))]
		req.Snapshot, req.Resources = from.id, api.ResourcesRequest{}
	} else {
		req.Template = "base"
	}
	m := k.mark()
	var a api.AcceptedSandbox
	r, _, err := k.ask(k.rnd, "POST", "/v1/sandboxes", req, &a)
	if err != nil || r != nil {
		k.rep.wrong("worker %d: create %+v: %v %v", k.n, req, r, err)
		return
	}
	b := newBox(a.Sandbox.Id, nil, from)
	b.checkpoints = checkpoints
	b.ops[a.Operation.Id] = "create"
	k.boxes = append(k.boxes, b)
	if k.rnd.IntN(12) == 0 { // it is superseded
		time.Sleep(time.Duration(k.rnd.IntN(400)) * time.Millisecond)
		k.delete(b)
		return
	}
	k.blame(b, k.created(b, a.Operation.Id, from, m))
}

// created follows the creation of b, from an image or the template, to its end.
func (k *worker) created(b *box, id string, from *image, m mark) error {
	op, err := k.wait(id)
	if err != nil {
		return err
	}
	b.note("create %s: %s", id, outcome(op))
	if op.State == api.OperationFailed {
		return k.createFailed(b, op, m)
	}
	k.rep.count("operations", "create: succeeded")
	var living []*counter
	if from != nil {
		b.image, b.base = from, from.passed()
		living = b.goOnFrom(from)
	}
	if err := k.settled(b); err != nil {
		return err
	}
	if err := k.inherit(b, living); err != nil {
		return err
	}
	if from == nil {
		if err := k.write(b); err != nil {
			return err
		}
		if k.rnd.IntN(3) > 0 {
			if err := k.startCounter(b); err != nil {
				return err
			}
		}
	}
	return k.checkRunning(b)
}

// createFailed is a creation that failed: only what was done to the engine or
// to the disk meanwhile may be its cause.
func (k *worker) createFailed(b *box, op api.Operation, m mark) error {
	b.state = "failed"
	why := k.since(m)
	k.rep.count("operations", "create: failed, under "+why)
	k.rep.count("failures", fmt.Sprintf("create %s/%s, under %s", op.Error.Class, op.Error.Code, why))
	if !excused(why) {
		return fmt.Errorf("the create failed by itself (%s): %s %s: %s", why, op.Error.Class, op.Error.Code, op.Error.Message)
	}
	if err := k.settled(b); err != nil {
		return err
	}
	k.delete(b)
	return nil
}

// excused tells whether an operation may fail under these troubles: what was
// done to the daemon alone never makes one fail.
func excused(why string) bool {
	return strings.Contains(why, "control") || strings.Contains(why, "disk") || strings.Contains(why, "machine")
}

// settled compares a sandbox's row with the model.
func (k *worker) settled(b *box) error {
	s, err := k.row(b.id)
	if err != nil {
		return err
	}
	if string(s.State) != b.state {
		return fmt.Errorf("the sandbox is %s where the model has %s (end %+v)", s.State, b.state, s.End)
	}
	if s.Operation != "" {
		return fmt.Errorf("the sandbox is %s and has an operation under way, %s", s.State, s.Operation)
	}
	if b.state == "failed" && (s.End == nil || s.End.Reason == "") {
		return fmt.Errorf("the sandbox has failed and does not say why")
	}
	if b.state != "failed" && s.End != nil {
		return fmt.Errorf("the sandbox is %s and has the end of a machine: %+v", s.State, s.End)
	}
	if s.Base != b.base {
		return fmt.Errorf("the sandbox's base is %q where the model has %q", s.Base, b.base)
	}
	k.rep.count("checks", "the row is as the model has it")
	return k.adoptImage(b, s)
}

// adoptImage compares the recovery point with the model's, which a checkpoint
// may have replaced meanwhile.
func (k *worker) adoptImage(b *box, s api.Sandbox) error {
	id, want := "", ""
	if s.RecoveryPoint != nil {
		id = s.RecoveryPoint.Snapshot
	}
	if b.image != nil {
		want = b.image.id
	}
	if id == want {
		return nil
	}
	if !b.checkpoints || id == "" {
		return fmt.Errorf("what outlives the machine is %q where the model has %q", id, want)
	}
	i := b.snapshotOf(id, false, false)
	if b.image != nil {
		i.oldest = b.image.oldest
	} else {
		i.oldest = 0
	}
	b.image = i
	k.rep.count("checks", "a checkpoint became the recovery point")
	return nil
}

// write gives the file inside a new version.
func (k *worker) write(b *box) error {
	v := max(b.version, b.vague) + 1
	text := fmt.Sprintf("%d\n", v)
	b.vague = v
	m := k.mark()
	var last error
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		_, last = k.c.WriteFile(ctx, b.id, "/var/tmp/version", strings.NewReader(text), client.WriteOptions{})
		cancel()
		var e *client.Error
		switch {
		case last == nil:
			b.version, b.vague = v, 0
			k.rep.count("operations", "write: done")
			return nil
		case errors.As(last, &e) && !e.Retryable && !strings.Contains(k.since(m), "disk"):
			return fmt.Errorf("write a file: %w", last)
		}
	}
	return fmt.Errorf("a file could not be written within 2 min: %w", last)
}

// checkRunning compares all that can be seen of a running sandbox.
func (k *worker) checkRunning(b *box) error {
	if err := k.settled(b); err != nil {
		return err
	}
	if b.state != "running" {
		return nil
	}
	out, err := k.exec(b.id, "sh", "-c", "cat /proc/sys/kernel/random/boot_id /etc/machine-id; cat /var/tmp/version 2>/dev/null || echo 0")
	if err != nil {
		return fmt.Errorf("look inside: %w", err)
	}
	f := strings.Fields(out)
	if len(f) != 3 {
		return fmt.Errorf("look inside: %q", out)
	}
	if b.boot != "" && f[0] != b.boot {
		return fmt.Errorf("its boot id was %s and is %s", b.boot, f[0])
	}
	if b.machine != "" && f[1] != b.machine {
		return fmt.Errorf("its machine id was %s and is %s", b.machine, f[1])
	}
	b.boot, b.machine = f[0], f[1]
	for _, o := range k.boxes {
		if o != b && (o.machine == b.machine || o.boot != "" && o.boot == b.boot) {
			return fmt.Errorf("it has the machine id or boot id of %s", o.id)
		}
	}
	v := 0
	if _, err := fmt.Sscanf(f[2], "%d", &v); err != nil {
		return fmt.Errorf("the file holds %q", f[2])
	}
	low, high := b.version, b.version
	if b.vague > 0 {
		low, high = min(b.version, b.vague), max(b.version, b.vague)
	}
	if v < low || v > high {
		return fmt.Errorf("the file has version %d, not one of %d to %d", v, low, high)
	}
	b.version, b.vague = v, 0
	k.rep.count("checks", "identity and file inside are as the model has them")
	if err := k.checkLive(b); err != nil {
		return err
	}
	return k.checkEnded(b)
}

// checkKept compares what can be seen of a sandbox that does not run.
func (k *worker) checkKept(b *box) error {
	if err := k.settled(b); err != nil {
		return err
	}
	for _, c := range b.counters {
		info, err := k.session(b, c)
		if err != nil {
			return err
		}
		if info.State != api.SessionRunning && (info.State != api.SessionExited || !c.mayExit) {
			return fmt.Errorf("the session %s of a sandbox that is %s is %s", c.id, b.state, info.State)
		}
		if err := k.readLog(b, c, info); err != nil {
			return err
		}
	}
	return k.checkEnded(b)
}

// remove takes b out of the worker's hands.
func (k *worker) remove(b *box) {
	if i := slices.Index(k.boxes, b); i >= 0 {
		k.boxes = slices.Delete(k.boxes, i, i+1)
	}
}

// outcome says how an operation ended.
func outcome(op api.Operation) string {
	if op.Error == nil {
		return string(op.State)
	}
	return fmt.Sprintf("%s, %s/%s: %s", op.State, op.Error.Class, op.Error.Code, op.Error.Message)
}
