package drivertest

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
)

var processClauses = []Clause{
	{"exit-code", "A command's exit code is told.", func(b *bench) {
		x := b.box()
		for _, code := range []int32{0, 1, 7, 255} {
			if e := x.do(as("user", "exit", fmt.Sprint(code))).exit; e.GetCode() != code || e.GetSignal() != 0 || e.GetReason() != "exited" {
				b.Errorf("exit %d is told as %v", code, e)
			}
		}
	}},
	{"exit-signal", "A command that a signal ended is told with the signal.", func(b *bench) {
		x := b.box()
		for _, sig := range []int32{9, 15} {
			if e := x.do(as("user", "die", fmt.Sprint(sig))).exit; e.GetSignal() != sig || e.GetCode() != 128+sig || e.GetReason() != "signaled" {
				b.Errorf("signal %d is told as %v", sig, e)
			}
		}
	}},
	{"start-failed", "A command that can't be started is told as such, with a shell's code.", func(b *bench) {
		e := b.box().do(&guestv1.StartRequest{Args: []string{"no-such-command"}}).exit
		if e.GetCode() != 127 || e.GetReason() != "start_failed" || !strings.Contains(e.GetMessage(), "no-such-command") {
			b.Errorf("it is told as %v", e)
		}
	}},
	{"streams-apart", "Stdout and stderr are told apart.", func(b *bench) {
		r := b.box().do(as("user", "both"))
		b.want("stdout", r.out.String(), "to stdout")
		b.want("stderr", r.err.String(), "to stderr")
	}},
	{"identity", "A command runs as the user, group and groups that it was asked to.", func(b *bench) {
		x := b.box()
		for _, c := range []struct{ user, ids string }{
			{"", "0 0 0 0 []"},
			{"root", "0 0 0 0 []"},
			{"user", "1000 1000 1000 1000 [2000 2001]"},
			{"1234", "1234 1234 1234 1234 []"},
			{"user:extra", "1000 1000 2000 2000 []"},
		} {
			b.want("the identity of "+c.user, x.must(as(c.user, "ids")), c.ids)
		}
	}},
	{"environment", "A command has the environment that was asked for, and nothing of PID 1's own.", func(b *bench) {
		m := as("user", "env")
		m.Env = map[string]string{"MINE": "a b=c", "PATH": "/bin"}
		env := b.box().must(m)
		for _, want := range []string{"MINE=a b=c", "PATH=/bin", "HOME=/home/user", "USER=user"} {
			b.has("the environment", env, want)
		}
		if strings.Contains(env, "GREETING") || strings.Contains(env, "CLOCHE") {
			b.Errorf("it has something of PID 1's: %q", env)
		}
	}},
	{"directory", "A command runs in the directory that was asked for, else in the user's home.", func(b *bench) {
		x := b.box()
		m := as("user", "cwd")
		m.Cwd = "/data/deep"
		b.want("the directory", x.must(m), "/data/deep")
		b.want("the directory", x.user("cwd"), "/home/user")
	}},
	{"timeout", "A command that takes longer than it may is ended, and told so.", func(b *bench) {
		m := as("user", "sleep", "8")
		m.TimeoutMs = 300
		x, started := b.box(), time.Now()
		if e := x.do(m).exit; e.GetReason() != "timeout" || time.Since(started) > 6*time.Second {
			b.Errorf("after %v: %v", time.Since(started), e)
		}
	}},
	{"signal-group", "A signal reaches the command and its children.", func(b *bench) {
		x := b.box()
		session, r := x.background(as("user", "family"), "ready")
		var child string
		for _, line := range strings.Split(r.out.String(), "\n") {
			if pid, ok := strings.CutPrefix(line, "child "); ok {
				child = pid
			}
		}
		x.signal(session, 15)
		if x.follow(session, r, nil); r.exit.GetSignal() != 15 {
			b.Errorf("it ended with %v", r.exit)
		}
		if !b.eventually(3*time.Second, func() bool { return x.root("alive", child) == "false" }) {
			b.Errorf("its child %s lives", child)
		}
	}},
	{"orphans-reaped", "PID 1 reaps orphans.", func(b *bench) {
		x := b.box()
		x.user("orphan", "5")
		time.Sleep(400 * time.Millisecond) // they are still alive until then
		if !b.eventually(3*time.Second, func() bool { return x.root("zombies") == "0" }) {
			b.Errorf("there are %s zombies", x.root("zombies"))
		}
	}},
	{"orphans-dont-delay", "The exit is told when the main process ends, though a child of it holds stdout.", func(b *bench) {
		x, started := b.box(), time.Now()
		if e := x.do(as("user", "detach")).exit; e.GetCode() != 0 || time.Since(started) > 6*time.Second {
			b.Errorf("after %v: %v", time.Since(started), e)
		}
	}},
}

const manyBytes = 20 << 20

var streamClauses = []Clause{
	{"output-intact", "Every byte of a large output arrives, in order.", func(b *bench) {
		want, err := b.h.Files.onHost("out", fmt.Sprint(manyBytes))
		if err != nil {
			b.Fatalf("%v", err)
		}
		r := b.box().do(as("user", "out", fmt.Sprint(manyBytes)))
		if !bytes.Equal(r.out.Bytes(), want) || r.exit.GetCode() != 0 {
			b.Errorf("%d bytes of %d, equal: %v, %v", r.out.Len(), len(want), bytes.Equal(r.out.Bytes(), want), r.exit)
		}
	}},
	{"stdin-intact", "Every byte of a large stdin arrives, and its end.", func(b *bench) {
		data, err := b.h.Files.onHost("out", "3000000")
		if err != nil {
			b.Fatalf("%v", err)
		}
		x := b.box()
		m := as("user", "hash")
		m.Stdin = true
		session, r := x.start(m), new(result)
		x.feed(session, data)
		x.follow(session, r, nil)
		b.want("the hash", r.out.String(), fmt.Sprintf("%d %x", len(data), sha256.Sum256(data)))
	}},
	{"stdin-none", "A command without stdin finds it at its end.", func(b *bench) {
		b.want("the hash", b.box().user("hash"), fmt.Sprintf("0 %x", sha256.Sum256(nil)))
	}},
	{"terminal", "A command has a terminal of the size that was asked for, and hears when that changes.", func(b *bench) {
		x := b.box()
		m := as("user", "tty")
		m.Tty = &guestv1.WindowSize{Rows: 24, Cols: 81}
		session, r := x.background(m, "size 24x81\r\n")
		size := &guestv1.ResizeRequest{Session: session, Size: &guestv1.WindowSize{Rows: 50, Cols: 132}}
		if _, err := x.client().Resize(b.ctx, connect.NewRequest(size)); err != nil {
			b.Fatalf("resize: %v", err)
		}
		x.follow(session, r, nil)
		b.want("the output", r.out.String(), "size 24x81\r\nnow 50x132\r\n")
	}},
}

var agentClauses = []Clause{
	{"agent-restart", "Sessions outlive the agent: one that is killed is started again and nothing is lost.", func(b *bench) {
		x := b.box()
		session, r := x.background(as("user", "ticks", "40", "25"), "tick 3\n")
		b.want("the kill", x.do(as("root", "killagent")).out.String(), "killed 1")
		x.follow(session, r, nil)
		allTicks(b, r, 40)
	}},
	{"reconnect", "A guest whose connection is cut dials again, proves itself, and its sessions go on.", func(b *bench) {
		x := b.box()
		session, r := x.background(as("user", "ticks", "40", "25"), "tick 3\n")
		x.reconnect()
		x.reconnect()
		x.follow(session, r, nil)
		allTicks(b, r, 40)
	}},
	{"files-extra", "The agent dials connections of their own for transfers; a file comes back as it was sent.", func(b *bench) {
		x := b.box()
		data, err := b.h.Files.onHost("out", "5000000")
		if err != nil {
			b.Fatalf("%v", err)
		}
		c, closer, err := x.link.Extra(b.ctx)
		if err != nil {
			b.Fatalf("extra: %v", err)
		}
		defer closer.Close()
		w := c.Write(b.ctx)
		open := &guestv1.WriteRequest{Open: &guestv1.WriteOpen{Path: "/tmp/sent", Mode: 0o600, User: "user"}}
		for piece := range slices.Chunk(data, 200_000) {
			if err == nil {
				open.Data = piece
				err = w.Send(open)
				open = &guestv1.WriteRequest{}
			}
		}
		if resp, cerr := w.CloseAndReceive(); err != nil || cerr != nil || resp.Msg.GetWritten() != uint64(len(data)) {
			b.Fatalf("write: %v, %v, %v", resp, err, cerr)
		}
		back := b.read(x, "/tmp/sent")
		if !bytes.Equal(back, data) {
			b.Errorf("%d bytes came back of %d", len(back), len(data))
		}
		b.want("what a user reads", x.user("cat", "/tmp/sent")[:100], string(data[:100]))
	}},
	{"tunnel", "A tunnel carries bytes both ways to what listens inside, and its end.", tunnel},
}

func allTicks(b *bench, r *result, n int) {
	b.Helper()
	var want strings.Builder
	for i := range n {
		fmt.Fprintln(&want, "tick", i)
	}
	b.want("the output", r.out.String(), want.String())
	if r.exit.GetCode() != 0 {
		b.Errorf("it ended with %v", r.exit)
	}
}

func (b *bench) read(x *box, path string) []byte {
	b.Helper()
	c, closer, err := x.link.Extra(b.ctx)
	if err != nil {
		b.Fatalf("extra: %v", err)
	}
	defer closer.Close()
	s, err := c.Read(b.ctx, connect.NewRequest(&guestv1.ReadRequest{Path: path, Whole: true}))
	if err != nil {
		b.Fatalf("read: %v", err)
	}
	var all []byte
	for s.Receive() {
		all = append(all, s.Msg().GetData()...)
	}
	if err := s.Err(); err != nil {
		b.Fatalf("read: %v", err)
	}
	return all
}

func tunnel(b *bench) {
	x := b.box()
	x.background(as("user", "echo", "127.0.0.1:7000"), "ready")
	c, closer, err := x.link.Extra(b.ctx)
	if err != nil {
		b.Fatalf("extra: %v", err)
	}
	defer closer.Close()
	data, err := b.h.Files.onHost("out", "1000000")
	if err != nil {
		b.Fatalf("%v", err)
	}
	s := c.Tunnel(b.ctx)
	sent := make(chan error, 1)
	go func() {
		err := s.Send(&guestv1.TunnelRequest{Address: "127.0.0.1:7000"})
		for piece := range slices.Chunk(data, 50_000) {
			if err == nil {
				err = s.Send(&guestv1.TunnelRequest{Data: piece})
			}
		}
		if err == nil {
			err = s.Send(&guestv1.TunnelRequest{CloseWrite: true})
		}
		sent <- err
	}()
	var back []byte
	for len(back) < len(data) {
		m, err := s.Receive()
		if err != nil {
			b.Errorf("after %d bytes: %v", len(back), err)
			break
		}
		back = append(back, m.GetData()...)
	}
	if err := <-sent; err != nil {
		b.Errorf("send: %v", err)
	}
	if !bytes.Equal(back, data) {
		b.Errorf("%d bytes of %d came back", len(back), len(data))
	}
}
