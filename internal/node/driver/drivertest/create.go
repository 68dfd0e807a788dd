package drivertest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

var lifeClauses = []Clause{
	{"name", "Name is stable and the one that the driver is known by.", func(b *bench) {
		b.want("Name()", b.d.Name(), b.h.Name)
	}},
	{"probe", "Probe runs a part of a machine for real, says what it proved, and leaves nothing.", func(b *bench) {
		before := b.list()
		ctx, cancel := b.within(b.h.slowly(30 * time.Second))
		defer cancel()
		c := b.d.Probe(ctx)
		if !c.OK || c.Reason == "" || len(c.Checks) == 0 {
			b.Errorf("Probe = %+v", c)
		}
		if after := b.list(); !slices.Equal(before, after) {
			b.Errorf("Probe left machines: %v", after)
		}
	}},
	{"probe-deadline", "Probe respects its deadline, and doesn't call a host good that it had no time to try.", func(b *bench) {
		ctx, cancel := b.within(time.Millisecond)
		defer cancel()
		started := time.Now()
		c := b.d.Probe(ctx)
		if c.OK || c.Reason == "" {
			b.Errorf("Probe in a millisecond = %+v", c)
		}
		if took := time.Since(started); took > b.h.slowly(5*time.Second) {
			b.Errorf("it took %v", took)
		}
	}},
	{"create-runs", "When Create returns, the machine runs on the host.", func(b *bench) {
		m := b.bare()
		if len(b.pids(m.ID())) == 0 {
			b.Errorf("no process of it runs")
		}
		if _, err := m.Stats(b.ctx); err != nil {
			b.Errorf("Stats = %v", err)
		}
		b.alive(m)
	}},
	{"create-dials", "A created machine's guest dials the host by itself.", func(b *bench) {
		l, err := b.bare().Guest()
		if err != nil {
			b.Fatalf("Guest = %v", err)
		}
		stop := time.AfterFunc(b.patience(), func() { _ = l.Close() })
		defer stop.Stop()
		conn, err := l.Accept()
		if err != nil {
			b.Fatalf("nobody dialled: %v", err)
		}
		_ = conn.Close()
	}},
	{"hello-proof", "A fresh guest's first hello is unproven and gets the key; the next one proves it.", helloProof},
	{"pid-1", "The guest binary, as supervisor, is PID 1, with the environment of Spec.Supervisor.", func(b *bench) {
		x := b.box()
		if args := strings.Fields(x.root("init")); len(args) != 2 || args[1] != "supervisor" {
			b.Errorf("PID 1 is %q", args)
		}
		b.has("PID 1's environment", x.root("initenv"), "GREETING=hello")
	}},
	{"hostname", "The machine has the host name of its spec.", func(b *bench) {
		b.want("the host name", b.box(func(s *driver.Spec) { s.Hostname = "glass-bell" }).root("hostname"), "glass-bell")
	}},
}

func helloProof(b *bench) {
	l, err := b.bare().Guest()
	if err != nil {
		b.Fatalf("Guest = %v", err)
	}
	stop := time.AfterFunc(b.patience(), func() { _ = l.Close() })
	defer stop.Stop()
	key := guestapi.NewKey()
	for i := range 3 {
		conn, err := l.Accept()
		if err != nil {
			b.Fatalf("hello %d: nobody dialled: %v", i, err)
		}
		_ = conn.SetDeadline(time.Now().Add(b.patience()))
		nonce, err := guestapi.Challenge(conn)
		if err != nil {
			b.Fatalf("hello %d: %v", i, err)
		}
		hello, err := guestapi.ReadHello(conn)
		if err != nil {
			b.Fatalf("hello %d: %v", i, err)
		}
		if proven := guestapi.Proves(hello, key, nonce); proven != (i > 0) || hello.GetPurpose() != guestapi.PurposeControl {
			b.Errorf("hello %d: proven: %v, %v", i, proven, hello)
		}
		answer := &guestv1.HelloAnswer{Ok: true, Version: guestapi.MaxVersion, Epoch: 1}
		if i == 0 {
			answer.Key = key
		}
		if err := guestapi.WriteAnswer(conn, answer); err != nil {
			b.Fatalf("hello %d: %v", i, err)
		}
		// The guest keeps the key before it serves, so it is asked for an
		// answer of HTTP/2 (its settings) before it is hung up on.
		if i == 0 {
			_, _ = conn.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
			if _, err := conn.Read(make([]byte, 9)); err != nil {
				b.Errorf("it serves nothing: %v", err)
			}
		}
		_ = conn.Close()
	}
}

var createClauses = []Clause{
	{"create-cancelled", "A Create whose context ends returns the context's error and leaves nothing.", func(b *bench) {
		b.discard(b.bare().ID()) // whatever is started once is there now
		for _, after := range []time.Duration{0, 10, 30, 60} {
			s := b.spec()
			ctx, cancel := b.within(after * time.Millisecond)
			m, err := b.d.Create(ctx, s)
			cancel()
			if err == nil {
				b.discard(m.ID()) // it was faster
				continue
			}
			if !errors.Is(err, context.DeadlineExceeded) {
				b.Errorf("cancelled after %d ms: %v", after, err)
			}
			b.nothingLeft(s.ID)
		}
	}},
	{"create-missing-image", "A machine without an image is refused; the error names it and nothing is left.", func(b *bench) {
		refused(b, "no-such-image", func(s *driver.Spec) { s.Image = "/no-such-image" })
	}},
	{"create-missing-guest", "A machine without a guest binary is refused; the error names it and nothing is left.", func(b *bench) {
		refused(b, "no-such-guest", func(s *driver.Spec) { s.Guest = "/no-such-guest" })
	}},
	{"create-missing-network", "A machine without its network namespace is refused; the error names it and nothing is left.", func(b *bench) {
		refused(b, "no-such-namespace", func(s *driver.Spec) { s.NetNS = "/no-such-namespace" })
	}},
	{"create-corrupt-image", "A machine over an image that is none is refused, and nothing is left.", func(b *bench) {
		junk := b.junk()
		defer os.Remove(junk)
		refused(b, "", func(s *driver.Spec) { s.Image = junk })
	}},
	{"create-corrupt-guest", "A machine whose guest binary can't be run is refused, and nothing is left.", func(b *bench) {
		junk := b.junk()
		defer os.Remove(junk)
		refused(b, "", func(s *driver.Spec) { s.Guest = junk })
	}},
	{"create-malformed-id", "An id that is none is refused as invalid, by every call that could act on it.", func(b *bench) {
		for _, id := range []string{"", ".", "../x", "sbx_", "sbx_" + strings.Repeat("a", 19) + "/"} {
			s := b.spec()
			s.ID = id
			if _, err := b.d.Create(b.ctx, s); !sandbox.IsClass(err, sandbox.Invalid) {
				b.Errorf("Create(%q) = %v", id, err)
			}
			if err := b.d.Discard(b.ctx, id); !sandbox.IsClass(err, sandbox.Invalid) {
				b.Errorf("Discard(%q) = %v", id, err)
			}
			if _, err := b.d.Adopt(b.ctx, id); !sandbox.IsClass(err, sandbox.Invalid) && !sandbox.IsClass(err, sandbox.NotFound) {
				b.Errorf("Adopt(%q) = %v", id, err)
			}
		}
	}},
	{"create-twice", "A second Create of an id is a conflict, and leaves the first machine alone.", func(b *bench) {
		x := b.box()
		s, err := b.newSpec(sandbox.NewID(sandbox.KindSandbox))
		if err != nil {
			b.Fatalf("%v", err)
		}
		s.ID = x.m.ID()
		if _, err := b.d.Create(b.ctx, s); !sandbox.IsClass(err, sandbox.Conflict) {
			b.Errorf("Create = %v", err)
		}
		b.alive(x.m)
		b.want("its file", x.root("cat", "/etc/mark"), "from the image")
	}},
	{"create-again", "An id whose machine was discarded can be made again, and begins afresh.", func(b *bench) {
		s := b.spec()
		for range 2 {
			m, err := b.d.Create(b.ctx, s)
			if err != nil {
				b.Fatalf("create: %v", err)
			}
			x, err := b.boxOf(m, nil)
			if err != nil {
				b.Fatalf("the guest did not come: %v", err)
			}
			if r := x.do(as("root", "cat", "/tmp/mine")); r.exit.GetCode() == 0 {
				b.Errorf("it has the file of the machine before: %q", r.out.String())
			}
			x.root("write", "/tmp/mine", "x")
			x.link.Close()
			b.discard(s.ID)
		}
	}},
	{"similar-ids", "Machines whose ids differ in one character are different machines.", func(b *bench) {
		id := sandbox.NewID(sandbox.KindSandbox)
		var ms []driver.Machine
		for _, last := range []string{"a", "b"} {
			s, err := b.newSpec(id[:len(id)-1] + last)
			if err != nil {
				b.Fatalf("%v", err)
			}
			m, err := b.d.Create(b.ctx, s)
			if err != nil {
				b.Fatalf("create: %v", err)
			}
			ms = append(ms, m)
		}
		b.discard(ms[0].ID())
		b.alive(ms[1])
		if _, err := b.boxOf(ms[1], nil); err != nil {
			b.Errorf("the other one: %v", err)
		}
	}},
	{"eight-at-once", "Machines can be created and discarded at the same time.", func(b *bench) {
		var wg sync.WaitGroup
		errs := make([]error, 8)
		boxes := make([]*box, 8)
		for i := range boxes {
			s := b.spec(func(s *driver.Spec) { s.Resources.MemoryMiB = 128 })
			wg.Go(func() {
				m, err := b.d.Create(b.ctx, s)
				if err == nil {
					boxes[i], err = b.boxOf(m, nil)
				}
				errs[i] = err
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			b.Fatalf("create: %v", err)
		}
		for _, x := range boxes {
			b.want("its file", x.user("cat", "/etc/mark"), "from the image")
		}
		for i, x := range boxes {
			wg.Go(func() {
				x.link.Close()
				errs[i] = b.d.Discard(b.ctx, x.m.ID())
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			b.Errorf("discard: %v", err)
		}
		for _, x := range boxes {
			b.nothingLeft(x.m.ID())
		}
	}},
}

// refused asserts that a machine is refused, for a reason that holds a word.
func refused(b *bench, word string, change func(*driver.Spec)) {
	b.Helper()
	s := b.spec(change)
	ctx, cancel := b.within(b.patience())
	defer cancel()
	_, err := b.d.Create(ctx, s)
	if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), word) || len(err.Error()) < 20 {
		b.Errorf("Create = %v", err)
	}
	b.Logf("refused: %v", err)
	b.nothingLeft(s.ID)
}

// junk makes a file that is neither an image nor a program.
func (b *bench) junk() string {
	b.Helper()
	out, err := b.h.Files.onHost("out", "300000")
	if err != nil {
		b.Fatalf("%v", err)
	}
	path := filepath.Join(os.TempDir(), sandbox.NewID("junk_"))
	if err := os.WriteFile(path, out, 0o755); err != nil {
		b.Fatalf("%v", err)
	}
	return path
}
