package chaos

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// The model: what the API's reader must expect of a sandbox that only one
// worker touches. It is written by hand after docs/architecture.md and imports
// nothing of internal/sandbox, so that a wrong table there is seen here.

// move is one row of the lifecycle.
type move struct {
	from, verb string
	via        string
	to         string
	otherwise  string
}

// moves is the lifecycle but for create and delete, which are valid from
// nothing and from every state.
var moves = []move{
	{"running", "pause", "pausing", "paused", "running"},
	{"running", "suspend", "suspending", "suspended", "running"},
	{"running", "stop", "stopping", "stopped", "running"},
	{"running", "snapshot", "snapshotting", "running", "running"},
	{"running", "fork", "forking", "running", "running"},
	{"running", "rollback", "rolling_back", "running", "running"},

	{"paused", "resume", "resuming", "running", "paused"},
	{"paused", "wake", "resuming", "running", "paused"},
	{"paused", "suspend", "suspending", "suspended", "paused"},
	{"paused", "stop", "stopping", "stopped", "paused"},
	{"paused", "snapshot", "snapshotting", "paused", "paused"},
	{"paused", "rollback", "rolling_back", "running", "paused"},

	{"suspended", "restore", "restoring", "running", "suspended"},
	{"suspended", "wake", "restoring", "running", "suspended"},
	{"suspended", "rollback", "rolling_back", "running", "suspended"},

	{"stopped", "start", "starting", "running", "stopped"},
	{"stopped", "wake", "starting", "running", "stopped"},
	{"stopped", "rollback", "rolling_back", "running", "stopped"},

	{"failed", "start", "starting", "running", "failed"},
	{"failed", "rollback", "rolling_back", "running", "failed"},
}

// verbs are those that a worker asks for.
var verbs = []string{"pause", "resume", "suspend", "restore", "stop", "start", "wake", "snapshot", "fork", "rollback"}

func findMove(from, verb string) (move, bool) {
	for _, m := range moves {
		if m.from == from && m.verb == verb {
			return m, true
		}
	}
	return move{}, false
}

// legal tells whether an event may tell of a step between two states.
func legal(from, to string) bool {
	switch {
	case from == "" && to == "creating", from == "creating" && (to == "running" || to == "failed"):
		return true
	case to == "deleting":
		return from != "" && from != "deleted" && from != "deleting"
	case from == "deleting":
		return to == "deleted"
	case (from == "running" || from == "paused") && to == "failed":
		return true // its machine ended by itself
	}
	for _, m := range moves {
		lost := m.via == from && to == "failed" && (m.otherwise == "running" || m.otherwise == "paused")
		if m.from == from && m.via == to || m.via == from && (m.to == to || m.otherwise == to) || lost {
			return true
		}
	}
	return false
}

func hasMachine(state string) bool { return state == "running" || state == "paused" }

// image is what a snapshot holds, as far as a reader can tell.
type image struct {
	id     string
	owner  string // the sandbox that it was taken of
	memory bool
	named  bool
	before string     // the named snapshot before it on its timeline; "" is the template
	boot   string     // the boot id in its memory
	oldest int        // the version of the file in it lies between these
	newest int        // (they differ for one that Cloche took by itself)
	living []*counter // what ran in it
	past   map[string]bool
}

// counter is one session that counts, on one timeline.
type counter struct {
	id       string
	name     string // of the program, which its sessions on all timelines share
	parent   *counter
	from     int64 // the offset where its own log begins
	checked  int64 // up to here its log has been read and compared
	total    int64 // how long it must be in the end; -1 is not known
	mayExit  bool  // it was asked to
	terminal string
}

// line is how long each line of a counter is: its number decides its content.
const line = 16

// differs compares output at an offset with what a counter prints there; "" is
// no difference.
func differs(data []byte, offset int64) string {
	for i, b := range data {
		at := offset + int64(i)
		if want := fmt.Sprintf("%015d\n", at/line)[at%line]; b != want {
			from := max(0, i-40)
			return fmt.Sprintf("at offset %d is %q where line %d was printed; around it: %q", at, b, at/line, data[from:min(len(data), i+40)])
		}
	}
	return ""
}

// box is one sandbox.
type box struct {
	id          string
	state       string
	version     int    // of the file inside, as the machine or what is kept of it has it
	vague       int    // the file may also have any version from here on; 0 is none: a write's answer was lost
	boot        string // its boot id; "" is to be learned
	machine     string // its machine id; "" is to be learned
	base        string // the named snapshot that it passed last; "" is the template
	image       *image // what outlives its machine; nil is the template
	checkpoints bool   // Cloche replaces image by itself
	counters    []*counter
	ended       []*counter
	other       map[string]bool // sessions that are not counters
	ops         map[string]string
	line        map[string]bool // the sandboxes that it descends from by forks, and itself
	maybe       map[string]bool // those, and the ones of the snapshots that it was created from
	killed      int             // the machine that was killed last, by pid
	gaveUp      bool            // a rollback that failed may have given up the machine
	history     []string        // what was done to it, to be told with what is wrong
}

// note keeps the end of b's history.
func (b *box) note(format string, args ...any) {
	b.history = append(b.history, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
	b.history = b.history[max(0, len(b.history)-14):]
}

func (b *box) snapshotOf(id string, memory, named bool) *image {
	i := &image{id: id, owner: b.id, memory: memory, named: named, oldest: b.version, newest: b.version, past: b.maybe, before: b.base}
	if b.vague > 0 {
		i.oldest, i.newest = min(b.version, b.vague), max(b.version, b.vague)
	}
	if memory {
		i.boot, i.living = b.boot, slices.Clone(b.counters)
	}
	return i
}

// succeed changes b by a verb that succeeded. made is the image that it took,
// to the one that it went back to. It returns what lived in the image and must
// be found again as new sessions.
func (b *box) succeed(verb string, m move, made, to *image) (inherits []*counter) {
	from := b.state
	b.state = m.to
	switch {
	case verb == "snapshot":
		b.image, b.base = made, made.id
	case verb == "suspend", verb == "fork":
		b.image = made
	case verb == "stop":
		b.image, b.boot = made, ""
		b.end()
	case verb == "rollback":
		b.end()
		b.image, b.base = to, to.passed()
		return b.goOnFrom(to)
	case from == "stopped", from == "failed":
		return b.goOnFrom(b.image)
	}
	return nil
}

// passed is the base of a sandbox whose timeline begins at an image.
func (i *image) passed() string {
	if i.named {
		return i.id
	}
	return i.before
}

// end moves all counters to the ended ones.
func (b *box) end() {
	b.ended = append(b.ended, b.counters...)
	b.counters = nil
}

// goOnFrom is a machine that came from an image on a new timeline.
func (b *box) goOnFrom(i *image) []*counter {
	b.boot = ""
	if i.memory && i.owner == b.id {
		b.boot = i.boot
	}
	b.version, b.vague = i.oldest, 0
	if i.newest != i.oldest {
		b.vague = i.newest
	}
	if i.memory {
		return i.living
	}
	return nil
}

// crash is a machine that ended by itself.
func (b *box) crash() {
	b.state, b.boot = "failed", ""
	b.end()
}

// either is where an accepted and a refused rollback are both right: whether a
// sandbox descends from another is forgotten with the snapshot between them.
const either = "?"

// newBox is a sandbox that descends from another by a fork, from a snapshot's by
// creation, or (both nil) from none.
func newBox(id string, parent *box, from *image) *box {
	b := &box{id: id, state: "running", other: map[string]bool{}, ops: map[string]string{}, line: map[string]bool{id: true}, maybe: map[string]bool{id: true}}
	if parent != nil {
		maps.Copy(b.line, parent.line)
		maps.Copy(b.maybe, parent.maybe)
		b.checkpoints, b.base = parent.checkpoints, parent.base
	}
	if from != nil {
		maps.Copy(b.maybe, from.past)
		b.base = from.passed()
	}
	return b
}

// wants tells what must come of a verb: a move, or the code of a refusal.
func (b *box) wants(verb string, to *image) (m move, refusal string) {
	m, ok := findMove(b.state, verb)
	switch {
	case !ok:
		return m, "wrong_state"
	case verb == "rollback" && !b.maybe[to.owner]:
		return m, "has_snapshot"
	case verb == "rollback" && !b.line[to.owner]:
		return m, either
	case verb == "start" && b.image == nil:
		return m, "has_disk"
	}
	return m, ""
}
