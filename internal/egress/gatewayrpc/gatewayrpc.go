// Package gatewayrpc is what the daemon and the egress gateway's process say to
// each other: frames of JSON over a unix socket, a request and its answer at a
// time in each direction, with the sockets of a sandbox's gateway namespace
// handed over beside a request (SCM_RIGHTS).
//
// A frame is four bytes of length and a JSON document; the descriptors come
// with its first byte. The daemon dials. Its requests on one connection are
// answered in order; it keeps a second connection on which it asks for audit
// records and nothing else. Neither side trusts the other's lengths, and the
// daemon, which parses what a process writes that hostile traffic runs through,
// takes no descriptors and only small frames.
//
// A gateway outlives daemons, so a daemon of another release may speak to it:
// fields are only ever added, and what is absent keeps its old meaning.
// internal/egress serves it; internal/node/egress is the client.
package gatewayrpc

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Protocol is the newest version that this package speaks.
const Protocol = 1

// The bounds of frames. An assignment is what makes requests large.
const (
	MaxRequest = 32 << 20
	MaxAnswer  = 8 << 20
	MaxBatch   = 256 // records in an answer
)

// Op is what is asked for.
type Op string

// The operations.
const (
	OpHello  Op = "hello"  // Config → Welcome; the first one configures the gateway
	OpAttach Op = "attach" // Assignment and three sockets (TCP of the proxy, TCP and UDP of the resolver); replaces those it has
	OpSet    Op = "set"    // Assignment of an attached sandbox, in force when it is answered; of another: nothing
	OpReset  Op = "reset"  // Sandbox: its connections end with a reset
	OpYield  Op = "yield"  // Sandbox: its listeners are closed, and its connections go on until they end
	OpDetach Op = "detach" // Sandbox: everything of it is closed and forgotten
	OpList   Op = "list"   // → Sandboxes
	OpStats  Op = "stats"  // → Stats
	OpDrain  Op = "drain"  // no more attaches; the process ends when nothing is attached
	OpAudit  Op = "audit"  // Ack → Batch; waits for records
)

// Sockets is how many descriptors come with Attach.
const Sockets = 3

// Request is one question of the daemon.
type Request struct {
	Op         Op                        `json:"op"`
	Config     *Config                   `json:"config,omitempty"`
	Assignment *sandbox.EgressAssignment `json:"assignment,omitempty"`
	Sandbox    string                    `json:"sandbox,omitempty"`
	Ack        uint64                    `json:"ack,omitempty"`  // the Seq of the last batch that is kept
	Wait       int64                     `json:"wait,omitempty"` // milliseconds at most until an empty batch
}

// Answer is what a request is answered with.
type Answer struct {
	Error     *sandbox.Error `json:"error,omitempty"`
	Welcome   *Welcome       `json:"welcome,omitempty"`
	Attached  bool           `json:"attached,omitempty"` // also where the assignment was refused: then everything is denied
	Sandboxes []Sandbox      `json:"sandboxes,omitempty"`
	Stats     *Stats         `json:"stats,omitempty"`
	Batch     *Batch         `json:"batch,omitempty"`
}

// Config is what a gateway needs to know of its host. It is told once.
type Config struct {
	Build     string           `json:"build"`
	Open      []netip.Prefix   `json:"open,omitempty"`
	Own       []netip.Prefix   `json:"own,omitempty"` // beside the host's own addresses, which the gateway finds itself
	Resolvers []netip.AddrPort `json:"resolvers,omitempty"`
	Roots     []byte           `json:"roots,omitempty"` // PEM
}

// Welcome says who answers.
type Welcome struct {
	Protocol int         `json:"protocol"`
	Build    string      `json:"build"`
	Process  sys.Process `json:"process"`
}

// Sandbox is one that is attached.
type Sandbox struct {
	Sandbox  string `json:"sandbox"`
	Project  string `json:"project"`
	Profile  string `json:"profile"`
	Version  int64  `json:"version"`
	Revision int64  `json:"revision"`
	CA       []byte `json:"ca,omitempty"` // PEM certificate
	Yielded  bool   `json:"yielded,omitempty"`
}

// Stats are what the gateway does now and did since it began.
type Stats struct {
	Sandboxes int    `json:"sandboxes"`
	Open      int64  `json:"open"` // connections
	Total     int64  `json:"total"`
	Sent      int64  `json:"sent"`
	Received  int64  `json:"received"`
	Lost      uint64 `json:"lost"` // audit records that nobody took in time
}

// Batch is some audit records. They are told again until their Seq is acknowledged.
type Batch struct {
	Seq     uint64         `json:"seq"`
	Records []audit.Record `json:"records,omitempty"`
	Lost    uint64         `json:"lost,omitempty"` // that came before these and were lost
}

// Conn sends and receives frames. One goroutine at a time may send, and one
// receive.
type Conn struct{ c *net.UnixConn }

// NewConn makes a Conn of a connected stream socket.
func NewConn(c *net.UnixConn) *Conn { return &Conn{c: c} }

// Raw returns the connection, for deadlines.
func (c *Conn) Raw() *net.UnixConn { return c.c }

// Close closes the connection.
func (c *Conn) Close() error { return c.c.Close() }

// Send writes one frame, with files beside it.
func (c *Conn) Send(v any, most int, files ...*os.File) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode a frame: %w", err)
	}
	if len(data) > most {
		return sandbox.Errorf(sandbox.Invalid, "egress_too_large", "what the egress gateway is to be told has %d bytes, more than %d", len(data), most).
			WithHint("make the egress profile smaller")
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = syscall.UnixRights(fds...)
	}
	var head [4]byte
	binary.BigEndian.PutUint32(head[:], uint32(len(data)))
	// Four bytes are sent at once or not at all, so the descriptors go once.
	n, oobn, err := c.c.WriteMsgUnix(head[:], rights, nil)
	if err != nil {
		return err
	}
	if n != len(head) || oobn != len(rights) {
		return io.ErrShortWrite
	}
	_, err = c.c.Write(data)
	return err
}

// Receive reads one frame into v and takes no descriptors: the kernel closes
// any that came.
func (c *Conn) Receive(v any, most int) error {
	var head [4]byte
	if _, err := io.ReadFull(c.c, head[:]); err != nil {
		return err
	}
	return c.body(head, v, most)
}

// ReceiveFiles reads one frame into v, and the files that came with it. The
// caller closes them.
func (c *Conn) ReceiveFiles(v any, most int) ([]*os.File, error) {
	var head [4]byte
	oob := make([]byte, syscall.CmsgSpace(4*Sockets))
	var files []*os.File
	for n := 0; n < len(head); {
		got, oobn, flags, _, err := c.c.ReadMsgUnix(head[n:], oob)
		files = append(files, parseRights(oob[:oobn])...)
		if err == nil && got == 0 {
			err = io.EOF
		}
		if err == nil && (flags&syscall.MSG_CTRUNC != 0 || len(files) > Sockets) {
			err = errors.New("more descriptors came than a frame may have")
		}
		if err != nil {
			closeAll(files)
			return nil, err
		}
		n += got
	}
	if err := c.body(head, v, most); err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}

func (c *Conn) body(head [4]byte, v any, most int) error {
	size := int64(binary.BigEndian.Uint32(head[:]))
	if size > int64(most) {
		return fmt.Errorf("a frame of %d bytes came, more than %d", size, most)
	}
	data, err := io.ReadAll(io.LimitReader(c.c, size)) // grows with what comes, not with what is promised
	if err != nil {
		return err
	}
	if int64(len(data)) < size {
		return io.ErrUnexpectedEOF
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("decode a frame: %w", err)
	}
	return nil
}

func parseRights(oob []byte) []*os.File {
	messages, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	var files []*os.File
	for i := range messages {
		fds, err := syscall.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "handed over"))
		}
	}
	return files
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
