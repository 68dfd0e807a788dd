package gatewayrpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is two ends of a stream.
func pair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns []*net.UnixConn
	for _, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		conns = append(conns, c.(*net.UnixConn))
	}
	return conns[0], conns[1]
}

func TestFilesComeWithTheirFrame(t *testing.T) {
	a, b := pair(t)
	from, to := NewConn(a), NewConn(b)
	path := filepath.Join(t.TempDir(), "f")
	sent := make(chan error, 1)
	go func() {
		for i := range 20 {
			var files []*os.File
			if i%2 == 0 {
				for range Sockets {
					f, err := os.Create(path)
					if err != nil {
						sent <- err
						return
					}
					files = append(files, f)
				}
			}
			err := from.Send(Request{Op: OpAttach, Sandbox: strings.Repeat("x", i*100000)}, MaxRequest, files...)
			closeAll(files)
			if err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	for i := range 20 {
		var r Request
		files, err := to.ReceiveFiles(&r, MaxRequest)
		if err != nil {
			t.Fatal(err)
		}
		if want := (1 - i%2) * Sockets; len(files) != want || len(r.Sandbox) != i*100000 {
			t.Errorf("frame %d: %d files, want %d", i, len(files), want)
		}
		for _, f := range files {
			if _, err := f.WriteString("x"); err != nil {
				t.Error(err)
			}
		}
		closeAll(files)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
}

func TestBoundsOfFrames(t *testing.T) {
	a, b := pair(t)
	from, to := NewConn(a), NewConn(b)
	var e *sandbox.Error
	if err := from.Send(Request{Sandbox: strings.Repeat("x", 1000)}, 100); !errors.As(err, &e) || e.Code != "egress_too_large" {
		t.Errorf("a frame that is too large: %v", err)
	}
	if _, err := a.Write([]byte{0xff, 0xff, 0xff, 0xff}); err != nil {
		t.Fatal(err)
	}
	if err := to.Receive(&Answer{}, MaxAnswer); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a length that is too large: %v", err)
	}
	// More descriptors than a frame may have.
	var files []*os.File
	for range Sockets + 1 {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	defer closeAll(files)
	if err := from.Send(Request{Op: OpList}, MaxRequest, files...); err != nil {
		t.Fatal(err)
	}
	got, err := to.ReceiveFiles(&Request{}, MaxRequest)
	if len(got) > Sockets+1 || err == nil && len(got) > Sockets {
		t.Errorf("%d files (%v)", len(got), err)
	}
	closeAll(got)
}

func TestCalls(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	served := make(chan struct{})
	hang := make(chan struct{})
	go func() {
		defer close(served)
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer c.Close()
		conn := NewConn(c)
		for {
			var r Request
			files, err := conn.ReceiveFiles(&r, MaxRequest)
			if err != nil {
				return
			}
			closeAll(files)
			var a Answer
			switch r.Op {
			case OpSet:
				a.Error = sandbox.Errorf(sandbox.Invalid, "bad", "no")
			case OpAudit:
				<-hang
			}
			if conn.Send(a, MaxAnswer) != nil {
				return
			}
		}
	}()
	ctx := context.Background()
	c, err := Dial(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Call(ctx, Request{Op: OpList}); err != nil {
		t.Error(err)
	}
	var e *sandbox.Error
	if _, err := c.Call(ctx, Request{Op: OpSet}); !errors.As(err, &e) || e.Code != "bad" || Gone(err) {
		t.Errorf("a refusal: %v", err)
	}
	dead, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := c.Call(dead, Request{Op: OpList}); !errors.Is(err, context.Canceled) || Gone(err) {
		t.Errorf("a call that was given up before it began: %v", err)
	}
	if _, err := c.Call(ctx, Request{Op: OpList}); err != nil {
		t.Error(err)
	}
	short, cancel := context.WithCancel(ctx)
	answered := make(chan error, 1)
	go func() {
		_, err := c.Call(short, Request{Op: OpAudit})
		answered <- err
	}()
	cancel()
	if err := <-answered; err == nil {
		t.Error("a call that was given up was answered")
	}
	close(hang)
	select {
	case <-c.Done():
		if _, err := c.Call(ctx, Request{Op: OpList}); !Gone(err) {
			t.Errorf("a call on a closed connection: %v", err)
		}
	default: // it was given up before it began
		c.Close()
	}
	<-served
	_ = l.Close()
	if _, err := Dial(ctx, path); !Absent(err) {
		t.Errorf("nobody listens: %v", err)
	}
}

func FuzzReceive(f *testing.F) {
	frame := func(s string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(s))), s...)
	}
	f.Add(frame(`{"op":"attach","assignment":{"sandbox":"x","revision":1}}`))
	f.Add(frame(`{"batch":{"seq":1,"records":[{"at":"2026-01-01T00:00:00Z","dialled":"1.2.3.4:5"}]}}`))
	f.Add([]byte{0, 0, 0, 5, '{'})
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 64<<10 {
			return
		}
		for _, files := range []bool{false, true} {
			a, b := pair(t)
			go func() {
				_, _ = io.Copy(a, bytes.NewReader(data))
				_ = a.CloseWrite()
			}()
			c := NewConn(b)
			if files {
				_, _ = c.ReceiveFiles(&Request{}, 1<<20)
			} else {
				_ = c.Receive(&Answer{}, 1<<20)
			}
			_, _ = a.Close(), b.Close()
		}
	})
}
