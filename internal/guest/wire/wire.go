// Package wire is the private protocol between the supervisor and its agent:
// length-prefixed frames over an inherited socket pair, each a request of the
// agent or the supervisor's reply to one, paired by a number that the agent
// chose. Both ends are one binary, but the agent is what talks to the world,
// so the supervisor bounds and checks all of it.
//
// A frame is: u32 length of what follows, u8 operation, u64 number, body. A
// reply's operation is OpReply (body: the answer) or OpError (body: an error).
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Op is what a frame is.
type Op uint8

// The operations.
const (
	OpReply Op = iota + 1
	OpError
	OpState    // -> State
	OpKeep     // State -> empty
	OpStart    // Start -> Started
	OpFetch    // Fetch -> Fetched; waits until there is something
	OpAck      // Ack -> empty
	OpStdin    // Stdin -> StdinDone; waits for room
	OpSignal   // Signal -> empty
	OpResize   // Resize -> empty
	OpSessions // -> Sessions
	OpCancel   // the frame's number names a request that nobody waits for; no reply
	opEnd
)

const (
	// MaxFrame bounds a frame. The largest are Start (arguments and
	// environment), Keep (the setup) and Fetched (output).
	MaxFrame = 4 << 20
	// MaxFetch is the most output in one reply.
	MaxFetch = 256 << 10
	// MaxStdin is the most stdin in one request.
	MaxStdin = 1 << 20

	headSize = 4 + 1 + 8
)

// ErrFrame is the kind of every error about what the peer sent.
var ErrFrame = errors.New("bad frame")

// Frame is one frame. Body is the caller's own.
type Frame struct {
	Op   Op
	ID   uint64
	Body []byte
}

// AppendFrame appends a whole frame; m may be nil. The output of a Fetched is
// most of what is ever sent, so nothing is copied twice here.
func AppendFrame(b []byte, op Op, id uint64, m Message) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0, byte(op))
	e := Encoder{B: binary.BigEndian.AppendUint64(b, id)}
	if m != nil {
		m.Encode(&e)
	}
	binary.BigEndian.PutUint32(e.B[at:], uint32(len(e.B)-at-4))
	return e.B
}

// Read reads one frame.
func Read(r io.Reader) (Frame, error) {
	var head [headSize]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return Frame{}, err
	}
	n := binary.BigEndian.Uint32(head[:])
	f := Frame{Op: Op(head[4]), ID: binary.BigEndian.Uint64(head[5:])}
	if n < headSize-4 || n > MaxFrame || f.Op == 0 || f.Op >= opEnd {
		return Frame{}, fmt.Errorf("%w: %d bytes, operation %d", ErrFrame, n, f.Op)
	}
	if n -= headSize - 4; n > 0 {
		f.Body = make([]byte, n)
		if _, err := io.ReadFull(r, f.Body); err != nil {
			return Frame{}, noEOF(err)
		}
	}
	return f, nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Encoder appends values to a body.
type Encoder struct{ B []byte }

// Uint appends a number.
func (e *Encoder) Uint(v uint64) { e.B = binary.AppendUvarint(e.B, v) }

// Int appends a number that may be negative.
func (e *Encoder) Int(v int64) { e.B = binary.AppendVarint(e.B, v) }

// Bool appends a truth value.
func (e *Encoder) Bool(v bool) {
	if v {
		e.Uint(1)
	} else {
		e.Uint(0)
	}
}

// Bytes appends bytes.
func (e *Encoder) Bytes(v []byte) {
	e.Uint(uint64(len(v)))
	e.B = append(e.B, v...)
}

// String appends a string.
func (e *Encoder) String(v string) {
	e.Uint(uint64(len(v)))
	e.B = append(e.B, v...)
}

// Strings appends a list of strings.
func (e *Encoder) Strings(v []string) {
	e.Uint(uint64(len(v)))
	for _, s := range v {
		e.String(s)
	}
}

// Decoder takes values from a body. After the first failure every value is
// zero; End tells of it.
type Decoder struct {
	B   []byte
	bad bool
}

// Uint takes a number.
func (d *Decoder) Uint() uint64 {
	v, n := binary.Uvarint(d.B)
	if n <= 0 {
		d.bad, d.B = true, nil
		return 0
	}
	d.B = d.B[n:]
	return v
}

// Int takes a number that may be negative.
func (d *Decoder) Int() int64 {
	v, n := binary.Varint(d.B)
	if n <= 0 {
		d.bad, d.B = true, nil
		return 0
	}
	d.B = d.B[n:]
	return v
}

// Bool takes a truth value.
func (d *Decoder) Bool() bool { return d.Uint() == 1 }

// Bytes takes bytes, which stay part of the body.
func (d *Decoder) Bytes() []byte {
	n := d.Uint()
	if n > uint64(len(d.B)) {
		d.bad, d.B = true, nil
		return nil
	}
	v := d.B[:n:n]
	d.B = d.B[n:]
	return v
}

// String takes a string.
func (d *Decoder) String() string { return string(d.Bytes()) }

// Strings takes a list of strings. Each takes at least a byte of the body, so
// a body bounds its list.
func (d *Decoder) Strings() []string {
	n := d.Uint()
	if n > uint64(len(d.B)) {
		d.bad, d.B = true, nil
		return nil
	}
	v := make([]string, 0, n)
	for range n {
		v = append(v, d.String())
	}
	return v
}

// End checks that all of the body was taken and all of it was well-formed.
func (d *Decoder) End() error {
	if d.bad || len(d.B) != 0 {
		return fmt.Errorf("%w: malformed body", ErrFrame)
	}
	return nil
}
