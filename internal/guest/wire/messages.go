package wire

// Message is what a body holds.
type Message interface {
	Encode(*Encoder)
	Decode(*Decoder)
}

// Marshal returns m's body.
func Marshal(m Message) []byte {
	var e Encoder
	if m != nil {
		m.Encode(&e)
	}
	return e.B
}

// Unmarshal reads a body into m.
func Unmarshal(b []byte, m Message) error {
	d := Decoder{B: b}
	if m != nil {
		m.Decode(&d)
	}
	return d.End()
}

// State is what the supervisor keeps for its agents.
type State struct {
	Key      []byte
	Epoch    uint64
	Setup    []byte // opaque to the supervisor
	MaxProcs uint64 // RLIMIT_NPROC of every process that is not root's

	HooksFor  uint64 // the generation that Hooks are of
	HooksDone bool   // no more of them are to be run for it
	Hooks     []byte // opaque to the supervisor: what those that were begun did
}

// Encode implements Message.
func (m *State) Encode(e *Encoder) {
	e.Bytes(m.Key)
	e.Uint(m.Epoch)
	e.Bytes(m.Setup)
	e.Uint(m.MaxProcs)
	e.Uint(m.HooksFor)
	e.Bool(m.HooksDone)
	e.Bytes(m.Hooks)
}

// Decode implements Message.
func (m *State) Decode(d *Decoder) {
	m.Key, m.Epoch, m.Setup, m.MaxProcs = d.Bytes(), d.Uint(), d.Bytes(), d.Uint()
	m.HooksFor, m.HooksDone, m.Hooks = d.Uint(), d.Bool(), d.Bytes()
}

// Start asks for a process with everything resolved, or, where FailCode is
// not 0, for a session that failed to start.
type Start struct {
	Session    string
	Path       string
	Args, Env  []string
	Dir        string
	UID, GID   uint32
	Groups     []string // decimal
	Stdin, TTY bool
	Rows, Cols uint16
	TimeoutMS  int64
	FailCode   int64
	FailText   string
}

// Encode implements Message.
func (m *Start) Encode(e *Encoder) {
	e.String(m.Session)
	e.String(m.Path)
	e.Strings(m.Args)
	e.Strings(m.Env)
	e.String(m.Dir)
	e.Uint(uint64(m.UID))
	e.Uint(uint64(m.GID))
	e.Strings(m.Groups)
	e.Bool(m.Stdin)
	e.Bool(m.TTY)
	e.Uint(uint64(m.Rows))
	e.Uint(uint64(m.Cols))
	e.Int(m.TimeoutMS)
	e.Int(m.FailCode)
	e.String(m.FailText)
}

// Decode implements Message.
func (m *Start) Decode(d *Decoder) {
	m.Session, m.Path, m.Args, m.Env, m.Dir = d.String(), d.String(), d.Strings(), d.Strings(), d.String()
	m.UID, m.GID, m.Groups = uint32(d.Uint()), uint32(d.Uint()), d.Strings()
	m.Stdin, m.TTY, m.Rows, m.Cols = d.Bool(), d.Bool(), uint16(d.Uint()), uint16(d.Uint())
	m.TimeoutMS, m.FailCode, m.FailText = d.Int(), d.Int(), d.String()
}

// Started answers Start.
type Started struct {
	PID      int64
	UnixNano int64
}

// Encode implements Message.
func (m *Started) Encode(e *Encoder) { e.Int(m.PID); e.Int(m.UnixNano) }

// Decode implements Message.
func (m *Started) Decode(d *Decoder) { m.PID, m.UnixNano = d.Int(), d.Int() }

// Fetch asks for a session's output from Offset on.
type Fetch struct {
	Session string
	Offset  uint64
}

// Encode implements Message.
func (m *Fetch) Encode(e *Encoder) { e.String(m.Session); e.Uint(m.Offset) }

// Decode implements Message.
func (m *Fetch) Decode(d *Decoder) { m.Session, m.Offset = d.String(), d.Uint() }

// Run is a length of output of one stream.
type Run struct {
	Stderr bool
	N      int
}

// Exit is how a session ended.
type Exit struct {
	Code, Signal int64
	Reason, Text string
	UnixNano     int64
}

// Fetched answers Fetch: at least one run, or the exit.
type Fetched struct {
	Runs   []Run
	Exited bool
	Exit   Exit
	Data   []byte // of all runs, one after the other
}

// Encode implements Message.
func (m *Fetched) Encode(e *Encoder) {
	e.Uint(uint64(len(m.Runs)))
	for _, r := range m.Runs {
		v := uint64(r.N) << 1
		if r.Stderr {
			v |= 1
		}
		e.Uint(v)
	}
	e.Bool(m.Exited)
	if m.Exited {
		e.Int(m.Exit.Code)
		e.Int(m.Exit.Signal)
		e.String(m.Exit.Reason)
		e.String(m.Exit.Text)
		e.Int(m.Exit.UnixNano)
	}
	e.Bytes(m.Data)
}

// Decode implements Message.
func (m *Fetched) Decode(d *Decoder) {
	n := d.Uint()
	if n > uint64(len(d.B)) {
		d.bad = true
		return
	}
	total := uint64(0)
	for range n {
		v := d.Uint()
		m.Runs = append(m.Runs, Run{Stderr: v&1 == 1, N: int(v >> 1)})
		if v>>1 > MaxFrame || v>>1 == 0 {
			d.bad = true
			return
		}
		total += v >> 1
	}
	if m.Exited = d.Bool(); m.Exited {
		m.Exit = Exit{Code: d.Int(), Signal: d.Int(), Reason: d.String(), Text: d.String(), UnixNano: d.Int()}
	}
	m.Data = d.Bytes()
	d.bad = d.bad || total != uint64(len(m.Data))
}

// Ack frees what lies before Offset, and with Exit the session.
type Ack struct {
	Session string
	Offset  uint64
	Exit    bool
}

// Encode implements Message.
func (m *Ack) Encode(e *Encoder) { e.String(m.Session); e.Uint(m.Offset); e.Bool(m.Exit) }

// Decode implements Message.
func (m *Ack) Decode(d *Decoder) { m.Session, m.Offset, m.Exit = d.String(), d.Uint(), d.Bool() }

// Stdin writes to a session's stdin.
type Stdin struct {
	Session string
	Offset  uint64
	Data    []byte
	Close   bool
}

// Encode implements Message.
func (m *Stdin) Encode(e *Encoder) {
	e.String(m.Session)
	e.Uint(m.Offset)
	e.Bytes(m.Data)
	e.Bool(m.Close)
}

// Decode implements Message.
func (m *Stdin) Decode(d *Decoder) {
	m.Session, m.Offset, m.Data, m.Close = d.String(), d.Uint(), d.Bytes(), d.Bool()
}

// StdinDone answers Stdin.
type StdinDone struct {
	Accepted uint64
	Closed   bool
}

// Encode implements Message.
func (m *StdinDone) Encode(e *Encoder) { e.Uint(m.Accepted); e.Bool(m.Closed) }

// Decode implements Message.
func (m *StdinDone) Decode(d *Decoder) { m.Accepted, m.Closed = d.Uint(), d.Bool() }

// Signal signals a session's processes.
type Signal struct {
	Session string
	Signal  int64
}

// Encode implements Message.
func (m *Signal) Encode(e *Encoder) { e.String(m.Session); e.Int(m.Signal) }

// Decode implements Message.
func (m *Signal) Decode(d *Decoder) { m.Session, m.Signal = d.String(), d.Int() }

// Resize sets the size of a session's terminal.
type Resize struct {
	Session    string
	Rows, Cols uint16
}

// Encode implements Message.
func (m *Resize) Encode(e *Encoder) {
	e.String(m.Session)
	e.Uint(uint64(m.Rows))
	e.Uint(uint64(m.Cols))
}

// Decode implements Message.
func (m *Resize) Decode(d *Decoder) {
	m.Session, m.Rows, m.Cols = d.String(), uint16(d.Uint()), uint16(d.Uint())
}

// Session is one row of Sessions.
type Session struct {
	ID       string
	PID      int64
	Exited   bool
	Acked    uint64
	Produced uint64
}

// Sessions answers OpSessions.
type Sessions struct{ List []Session }

// Encode implements Message.
func (m *Sessions) Encode(e *Encoder) {
	e.Uint(uint64(len(m.List)))
	for _, s := range m.List {
		e.String(s.ID)
		e.Int(s.PID)
		e.Bool(s.Exited)
		e.Uint(s.Acked)
		e.Uint(s.Produced)
	}
}

// Decode implements Message.
func (m *Sessions) Decode(d *Decoder) {
	n := d.Uint()
	if n > uint64(len(d.B)) {
		d.bad = true
		return
	}
	for range n {
		if d.bad {
			return
		}
		m.List = append(m.List, Session{ID: d.String(), PID: d.Int(), Exited: d.Bool(), Acked: d.Uint(), Produced: d.Uint()})
	}
}

// Error is the body of OpError: a class and code of internal/sandbox.
type Error struct{ Class, Code, Text string }

// Encode implements Message.
func (m *Error) Encode(e *Encoder) { e.String(m.Class); e.String(m.Code); e.String(m.Text) }

// Decode implements Message.
func (m *Error) Decode(d *Decoder) { m.Class, m.Code, m.Text = d.String(), d.String(), d.String() }
