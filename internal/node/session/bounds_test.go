package session

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

func TestHostileGuest(t *testing.T) {
	type stream = connect.ServerStream[guestv1.Event]
	out := func(s *stream, at uint64, text string) error {
		return s.Send(&guestv1.Event{Offset: at, Event: &guestv1.Event_Stdout{Stdout: []byte(text)}})
	}
	exit := func(s *stream, at uint64, x *guestv1.Exit) error {
		return s.Send(&guestv1.Event{Offset: at, Event: &guestv1.Event_Exit{Exit: x}})
	}
	for _, c := range []struct {
		name   string
		follow func(ctx context.Context, at uint64, s *stream) error
		all    string
		kind   Kind
		detail string
		code   int
	}{
		{"backwards", func(_ context.Context, _ uint64, s *stream) error {
			return joined(out(s, 0, "abc"), out(s, 0, "abc"), out(s, 1, "bcd"), out(s, 2, ""), exit(s, 4, exited(1)))
		}, "abcd", KindExit, "", 1},
		{"forwards", func(_ context.Context, _ uint64, s *stream) error {
			return joined(out(s, 0, "abc"), out(s, 5, "x"), exit(s, 6, exited(0)))
		}, "abc", KindLost, "left output out", 0},
		{"forwards by wrapping", func(_ context.Context, _ uint64, s *stream) error {
			return out(s, 1<<64-1, "xyz")
		}, "", KindLost, "left output out", 0},
		{"huge event", func(_ context.Context, _ uint64, s *stream) error {
			return out(s, 0, strings.Repeat("x", maxEvent+1))
		}, "", KindLost, "too large", 0},
		{"early exit", func(_ context.Context, _ uint64, s *stream) error {
			return joined(out(s, 0, "abc"), exit(s, 2, exited(0)))
		}, "abc", KindLost, "before output", 0},
		{"late exit", func(_ context.Context, _ uint64, s *stream) error {
			return exit(s, 10, exited(0))
		}, "", KindLost, "left output out", 0},
		{"events after exit", func(_ context.Context, _ uint64, s *stream) error {
			return joined(exit(s, 0, exited(0)), out(s, 0, "more"), exit(s, 4, exited(9)))
		}, "", KindExit, "", 0},
		{"wild exit", func(_ context.Context, _ uint64, s *stream) error {
			return exit(s, 0, &guestv1.Exit{Code: -5, Signal: 4000, Reason: "nonsense", Message: strings.Repeat("m", 1<<20)})
		}, "", KindExit, "", 0},
		{"code too large", func(_ context.Context, _ uint64, s *stream) error {
			return exit(s, 0, exited(1<<30))
		}, "", KindExit, "", 255},
		{"empty events and early ends", func(_ context.Context, at uint64, s *stream) error {
			if at < 3 {
				return joined(s.Send(&guestv1.Event{Offset: at}), out(s, at, "x"))
			}
			return exit(s, at, exited(0))
		}, "xxx", KindExit, "", 0},
		{"garbles", func(_ context.Context, _ uint64, s *stream) error {
			return out(s, 0, strings.Repeat("x", 5<<20)) // over the client's read limit
		}, "", KindLost, "can't be understood", 0},
		{"forgets", func(context.Context, uint64, *stream) error {
			return connect.NewError(connect.CodeNotFound, fmt.Errorf("who?"))
		}, "", KindLost, "does not know", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, func(*fakeProc, []string) {})
			r.guest.follow = c.follow
			got := r.read(r.start(), 0)
			if string(got.all) != c.all || got.last.Kind != c.kind {
				t.Fatalf("%q, then %s", got.all, got.last.Kind)
			}
			if x := got.last.Exit; x != nil && (x.Code != c.code || x.Signal > 64 || len(x.Message) > maxMessage || x.Reason != "exited") {
				t.Fatalf("%+v", x)
			}
			if l := got.last.Loss; l != nil && !strings.Contains(l.Detail, c.detail) {
				t.Fatalf("%+v", l)
			}
		})
	}
}

func joined(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func TestTinyWrites(t *testing.T) {
	const n = 50_000
	r := newRig(t, func(p *fakeProc, _ []string) {
		for range n {
			p.write(false, []byte("y"))
		}
		p.finish(exited(0))
	})
	ref := r.start()
	if got := r.read(ref, 0); len(got.all) != n || got.last.Kind != KindExit {
		t.Fatalf("%d bytes", len(got.all))
	}
	st, err := r.State(ref)
	must(t, err)
	if st.LogBytes > 2*n {
		t.Errorf("%d bytes on disk for %d", st.LogBytes, n)
	}
}

func TestExpiryAndRetention(t *testing.T) {
	var retired []Ref
	busy := errors.New("busy")
	r := newRig(t, func(p *fakeProc, _ []string) { p.write(false, []byte("abc")); p.finish(exited(0)) }, func(o *Options) {
		o.Retire = func(_ context.Context, ref Ref) error {
			if busy != nil {
				return busy
			}
			retired = append(retired, ref)
			return nil
		}
	})
	done := r.start()
	r.read(done, 0)
	idle := r.register(done.Sandbox)
	waiting, err := r.Reader(idle, 0)
	must(t, err)
	defer waiting.Close()
	r.clock.add(9 * time.Minute)
	must(t, r.Sweep(ctx(t)))
	if st, err := r.State(idle); err != nil || st.Status != Created {
		t.Fatal(st.Status, err)
	}
	r.clock.add(time.Minute)
	must(t, r.Sweep(ctx(t)))
	if _, err := waiting.Next(ctx(t)); sandbox.AsError(err).Code != "session_expired" {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx(t), idle); sandbox.AsError(err).Code != "session_expired" {
		t.Fatal(err)
	}
	r.stop()
	r.open()
	if st, err := r.State(idle); err != nil || st.Status != Expired {
		t.Fatal(st.Status, err)
	}
	r.clock.add(8 * 24 * time.Hour)
	if err := r.Sweep(ctx(t)); !errors.Is(err, busy) {
		t.Fatal(err)
	}
	if list, err := r.List(done.Sandbox); err != nil || len(list) != 2 {
		t.Fatal("sessions were removed although retiring them failed:", list, err)
	}
	busy = nil
	must(t, r.Sweep(ctx(t)))
	if len(retired) != 2 || !slices.Contains(retired, done) || !slices.Contains(retired, idle) {
		t.Fatal(retired)
	}
	if list, err := r.List(done.Sandbox); err != nil || len(list) != 0 {
		t.Fatal(list, err)
	}
	if left, err := os.ReadDir(r.opt.Dir + "/" + done.Sandbox); err != nil || len(left) != 0 {
		t.Fatal(left, err)
	}
}

func TestProjectBound(t *testing.T) {
	const each = 2 << 20
	r := newRig(t, func(p *fakeProc, _ []string) { p.write(false, noise(1, each)); p.finish(exited(0)) },
		func(o *Options) { o.Quota, o.ProjectQuota = 4<<20, 5<<20 })
	var refs []Ref
	for range 4 {
		refs = append(refs, r.start())
		r.read(refs[len(refs)-1], 0)
		r.clock.add(time.Second)
	}
	must(t, r.syncDirty())
	must(t, r.Sweep(ctx(t)))
	var total int64
	for i, ref := range refs {
		st, err := r.State(ref)
		must(t, err)
		total += st.LogBytes
		got := r.read(ref, 0)
		if kept := uint64(len(got.all)); kept != each-st.First || (st.First > 0 && got.gaps[0] != [2]uint64{0, st.First}) || got.last.Kind != KindExit {
			t.Errorf("session %d: first %d, kept %d, gaps %v", i, st.First, kept, got.gaps)
		}
		if i == 0 && st.First != each || i == 3 && st.First != 0 {
			t.Errorf("session %d is kept from %d", i, st.First)
		}
	}
	if total > 5<<20 {
		t.Errorf("%d bytes kept", total)
	}
}

func TestDeleteEndsReaders(t *testing.T) {
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	r := newRig(t, func(*fakeProc, []string) { <-hang })
	ref := r.start()
	failed := make(chan error)
	go func() {
		_, err := readSession(ctx(t), r.Manager, ref, 0)
		failed <- err
	}()
	time.Sleep(10 * time.Millisecond)
	must(t, r.DeleteSandbox(ctx(t), ref.Sandbox))
	if err := <-failed; !sandbox.IsClass(err, sandbox.NotFound) {
		t.Fatal(err)
	}
}

func TestDiskFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP: needs root to mount a small tmpfs")
	}
	dir := t.TempDir()
	if b, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", dir).CombinedOutput(); err != nil {
		t.Skipf("SKIP: a small tmpfs can't be mounted: %s", b)
	}
	t.Cleanup(func() {
		if b, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %s", b)
		}
	})
	data := noise(6, 3<<20)
	r := newRig(t, func(p *fakeProc, _ []string) { p.write(false, data); p.finish(exited(3)) },
		func(o *Options) { o.Dir = dir })
	ballast := dir + "/ballast"
	must(t, os.WriteFile(ballast, make([]byte, 1<<20), 0o600))
	ref := r.start()
	var st State
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		var err error
		st, err = r.State(ref)
		must(t, err)
		if st.Problem != "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no problem told: %+v", st)
		}
	}
	if !strings.Contains(st.Problem, "no space") || st.Status != Running {
		t.Fatalf("%+v", st)
	}
	must(t, os.Remove(ballast))
	if b, err := exec.Command("mount", "-o", "remount,size=16m", dir).CombinedOutput(); err != nil {
		t.Fatalf("remount: %s", b)
	}
	if got := r.read(ref, 0); !bytes.Equal(got.all, data) || got.last.Exit == nil || got.last.Exit.Code != 3 || got.gaps != nil {
		t.Fatalf("%d of %d bytes, gaps %v, %+v", len(got.all), len(data), got.gaps, got.last)
	}
	if st, err := r.State(ref); err != nil || st.Problem != "" {
		t.Fatalf("%q %v", st.Problem, err)
	}
	r.stop()
}

func TestManyOldSessions(t *testing.T) {
	const n = 10_000
	if testing.Short() {
		t.Skip("SKIP: -short: writes 10000 sessions")
	}
	dir := t.TempDir()
	at := time.Now()
	for i := range n {
		ref := Ref{"sbx_" + strings.Repeat("a", 19) + string(rune('a'+i%20)), sandbox.NewID(sandbox.KindSession)}
		d := dir + "/" + ref.Sandbox + "/" + ref.Session
		must(t, os.MkdirAll(d, 0o700))
		b := fmt.Sprintf(`{"version":1,"session":{"id":%q,"sandbox":%q,"process":{"args":["x"],"env":{"A":%q}}},"status":"exited","exit":{"code":0},"ended_at":%q,"end":5}`,
			ref.Session, ref.Sandbox, strings.Repeat("e", 1000), at.Format(time.RFC3339Nano))
		must(t, os.WriteFile(d+"/"+metaName, []byte(b), 0o600))
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	begin := time.Now()
	m, err := New(Options{Dir: dir, Guests: newLink(t, "http://localhost")})
	must(t, err)
	took := time.Since(begin)
	runtime.GC()
	runtime.ReadMemStats(&after)
	used := after.HeapAlloc - before.HeapAlloc
	t.Logf("%d sessions in %v, %d bytes each", n, took, used/n)
	if used > n*1500 {
		t.Errorf("%d bytes per old session", used/n)
	}
	must(t, m.Close())
}
