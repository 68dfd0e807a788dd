package session

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

// recorder is what the test binary is when it stands in for a daemon that gets
// killed: it takes up what is in dir and follows it.
func recorder(dir, url string) {
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "recorder:", err)
			os.Exit(1)
		}
	}
	m, err := New(Options{Dir: dir, Guests: newLink(nil, url), Log: slog.New(slog.DiscardHandler)})
	fail(err)
	ctx := context.Background()
	boxes, err := os.ReadDir(dir)
	fail(err)
	for _, b := range boxes {
		fail(m.MachineReady(ctx, b.Name()))
		list, err := m.List(b.Name())
		fail(err)
		for _, s := range list {
			_, err := m.Start(ctx, Ref{b.Name(), s.Session.ID})
			fail(err)
		}
	}
	fail(m.Run(ctx))
}

// TestKilledDaemon kills the recorder at random times, and in the end the log
// of every session is byte for byte what its command wrote.
func TestKilledDaemon(t *testing.T) {
	const sessions, rounds = 4, 25
	data := make([][]byte, sessions)
	stop := make(chan struct{})
	guest := newGuest(nil)
	guest.run = func(p *fakeProc, args []string) {
		var i int
		fmt.Sscan(args[0], &i)
		rng := rand.New(rand.NewPCG(9, uint64(i)))
		for n := 0; ; n++ {
			select {
			case <-stop:
				p.finish(exited(int32(i)))
				return
			default:
			}
			size := rng.IntN(50_000)
			if i == 0 {
				size = 1 + rng.IntN(20) // tiny writes
			}
			b := noise(uint64(n), size)
			data[i] = append(data[i], b...)
			p.write(n%3 == 0, b)
			if i < 2 {
				time.Sleep(200 * time.Microsecond)
			}
		}
	}
	url := guest.serve(t)
	dir := t.TempDir()
	sbx := sandbox.NewID(sandbox.KindSandbox)
	m, err := New(Options{Dir: dir, Guests: newLink(t, url), Quota: 4 << 30})
	must(t, err)
	refs := make([]Ref, sessions)
	for i := range refs {
		s := sandbox.Session{ID: sandbox.NewID(sandbox.KindSession), Sandbox: sbx, Process: sandbox.Process{Args: []string{fmt.Sprint(i)}}}
		must(t, m.Register(ctx(t), s))
		refs[i] = Ref{sbx, s.ID}
	}
	must(t, m.Close())

	var last uint64
	for round := range rounds {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "SESSION_TEST_RECORDER="+dir, "SESSION_TEST_GUEST="+url)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		must(t, cmd.Start())
		time.Sleep(time.Duration(30+rand.IntN(150)) * time.Millisecond) // the kill comes at any time: that is the test
		must(t, cmd.Process.Kill())
		_ = cmd.Wait() // killed
		if stderr.Len() > 0 {
			t.Fatalf("round %d: %s", round, stderr.Bytes())
		}
	}
	close(stop)
	m, err = New(Options{Dir: dir, Guests: newLink(t, url), Quota: 4 << 30})
	must(t, err)
	must(t, m.MachineReady(ctx(t), sbx))
	for i, ref := range refs {
		got, err := readSession(ctx(t), m, ref, 0)
		must(t, err)
		if !bytes.Equal(got.all, data[i]) || got.gaps != nil || got.last.Exit == nil || got.last.Exit.Code != i || got.start == nil {
			t.Errorf("session %d: %d of %d bytes, gaps %v, end %+v", i, len(got.all), len(data[i]), got.gaps, got.last)
		}
		last += uint64(len(got.all))
	}
	if guest.starts != sessions {
		t.Errorf("%d starts of %d sessions", guest.starts, sessions)
	}
	t.Logf("%d kills, %d bytes in %d sessions, all there once", rounds, last, sessions)
	must(t, m.Close())
}

// TestKilledWhileStarting: the intent is on disk, the answer is not.
func TestKilledWhileStarting(t *testing.T) {
	r := newRig(t, func(p *fakeProc, _ []string) { p.write(false, []byte("abc")); p.finish(exited(0)) })
	sbx := sandbox.NewID(sandbox.KindSandbox)
	asked, runs, unheard := r.register(sbx), r.register(sbx), r.register(sbx)
	for _, ref := range []Ref{asked, runs} {
		e, err := r.get(ref)
		must(t, err)
		l, err := r.acquire(e)
		must(t, err)
		must(t, r.intend(e, l))
		r.release(e)
	}
	r.stop()
	for _, id := range []string{runs.Session, unheard.Session} {
		_, err := r.guest.Start(ctx(t), connect.NewRequest(&guestv1.StartRequest{Session: id}))
		must(t, err)
	}
	r.open()
	if st, err := r.State(asked); err != nil || st.Status != Starting {
		t.Fatal(st.Status, err)
	}
	must(t, r.MachineReady(ctx(t), sbx))
	for _, ref := range []Ref{runs, unheard} {
		if got := r.read(ref, 0); string(got.all) != "abc" || got.last.Kind != KindExit || got.start == nil {
			t.Fatalf("%+v", got)
		}
	}
	if st, err := r.State(asked); err != nil || st.Status != Created {
		t.Fatal(st.Status, err)
	}
	_, err := r.Start(ctx(t), asked)
	must(t, err)
	if got := r.read(asked, 0); string(got.all) != "abc" || r.guest.starts != 3 {
		t.Fatalf("%+v, %d starts", got, r.guest.starts)
	}
}

// TestStartOutlivesItsCaller: a caller that goes away takes nothing back.
func TestStartOutlivesItsCaller(t *testing.T) {
	r := newRig(t, func(p *fakeProc, _ []string) { p.finish(exited(0)) })
	ref := r.register(sandbox.NewID(sandbox.KindSandbox))
	dead, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := r.Start(dead, ref)
	must(t, err)
	if got := r.read(ref, 0); got.last.Kind != KindExit {
		t.Fatalf("%+v", got)
	}
}

// TestStartWithoutAgent: what surely did not start may be started later.
func TestStartWithoutAgent(t *testing.T) {
	r := newRig(t, func(p *fakeProc, _ []string) { p.finish(exited(0)) })
	ref := r.register(sandbox.NewID(sandbox.KindSandbox))
	r.link.setBroken(true)
	if _, err := r.Start(ctx(t), ref); !sandbox.IsClass(err, sandbox.Unavailable) {
		t.Fatal(err)
	}
	if st, err := r.State(ref); err != nil || st.Status != Created {
		t.Fatal(st.Status, err)
	}
	r.link.setBroken(false)
	_, err := r.Start(ctx(t), ref)
	must(t, err)
}

func BenchmarkFollow(b *testing.B) {
	data := noise(1, 64<<10)
	n := 0
	r := newRig(b, func(p *fakeProc, _ []string) {
		for range n {
			p.write(false, data)
		}
		p.finish(exited(0))
	})
	b.SetBytes(int64(len(data)))
	n = b.N
	b.ResetTimer()
	ref := r.start()
	rd, err := r.Reader(ref, 0)
	must(b, err)
	for {
		if _, err := rd.Next(context.Background()); err != nil {
			break
		}
	}
	must(b, rd.Close())
}

func BenchmarkCommand(b *testing.B) {
	r := newRig(b, func(p *fakeProc, _ []string) { p.write(false, []byte("hi")); p.finish(exited(0)) })
	for b.Loop() {
		ref := r.register("sbx_aaaaaaaaaaaaaaaaaaaa")
		_, err := r.Start(context.Background(), ref)
		must(b, err)
		if _, err := readSession(context.Background(), r.Manager, ref, 0); err != nil {
			b.Fatal(err)
		}
	}
}
