package guestlink

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"runtime"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

// How a fuzzed guest answers.
const (
	asFrames   = iota // HTTP/2 itself
	asBodies          // what HTTP/2 carries
	asMessages        // one message of gRPC, said twice in a stream
	waysToSay
)

// FuzzGuestAnswers: a guest has proven itself, and then answers Setup, and one
// call after it, with anything. Nothing panics, everything ends once the guest has hung
// up, and what it costs is bounded by what was said.
func FuzzGuestAnswers(f *testing.F) {
	encode := func(m proto.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		return b
	}
	hooks := encode(&guestv1.SetupResponse{Hooks: []*guestv1.HookResult{{Name: "h", Code: 1, Output: "no"}}, Problems: []string{"p"}})
	sessions := encode(&guestv1.SessionsResponse{Sessions: []*guestv1.SessionInfo{{Session: "s", Pid: 1, Produced: 1 << 63}}, Others: 3})
	output := encode(&guestv1.Event{Offset: 1<<64 - 1, Event: &guestv1.Event_Stdout{Stdout: []byte("out")}})
	exit := encode(&guestv1.Event{Event: &guestv1.Event_Exit{Exit: &guestv1.Exit{Code: -1, Reason: "\x00"}}})
	list := encode(&guestv1.ListResponse{Entries: []*guestv1.FileInfo{{Name: "../x", Size: 1 << 63}}})
	f.Add(byte(asFrames), byte(0), frames(1, hooks), frames(3, sessions))
	f.Add(byte(asFrames), byte(1), frames(1, hooks), frames(3, output))
	f.Add(byte(asBodies), byte(1), envelope(0, hooks), append(envelope(0, output), envelope(0, exit)...))
	f.Add(byte(asBodies), byte(0), envelope(0, hooks), envelope(1, sessions)) // "compressed"
	f.Add(byte(asBodies), byte(0), []byte{0, 0xff, 0xff, 0xff, 0xff}, []byte{0x80, 0, 0, 0, 1, '{'})
	f.Add(byte(asMessages), byte(0), hooks, sessions)
	f.Add(byte(asMessages), byte(1), hooks, output)
	f.Add(byte(asMessages), byte(1), hooks, exit)
	f.Add(byte(asMessages), byte(2), hooks, list)
	f.Fuzz(func(t *testing.T, way, call byte, setup, rest []byte) {
		before := allocated()
		said := &dialogue{t: t, way: way % waysToSay, call: call, setup: setup, rest: rest}
		done := make(chan struct{})
		go func() { defer close(done); said.hold() }()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			buf := make([]byte, 1<<20)
			t.Fatalf("it does not end\n%s", buf[:runtime.Stack(buf, true)])
		}
		if n, limit := allocated()-before, uint64(32<<20+64*(len(setup)+len(rest))); n > limit {
			t.Fatalf("%d bytes were allocated for %d that were said", n, len(setup)+len(rest))
		}
		if n := runtime.NumGoroutine(); n > 200 {
			t.Fatalf("%d goroutines", n)
		}
	})
}

func allocated() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// dialogue is one connection of a fuzzed guest.
type dialogue struct {
	t           *testing.T
	way, call   byte
	setup, rest []byte
}

func (d *dialogue) hold() {
	key := guestapi.NewKey()
	ln := &one{c: make(chan net.Conn, 1), done: make(chan struct{}), addr: &net.UnixAddr{}}
	l := Start(Config{Listen: func() (net.Listener, error) { return ln, nil }, Key: key, Welcomed: true, Epoch: 1, SetUp: func(r *guestv1.SetupResponse) {
		if n := len(r.GetHooks()) + len(r.GetProblems()); n > maxParts || proto.Size(r) > 2*maxSetup {
			d.t.Errorf("a setup of %d parts and %d bytes", n, proto.Size(r))
		}
	}})
	defer l.Close()
	host, guest := net.Pipe()
	ln.c <- host
	ended := make(chan struct{})
	go func() { defer close(ended); d.guest(guest, key) }()
	defer func() { _ = guest.Close(); <-ended }()
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	go func() { // a guest that has hung up is not waited for
		select {
		case <-ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	client, err := l.Client(ctx)
	if err != nil {
		return
	}
	d.check(d.ask(ctx, client))
}

// ask makes one call and reads all of its answer.
func (d *dialogue) ask(ctx context.Context, client guestv1connect.GuestClient) error {
	switch d.call % 3 {
	case 0:
		r, err := client.Sessions(ctx, connect.NewRequest(&guestv1.SessionsRequest{}))
		if err == nil && len(r.Msg.GetSessions()) > maxParts {
			d.t.Errorf("%d sessions", len(r.Msg.GetSessions()))
		}
		return err
	case 1:
		s, err := client.Follow(ctx, connect.NewRequest(&guestv1.FollowRequest{}))
		if err != nil {
			return err
		}
		return drain(s)
	default:
		s, err := client.List(ctx, connect.NewRequest(&guestv1.ListRequest{}))
		if err != nil {
			return err
		}
		return drain(s)
	}
}

func drain[T any](s *connect.ServerStreamForClient[T]) error {
	for s.Receive() {
		if proto.Size(any(s.Msg()).(proto.Message)) > 2*maxMessage {
			return errors.New("a message that is too large")
		}
	}
	return errors.Join(s.Err(), s.Close())
}

// check looks at what users and logs are told of an error.
func (d *dialogue) check(err error) {
	if err == nil {
		return
	}
	e := sandbox.AsError(guestapi.FromRPC(err))
	if len(e.Error()) > 4096 || len(e.Code) > 80 || strings.ContainsFunc(e.Error(), unicode.IsControl) {
		d.t.Errorf("%q", e.Error())
	}
}

// guest proves itself and says what it is to say.
func (d *dialogue) guest(conn net.Conn, key []byte) {
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	nonce, err := guestapi.ReadChallenge(conn)
	if err != nil {
		return
	}
	proof := guestapi.Proof(key, nonce, guestapi.PurposeControl, "")
	if err := guestapi.WriteHello(conn, &guestv1.Hello{MinVersion: 1, MaxVersion: 1, Purpose: guestapi.PurposeControl, Proof: proof}); err != nil {
		return
	}
	if _, err := guestapi.ReadAnswer(conn); err != nil {
		return
	}
	if d.way == asFrames {
		d.frames(conn)
	} else {
		d.serve(conn)
	}
}

// frames answers each request, as it comes, with what is next to be said, and
// hangs up when the host has had time to understand it.
func (d *dialogue) frames(conn net.Conn) {
	var wg sync.WaitGroup
	defer wg.Wait()
	say := make(chan []byte, 2)
	say <- d.setup
	say <- d.rest
	r := bufio.NewReader(conn)
	var head [9]byte
	if _, err := r.Discard(len(http2Preface)); err != nil {
		return
	}
	hangUp := time.AfterFunc(100*time.Millisecond, func() { _ = conn.Close() })
	defer hangUp.Stop()
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return
		}
		if _, err := r.Discard(int(binary.BigEndian.Uint32(head[:4]) >> 8)); err != nil {
			return
		}
		if head[3] != 1 { // no HEADERS
			continue
		}
		select {
		case next := <-say:
			wg.Go(func() { // the host may wait for us to read, before it does
				_, _ = conn.Write(next)
				hangUp.Reset(5 * time.Millisecond)
			})
		default:
			return
		}
	}
}

const http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// serve answers in HTTP/2 that is as it should be.
func (d *dialogue) serve(conn net.Conn) {
	l := &one{c: make(chan net.Conn, 1), done: make(chan struct{}), addr: conn.LocalAddr()}
	l.c <- conn
	srv := &http.Server{Protocols: new(http.Protocols), ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(d.answer), ConnState: func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			_ = l.Close()
		}
	}}
	srv.Protocols.SetUnencryptedHTTP2(true)
	_ = srv.Serve(l)
	_ = srv.Close()
}

func (d *dialogue) answer(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	body := d.rest
	if r.URL.Path == guestv1connect.GuestSetupProcedure {
		body = d.setup
	}
	if d.way == asMessages {
		body = envelope(0, body)
		if d.call%3 != 0 && r.URL.Path != guestv1connect.GuestSetupProcedure {
			body = append(body, body...)
		}
	}
	w.Header().Set("Content-Type", "application/grpc+proto")
	_, _ = w.Write(body)
	w.Header().Set(http.TrailerPrefix+"Grpc-Status", string('0'+d.call>>4%10))
	w.Header().Set(http.TrailerPrefix+"Grpc-Message", string(d.setup[:min(len(d.setup), 2048)]))
}

// envelope is one message of gRPC.
func envelope(flags byte, m []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(m))), m...)
}

// frames is an answer in HTTP/2: settings, headers, a message, trailers.
func frames(stream byte, m []byte) []byte {
	frame := func(kind, flags, id byte, payload string) string {
		n := len(payload)
		return string([]byte{0, byte(n >> 8), byte(n), kind, flags, 0, 0, 0, id}) + payload
	}
	const grpc = "application/grpc+proto"
	return []byte(frame(4, 0, 0, "") + frame(1, 4, stream, "\x88\x5f"+string(rune(len(grpc)))+grpc) +
		frame(0, 0, stream, string(envelope(0, m))) + frame(1, 5, stream, "\x40\x0bgrpc-status\x010"))
}
