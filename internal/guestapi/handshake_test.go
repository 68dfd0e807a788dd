package guestapi

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

func TestHandshake(t *testing.T) {
	var b bytes.Buffer
	nonce, err := Challenge(&b)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadChallenge(&b)
	if err != nil || got != nonce {
		t.Fatalf("%x %v", got, err)
	}
	key := NewKey()
	hello := &guestv1.Hello{MinVersion: 1, MaxVersion: 3, Purpose: PurposeExtra, Ticket: "t"}
	hello.Proof = Proof(key, nonce, hello.Purpose, hello.Ticket)
	if err := WriteHello(&b, hello); err != nil {
		t.Fatal(err)
	}
	read, err := ReadHello(&b)
	if err != nil || !Proves(read, key, nonce) {
		t.Fatalf("%v %v", read, err)
	}
	for name, change := range map[string]func(*guestv1.Hello, *Nonce){
		"another nonce (a replay)": func(_ *guestv1.Hello, n *Nonce) { n[0]++ },
		"another ticket":           func(h *guestv1.Hello, _ *Nonce) { h.Ticket = "u" },
		"another purpose":          func(h *guestv1.Hello, _ *Nonce) { h.Purpose = PurposeControl },
		"no proof":                 func(h *guestv1.Hello, _ *Nonce) { h.Proof = nil },
	} {
		h, n := &guestv1.Hello{Purpose: read.Purpose, Ticket: read.Ticket, Proof: read.Proof}, nonce
		if change(h, &n); Proves(h, key, n) {
			t.Errorf("%s is taken", name)
		}
	}
}

func TestNegotiate(t *testing.T) {
	for _, c := range []struct {
		least, most, want uint32
		ok                bool
	}{{1, 1, 1, true}, {1, 9, 1, true}, {2, 9, 0, false}, {0, 0, 0, false}, {3, 1, 0, false}} {
		v, ok := Negotiate(c.least, c.most)
		if ok != c.ok || ok && v != c.want {
			t.Errorf("%d to %d: %d %v", c.least, c.most, v, ok)
		}
	}
}

// FuzzReadHello: whatever a guest sends, the host takes a checked Hello or
// fails, and never reads more than a message.
func FuzzReadHello(f *testing.F) {
	var b bytes.Buffer
	_ = WriteHello(&b, &guestv1.Hello{MinVersion: 1, MaxVersion: 1, Purpose: PurposeControl, Proof: make([]byte, 32), Features: []string{"a"}})
	f.Add(b.Bytes())
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{0, 0, 0, 1, 0xff})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		h, err := ReadHello(r)
		if read := len(data) - r.Len(); read > 4+MaxMessage {
			t.Fatalf("read %d bytes", read)
		}
		if err != nil {
			if !errors.Is(err, ErrHandshake) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatal(err)
			}
			return
		}
		if h.Purpose != PurposeControl && h.Purpose != PurposeExtra || len(h.Proof) != 0 && len(h.Proof) != 32 {
			t.Fatal(h)
		}
	})
}

func TestErrors(t *testing.T) {
	rpc := ToRPC(sandbox.Errorf(sandbox.NotFound, "no_such_file", "open /x: no such file"))
	if connect.CodeOf(rpc) != connect.CodeNotFound {
		t.Errorf("%v", rpc)
	}
	hostile := connect.NewWireError(connect.CodeNotFound, errors.New("\x1b[31m"+strings.Repeat("é", 5000)+"\xff"))
	hostile.Meta().Set(codeHeader, "Not A Code")
	e := sandbox.AsError(FromRPC(hostile))
	if e.Class != sandbox.NotFound || e.Code != "guest_not_found" || len(e.Message) > 2*maxErrorText || strings.Contains(e.Message, "\x1b") {
		t.Errorf("%+v", e)
	}
	e = sandbox.AsError(FromRPC(connect.NewError(connect.CodeUnavailable, errors.New("EOF"))))
	if e.Class != sandbox.Unavailable || e.Code != "guest_unreachable" || !e.Retryable {
		t.Errorf("%+v", e)
	}
	for code := connect.CodeCanceled; code <= connect.CodeUnauthenticated; code++ {
		e := sandbox.AsError(FromRPC(connect.NewWireError(code, errors.New("x"))))
		if e.Class == sandbox.Denied || e.Class == sandbox.Internal {
			t.Errorf("a guest's %v becomes %s", code, e.Class)
		}
		switch code {
		case connect.CodePermissionDenied, connect.CodeUnauthenticated, connect.CodeInternal, connect.CodeUnknown:
			if e.Class != sandbox.Unavailable || e.Code != "guest_failed" {
				t.Errorf("%v: %+v", code, e)
			}
		}
	}
	for _, err := range []error{errors.New("odd"), io.ErrUnexpectedEOF, connect.NewError(connect.CodeInternal, errors.New("cut"))} {
		if e := sandbox.AsError(FromRPC(err)); e.Class != sandbox.Unavailable || e.Code != "guest_unreachable" {
			t.Errorf("%v: %+v", err, e)
		}
	}
	// How an agent without a method answers: its server knows no such path.
	if e := sandbox.AsError(FromRPC(connect.NewError(connect.CodeUnimplemented, errors.New("HTTP status 404")))); e.Code != "guest_unimplemented" {
		t.Errorf("%+v", e)
	}
	if e := sandbox.AsError(FromRPC(sandbox.Errorf(sandbox.Quota, "mine", "x"))); e.Code != "mine" {
		t.Errorf("%+v", e)
	}
	if FromRPC(nil) != nil || ToRPC(nil) != nil {
		t.Error("nil must stay nil")
	}
}
