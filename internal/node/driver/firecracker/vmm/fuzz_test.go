package vmm

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"cloche.dev/cloche/internal/sandbox"
)

// FuzzAnswer lets a VMM say anything, and then hang up or keep silent: the
// client returns a value within bounds or an error that is, in time.
func FuzzAnswer(f *testing.F) {
	for file := range recorded {
		for _, p := range readRecording(f, file) {
			for _, e := range p.exchanges {
				f.Add([]byte(frame(e.status, e.answer)), false)
			}
		}
	}
	whole := frame(200, infoAnswer)
	for _, s := range []string{
		"", whole[:20], whole[:len(whole)-5],
		"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n4e\r\n" + infoAnswer + "\r\n0\r\n\r\n",
		"HTTP/1.0 200 OK\r\n\r\n" + infoAnswer,
		"HTTP/1.1 100 \r\n\r\n" + whole,
		"HTTP/1.1 204 \r\nContent-Length: 99999999999999999999\r\n\r\n",
	} {
		f.Add([]byte(s), true)
		f.Add([]byte(s), false)
	}
	var answer atomic.Pointer[[]byte]
	var silent atomic.Bool
	socket := hostile(f, func(conn net.Conn) {
		_, _ = conn.Write(*answer.Load())
		if silent.Load() {
			_, _ = io.Copy(io.Discard, conn)
		}
	})
	f.Fuzz(func(t *testing.T, data []byte, keepSilent bool) {
		answer.Store(&data)
		silent.Store(keepSilent)
		c := New(socket)
		defer c.Close()
		patience := 20 * time.Millisecond
		if !keepSilent {
			// A VMM that hangs up needs no deadline to be done with.
			patience = time.Minute
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		began := time.Now()
		info, err := c.Info(ctx)
		checkError(t, err)
		if err == nil {
			if info.State != NotStarted && info.State != Running && info.State != Paused || len(info.ID)+len(info.Version) > 128 {
				t.Errorf("took %+v for an answer", info)
			}
		}
		err = c.Start(ctx)
		checkError(t, err)
		if err == nil && !strings.Contains(string(data), " 204") {
			t.Errorf("took %q for done", data)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// checkError wants of an error what a person and a program may be shown.
func checkError(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if m := err.Error(); len(m) > 2*maxMessage || !utf8.ValidString(m) || strings.ContainsAny(m, "\r\n\x00\x1b") {
		t.Errorf("an error of %d bytes: %q", len(m), m)
	}
	var fault *Fault
	switch e := sandbox.AsError(err); {
	case errors.As(err, &fault):
		if fault.Status < 400 || len(fault.Message) > maxMessage {
			t.Errorf("fault %+v", fault)
		}
	case errors.Is(err, ErrGone), errors.Is(err, context.DeadlineExceeded):
	case e.Code != "vmm_answer":
		t.Errorf("code %s: %v", e.Code, err)
	}
}

// FuzzVersion: what a program prints is a release or an error, and a release
// can be judged.
func FuzzVersion(f *testing.F) {
	for _, s := range []string{
		"Firecracker v1.12.1\n\n2026-11-30T00:46:00 [anonymous-instance:main] Firecracker exiting successfully. exit_code=0\n",
		"Jailer v1.12.1\n\n", "Firecracker v1.16.0-dev", "Firecracker v01.2.3", "Firecracker v99999.0.0", "firecracker v1.15.1\r\n", "",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, output []byte) {
		for _, program := range []string{Firecracker, Jailer} {
			v, err := ParseVersion(program, output)
			if err != nil {
				if !sandbox.IsClass(err, sandbox.Invalid) || len(err.Error()) > 512 || v != "" {
					t.Errorf("%q, %v", v, err)
				}
				continue
			}
			if len(v) > 14 || !strings.Contains(string(output), " v"+v) {
				t.Errorf("took %q out of %q", v, output)
			}
			if err := CheckVersion(v, v, true); err != nil && !sandbox.IsClass(err, sandbox.FailedPrecondition) {
				t.Errorf("%s: %v", v, err)
			}
		}
	})
}
