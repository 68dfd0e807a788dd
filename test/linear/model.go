// Package linear checks that a sandbox's lifecycle is linearizable: that what
// any number of clients were answered at once could have been answered to
// one client after the other.
//
// Its model of one sandbox is written by hand from the documented table, and
// takes nothing from internal/sandbox: a verb is accepted or refused at one
// instant within its call, its operation has its effect at one instant between
// the call and when somebody saw it ended, a look is a read. The suites run
// random histories against control over a fake node (this package's tests) and
// against the built binary with real machines (test/e2e).
package linear

import (
	"fmt"
	"slices"
	"strings"

	"github.com/anishathalye/porcupine"
)

// Kind is what a step of a history is.
type Kind string

// The kinds of steps.
const (
	KindAsk   Kind = "ask"   // a verb was asked for
	KindEnd   Kind = "end"   // an operation ended
	KindLook  Kind = "look"  // the sandbox was looked at
	KindCrash Kind = "crash" // its machine was killed
)

// Ask is one call of a verb.
type Ask struct {
	Verb string
	Key  string // idempotency key; "" is none
	To   string // rollback: the snapshot
	Disk bool   // snapshot: of the disk alone
}

// Input is one step as it was asked for.
type Input struct {
	Kind Kind
	Ask  Ask
	Op   string // KindEnd
}

// Answer is what a step was answered. Fields that are told nowhere stay empty.
type Answer struct {
	Refused    string // "class/code"; "" is accepted
	Op         string // the operation that was begun, or is under way
	Snapshot   string // what a snapshot will be
	State      string // KindLook
	Generation int64  // KindLook, where it is told
	Failed     string // KindEnd: the failure's code; "" is success
}

// row is one line of the documented table.
type row struct{ via, to, otherwise string }

// table is docs/lifecycle.md's, by state and verb. What is not here is refused
// with failed_precondition/wrong_state.
var table = map[string]map[string]row{
	"running": {
		"pause": {"pausing", "paused", "running"}, "suspend": {"suspending", "suspended", "running"},
		"stop": {"stopping", "stopped", "running"}, "snapshot": {"snapshotting", "running", "running"},
		"fork": {"forking", "running", "running"}, "rollback": {"rolling_back", "running", "running"},
	},
	"paused": {
		"resume": {"resuming", "running", "paused"}, "wake": {"resuming", "running", "paused"},
		"suspend": {"suspending", "suspended", "paused"}, "stop": {"stopping", "stopped", "paused"},
		"snapshot": {"snapshotting", "paused", "paused"}, "rollback": {"rolling_back", "running", "paused"},
	},
	"suspended": {
		"restore": {"restoring", "running", "suspended"}, "wake": {"restoring", "running", "suspended"},
		"rollback": {"rolling_back", "running", "suspended"},
	},
	"stopped": {
		"start": {"starting", "running", "stopped"}, "wake": {"starting", "running", "stopped"},
		"rollback": {"rolling_back", "running", "stopped"},
	},
	"failed": {"start": {"starting", "running", "failed"}, "rollback": {"rolling_back", "running", "failed"}},
}

// What a refusal of the model is called.
const (
	wrongState  = "failed_precondition/wrong_state"
	hasDisk     = "failed_precondition/has_disk"
	notReady    = "failed_precondition/snapshot_not_ready"
	noSnapshot  = "not_found/snapshot_not_found"
	superseded  = "superseded"
	machineGone = "failed"
)

// state is one sandbox in the model. It is comparable, and never changed.
type state struct {
	at         string
	op         string // under way
	verb, from string // of op
	snap       string // what op takes or goes back to
	image      string // kind of what outlives the machine: "", "memory" or "disk"
	generation int64
	crashed    bool // the present machine was killed and the row has not heard it
	past       string
	keys       string
	snaps      string
}

// The sets of a state are sorted words, each "name=value", so that states
// compare.
func put(set, name, value string) string {
	words := slices.DeleteFunc(strings.Fields(set), func(w string) bool { return strings.HasPrefix(w, name+"=") })
	words = append(words, name+"="+value)
	slices.Sort(words)
	return strings.Join(words, " ")
}

func get(set, name string) (string, bool) {
	for w := range strings.FieldsSeq(set) {
		if v, ok := strings.CutPrefix(w, name+"="); ok {
			return v, true
		}
	}
	return "", false
}

// Model is the sequential model of one sandbox's life. It begins with its create.
var Model = porcupine.NondeterministicModel{
	Init: func() []any { return []any{state{}} },
	Step: func(s, input, output any) []any {
		var next []any
		for _, n := range step(s.(state), input.(Input), output.(Answer)) {
			next = append(next, n)
		}
		return next
	},
	DescribeOperation: func(input, output any) string { return Describe(input.(Input), output.(Answer)) },
	DescribeState:     func(s any) string { return fmt.Sprintf("%+v", s) },
}

func step(s state, in Input, out Answer) []state {
	switch in.Kind {
	case KindAsk:
		return asked(s, in.Ask, out)
	case KindEnd:
		return ended(s, in.Op, out.Failed)
	case KindLook:
		if out.State == s.at && out.Op == s.op && (out.Generation == 0 || out.Generation == s.generation) {
			return []state{s}
		}
		return nil
	case KindCrash:
		return crashed(s)
	}
	return nil
}

// asked is a verb's acceptance or refusal.
func asked(s state, a Ask, out Answer) []state {
	if op, again := get(s.keys, a.Key); a.Key != "" && again {
		if out.Refused == "" && out.Op == op {
			return []state{s}
		}
		return nil
	}
	if a.Verb == "delete" && s.at == "deleting" { // what is under way is answered
		if out.Refused == "" && out.Op == s.op {
			return []state{s}
		}
		return nil
	}
	r, refusals := lookup(s, a)
	if len(refusals) > 0 {
		if slices.Contains(refusals, out.Refused) {
			return []state{s}
		}
		return nil
	}
	if out.Refused != "" || out.Op == "" {
		return nil
	}
	n := s
	if s.op != "" {
		n.past = put(n.past, s.op, superseded)
	}
	n.op, n.verb, n.from, n.at = out.Op, a.Verb, s.at, r.via
	n.generation++
	n.snap = a.To
	if a.Verb == "snapshot" {
		n.snap = out.Snapshot
		n.snaps = put(n.snaps, n.snap, "creating")
	}
	if a.Key != "" {
		n.keys = put(n.keys, a.Key, out.Op)
	}
	return []state{n}
}

// lookup is the table's line for a verb, or what it may be refused with.
func lookup(s state, a Ask) (row, []string) {
	switch {
	case s.at == "" && a.Verb == "create":
		return row{"creating", "running", "failed"}, nil
	case a.Verb == "delete" && s.at != "" && s.at != "deleted":
		return row{via: "deleting"}, nil
	}
	r, ok := table[s.at][a.Verb]
	switch {
	case !ok:
		return r, []string{wrongState}
	case a.Verb == "start" && s.image == "":
		return r, []string{hasDisk}
	case a.Verb != "rollback":
		return r, nil
	}
	switch kind, _ := get(s.snaps, a.To); kind {
	case "memory", "disk":
		return r, nil
	case "creating":
		return r, []string{notReady}
	case "failed": // its row goes when it pleases
		return r, []string{notReady, noSnapshot}
	}
	return r, []string{noSnapshot}
}

// ended is the effect of an operation.
func ended(s state, op, failed string) []state {
	if _, past := get(s.past, op); past {
		if failed == superseded {
			return []state{s}
		}
		return nil
	}
	if op != s.op || failed == superseded || s.verb == "delete" && failed != "" {
		return nil
	}
	n := s
	n.op, n.verb, n.from, n.snap = "", "", "", ""
	n.past = put(n.past, op, "done")
	if s.verb == "delete" {
		n.at = "deleted"
		return []state{n}
	}
	r := row{"creating", "running", "failed"}
	if s.verb != "create" {
		r = table[s.from][s.verb]
	}
	if failed != "" {
		return notDone(s, n, r)
	}
	n.at = r.to
	switch s.verb {
	case "suspend", "fork":
		n.image = "memory"
	case "stop":
		n.image = "disk"
	case "rollback":
		n.image, _ = get(s.snaps, s.snap)
	case "snapshot":
		n.image = kindOf(s.snap)
		n.snaps = put(n.snaps, s.snap, n.image)
	}
	if r.via == "restoring" || r.via == "starting" || r.via == "rolling_back" {
		n.crashed = false
	}
	return []state{n}
}

// notDone is how a failed operation may leave the sandbox.
func notDone(s, n state, r row) []state {
	if s.verb == "snapshot" {
		n.snaps = put(n.snaps, s.snap, "failed")
	}
	n.at = r.otherwise
	next := []state{n}
	// Where it should have its machine back, that may have ended meanwhile.
	if n.at == "running" || n.at == "paused" {
		if s.crashed || s.verb == "rollback" {
			n.at = machineGone
			n.crashed = false
			next = append(next, n)
		}
	}
	return next
}

// crashed is the end of a machine that nobody asked for: the row hears of it, or
// an operation that is under way does, or there was no machine.
func crashed(s state) []state {
	unheard := s
	unheard.crashed = true
	if s.at == "running" || s.at == "paused" {
		s.at = machineGone
		return []state{s, unheard}
	}
	return []state{unheard}
}

// kindOf is the kind of a snapshot, which a history writes behind its id.
func kindOf(snap string) string {
	if strings.HasSuffix(snap, diskMark) {
		return "disk"
	}
	return "memory"
}

// diskMark is what a history writes behind the id of a disk snapshot.
const diskMark = "/disk"

// Describe is a step for people.
func Describe(in Input, out Answer) string {
	switch in.Kind {
	case KindAsk:
		s := in.Ask.Verb
		if in.Ask.To != "" {
			s += " to " + in.Ask.To
		}
		if in.Ask.Key != "" {
			s += " with key " + in.Ask.Key
		}
		if out.Refused != "" {
			return s + " → " + out.Refused
		}
		return s + " → " + out.Op + " " + out.Snapshot
	case KindEnd:
		if out.Failed == "" {
			return in.Op + " succeeds"
		}
		return in.Op + " fails: " + out.Failed
	case KindLook:
		return fmt.Sprintf("look → %s %s %d", out.State, out.Op, out.Generation)
	}
	return string(in.Kind)
}
