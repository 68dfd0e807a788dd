package session

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("SESSION_TEST_RECORDER"); dir != "" {
		recorder(dir, os.Getenv("SESSION_TEST_GUEST"))
		return
	}
	goleak.VerifyTestMain(m)
}

type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// rig is a manager with one guest.
type rig struct {
	*Manager
	t     testing.TB
	guest *fakeGuest
	link  *link
	clock *clock
	opt   Options
	stop  func()
}

func newRig(t testing.TB, run func(p *fakeProc, args []string), change ...func(*Options)) *rig {
	t.Helper()
	r := &rig{t: t, guest: newGuest(run), clock: &clock{now: time.Now()}}
	r.link = newLink(t, r.guest.serve(t))
	r.opt = Options{Dir: t.TempDir(), Guests: r.link, Clock: r.clock.Now, Log: slog.New(slog.DiscardHandler)}
	for _, c := range change {
		c(&r.opt)
	}
	r.open()
	t.Cleanup(func() { r.stop() })
	return r
}

func (r *rig) open() {
	r.t.Helper()
	m, err := New(r.opt)
	must(r.t, err)
	r.Manager = m
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- m.Run(ctx) }()
	var once sync.Once
	r.stop = func() {
		once.Do(func() {
			cancel()
			must(r.t, <-done)
			must(r.t, m.Close())
		})
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func ctx(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return c
}

func (r *rig) register(sbx string) Ref {
	r.t.Helper()
	s := sandbox.Session{
		ID: sandbox.NewID(sandbox.KindSession), Project: "prj_x", Sandbox: sbx,
		Process: sandbox.Process{Args: []string{"cmd"}}, CreatedAt: r.clock.Now(),
	}
	must(r.t, r.Register(ctx(r.t), s))
	return Ref{sbx, s.ID}
}

func (r *rig) start() Ref {
	r.t.Helper()
	ref := r.register(sandbox.NewID(sandbox.KindSandbox))
	s, err := r.Start(ctx(r.t), ref)
	must(r.t, err)
	if s.Status != Running && !s.Status.Ended() {
		r.t.Fatalf("status %s", s.Status)
	}
	return ref
}

// told is all that a reader was told.
type told struct {
	out, err []byte
	all      []byte
	gaps     [][2]uint64
	start    *Start
	last     Event
}

func (r *rig) read(ref Ref, from uint64) told {
	r.t.Helper()
	got, err := readSession(ctx(r.t), r.Manager, ref, from)
	must(r.t, err)
	return got
}

func readSession(ctx context.Context, m *Manager, ref Ref, from uint64) (got told, err error) {
	rd, err := m.Reader(ref, from)
	if err != nil {
		return got, err
	}
	defer rd.Close()
	at := from
	for {
		ev, err := rd.Next(ctx)
		if errors.Is(err, io.EOF) {
			return got, nil
		}
		if err != nil {
			return got, err
		}
		if ev.Offset != at {
			return got, errors.New("events are not contiguous")
		}
		at = ev.Next()
		switch ev.Kind {
		case KindStarted:
			got.start = ev.Start
		case KindStdout:
			got.out = append(got.out, ev.Data...)
			got.all = append(got.all, ev.Data...)
		case KindStderr:
			got.err = append(got.err, ev.Data...)
			got.all = append(got.all, ev.Data...)
		case KindGap:
			got.gaps = append(got.gaps, [2]uint64{ev.Offset, ev.To})
		default:
			got.last = ev
		}
	}
}

func noise(seed uint64, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed)}).Read(b)
	return b
}

func exited(code int32) *guestv1.Exit { return &guestv1.Exit{Code: code, Reason: "exited"} }

func TestWholeLife(t *testing.T) {
	out, errs := append([]byte{0xff, 0xfe, 0}, noise(1, 3<<20)...), noise(2, 100_000)
	r := newRig(t, func(p *fakeProc, _ []string) {
		p.write(false, out[:10])
		p.write(true, errs)
		p.write(false, out[10:])
		p.finish(exited(7))
	})
	ref := r.register(sandbox.NewID(sandbox.KindSandbox))
	early := make(chan told)
	go func() {
		got, err := readSession(ctx(t), r.Manager, ref, 0)
		if err != nil {
			t.Error(err)
		}
		early <- got
	}()
	s, err := r.Start(ctx(t), ref)
	must(t, err)
	if s.Status != Running && s.Status != Exited {
		t.Fatal(s.Status)
	}
	check := func(got told) {
		t.Helper()
		if !bytes.Equal(got.out, out) || !bytes.Equal(got.err, errs) || got.gaps != nil {
			t.Fatalf("%d of %d and %d of %d bytes, gaps %v", len(got.out), len(out), len(got.err), len(errs), got.gaps)
		}
		if got.start == nil || got.start.PID != 42 || got.last.Exit == nil || got.last.Exit.Code != 7 {
			t.Fatalf("%+v %+v", got.start, got.last)
		}
	}
	check(<-early)
	check(r.read(ref, 0))
	end := uint64(len(out) + len(errs))
	if got := r.read(ref, end); got.last.Kind != KindExit || got.all != nil {
		t.Fatalf("%+v", got)
	}
	if _, err := r.Reader(ref, end+1); sandbox.AsError(err).Code != "offset_out_of_range" {
		t.Fatal(err)
	}
	again, err := r.Start(ctx(t), ref)
	must(t, err)
	if again.Status != Exited || r.guest.starts != 1 || again.End != end {
		t.Fatalf("%+v, %d starts", again, r.guest.starts)
	}
	r.stop()
	r.open()
	check(r.read(ref, 0))
	if st, err := r.State(ref); err != nil || st.Exit.Code != 7 || st.Session.ID != ref.Session || st.End != end {
		t.Fatalf("%+v %v", st, err)
	}
	must(t, r.MachineReady(ctx(t), ref.Sandbox))
	list, err := r.List(ref.Sandbox)
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	must(t, r.DeleteSandbox(ctx(t), ref.Sandbox))
	must(t, r.DeleteSandbox(ctx(t), ref.Sandbox))
	if left, err := os.ReadDir(r.opt.Dir); err != nil || len(left) != 0 {
		t.Fatal(left, err)
	}
	if _, err := r.State(ref); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Fatal(err)
	}
}

func TestLinkBreaks(t *testing.T) {
	data := noise(3, 8<<20)
	r := newRig(t, func(p *fakeProc, _ []string) {
		for rest := data; len(rest) > 0; {
			n := min(len(rest), 33_333)
			p.write(len(rest)%2 == 0, rest[:n])
			rest = rest[n:]
		}
		p.finish(exited(0))
	})
	ref := r.start()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 30 {
			r.link.cut()
			if err := r.MachineReady(ctx(t), ref.Sandbox); err != nil && !sandbox.IsClass(err, sandbox.Unavailable) {
				t.Error(err)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	got := r.read(ref, 0)
	<-done
	if !bytes.Equal(got.all, data) || got.last.Kind != KindExit {
		t.Fatalf("%d of %d bytes, then %s", len(got.all), len(data), got.last.Kind)
	}
}

func TestSlowReaderDoesNotStall(t *testing.T) {
	const total = 24 << 20
	data := noise(4, 1<<20)
	r := newRig(t, func(p *fakeProc, _ []string) {
		for range total >> 20 {
			p.write(false, data)
		}
		p.finish(exited(0))
	}, func(o *Options) { o.Quota = 8 << 20 })
	ref := r.register(sandbox.NewID(sandbox.KindSandbox))
	slow, err := r.Reader(ref, 0)
	must(t, err)
	defer slow.Close()
	_, err = r.Start(ctx(t), ref)
	must(t, err)
	ev, err := slow.Next(ctx(t))
	if err != nil || ev.Kind != KindStarted {
		t.Fatal(ev.Kind, err)
	}
	ev, err = slow.Next(ctx(t))
	if err != nil || ev.Kind != KindStdout {
		t.Fatal(ev.Kind, err)
	}
	at := ev.Next()
	late := r.read(ref, at) // waits for the exit while slow sleeps
	if late.last.Kind != KindExit {
		t.Fatal(late.last.Kind)
	}
	st, err := r.State(ref)
	must(t, err)
	if st.LogBytes > 8<<20 || st.First == 0 || st.End != total {
		t.Fatalf("%+v", st)
	}
	var gap bool
	for {
		ev, err = slow.Next(ctx(t))
		must(t, err)
		if ev.Offset != at {
			t.Fatalf("event at %d, want %d", ev.Offset, at)
		}
		at = ev.Next()
		if ev.Kind == KindGap {
			gap = true
			if ev.To != st.First {
				t.Fatalf("gap to %d, kept from %d", ev.To, st.First)
			}
		}
		for i, c := range ev.Data {
			if c != data[(ev.Offset+uint64(i))%uint64(len(data))] {
				t.Fatal("wrong bytes")
			}
		}
		if ev.Kind == KindExit {
			break
		}
	}
	if !gap || at != total {
		t.Fatalf("gap %v, end %d", gap, at)
	}
	fresh := r.read(ref, 0)
	if fresh.start == nil || len(fresh.gaps) != 1 || fresh.gaps[0] != [2]uint64{0, st.First} || uint64(len(fresh.all)) != total-st.First {
		t.Fatalf("gaps %v, %d bytes", fresh.gaps, len(fresh.all))
	}
}

func TestControl(t *testing.T) {
	end := make(chan struct{})
	r := newRig(t, func(p *fakeProc, _ []string) { <-end; p.finish(exited(0)) })
	ref := r.register(sandbox.NewID(sandbox.KindSandbox))
	if _, err := r.Stdin(ctx(t), ref, 0, nil, true); sandbox.AsError(err).Code != "session_not_running" {
		t.Fatal(err)
	}
	_, err := r.Start(ctx(t), ref)
	must(t, err)
	for range 2 {
		n, err := r.Stdin(ctx(t), ref, 0, []byte("hello"), false)
		if err != nil || n != 5 {
			t.Fatal(n, err)
		}
	}
	must(t, r.Signal(ctx(t), ref, 15))
	must(t, r.Resize(ctx(t), ref, sandbox.WindowSize{Rows: 24, Cols: 1 << 20}))
	if r.guest.signal != 15 || r.guest.size.Cols != 65535 || string(r.guest.stdin) != "hello" {
		t.Fatal(r.guest.signal, r.guest.size, r.guest.stdin)
	}
	if err := r.Signal(ctx(t), ref, 99); !sandbox.IsClass(err, sandbox.Invalid) {
		t.Fatal(err)
	}
	must(t, r.Barrier(ctx(t), ref.Sandbox))
	close(end)
	if got := r.read(ref, 0); got.last.Kind != KindExit {
		t.Fatal(got.last.Kind)
	}
}

func TestMachineEnds(t *testing.T) {
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	data := noise(5, 300_000)
	r := newRig(t, func(p *fakeProc, _ []string) { p.write(false, data); <-hang })
	ref := r.start()
	never := r.register(ref.Sandbox)
	must(t, r.Barrier(ctx(t), ref.Sandbox))
	r.link.setBroken(true)
	must(t, r.MachineEnded(ctx(t), ref.Sandbox, sandbox.End{Reason: sandbox.EndOOM, Detail: "limit"}))
	got := r.read(ref, 0)
	if !bytes.Equal(got.all, data) || got.last.Kind != KindLost || got.last.Loss.Reason != "oom" || got.last.Loss.Detail != "limit" {
		t.Fatalf("%d bytes, %+v", len(got.all), got.last.Loss)
	}
	if _, err := r.Start(ctx(t), never); sandbox.AsError(err).Code != "machine_ended" {
		t.Fatal(err)
	}
	r.stop()
	r.open()
	if got = r.read(ref, 0); got.last.Kind != KindLost || !bytes.Equal(got.all, data) {
		t.Fatalf("%+v", got.last)
	}
}

func TestRecoveredSessionEndsWithItsMachine(t *testing.T) {
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	r := newRig(t, func(p *fakeProc, _ []string) { p.write(false, []byte("abc")); <-hang })
	lost, unknown := r.start(), r.start()
	for _, ref := range []Ref{lost, unknown} {
		must(t, r.Barrier(ctx(t), ref.Sandbox))
	}
	r.stop()
	r.open()
	must(t, r.MachineEnded(ctx(t), lost.Sandbox, sandbox.End{Reason: sandbox.EndHostRestart}))
	if got := r.read(lost, 0); string(got.all) != "abc" || got.last.Loss == nil || got.last.Loss.Reason != "host_restart" || got.start == nil {
		t.Fatalf("%+v", got)
	}
	r.guest.mu.Lock()
	delete(r.guest.procs, unknown.Session)
	r.guest.mu.Unlock()
	must(t, r.MachineReady(ctx(t), unknown.Sandbox))
	if got := r.read(unknown, 0); string(got.all) != "abc" || got.last.Loss == nil || got.last.Loss.Reason != ReasonUnknown {
		t.Fatalf("%+v", got)
	}
}
