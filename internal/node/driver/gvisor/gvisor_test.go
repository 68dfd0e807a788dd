package gvisor

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

func TestLife(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(256)
	started := time.Now()
	m := f.create(spec)
	l := f.link(m)
	t.Logf("create to connected: %v", time.Since(started))
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"cat", "/etc/mark"}, "from the image"},
		{[]string{"hostname"}, "box\n"},
		{[]string{"interfaces"}, "lo up|loopback|running\neth0 up|running\n"},
		{[]string{"statfs", "/dev/shm"}, "134217728\n"},
		{[]string{"statfs", "/run"}, "33554432\n"},
		{[]string{"statfs", "/tmp"}, "67108864\n"},
		{[]string{"stat", "/tmp"}, "dtrwxrwxrwx\n"},
		{[]string{"stat", "/.cloche/host/agent.sock"}, "Srw-------\n"},
	} {
		if r := l.run(0, c.args...); r.Out != c.want || r.Code != 0 {
			t.Errorf("%v = %+v, want %q", c.args, r, c.want)
		}
	}
	if r := l.run(0, "cat", "/proc/meminfo"); !strings.Contains(r.Out, "MemTotal:         262144 kB") {
		t.Errorf("meminfo: %s", r.Out)
	}
	if r := l.run(0, "env"); !strings.Contains(r.Out, "GREETING=hello") {
		t.Errorf("env: %s", r.Out)
	}
	if r := l.run(1000, "write", "/.cloche/host/x", "y"); r.Code == 0 {
		t.Error("the user could write to the socket's directory")
	}
	if r := l.run(0, "write", "/.cloche/guest", "y"); r.Code == 0 {
		t.Error("root could overwrite the guest binary")
	}
	st, err := m.Stats(context.Background())
	if err != nil || st.MemoryBytes <= 0 || st.CPU <= 0 || st.Processes < 3 || st.DiskBytes < 0 {
		t.Errorf("Stats() = %+v, %v", st, err)
	}
	t.Logf("idle: %+v", st)
	ids, err := f.d.List(context.Background())
	if err != nil || len(ids) != 1 || ids[0] != spec.ID {
		t.Errorf("List() = %v, %v", ids, err)
	}
	if _, err := f.d.Create(f.ctx(time.Minute), spec); !sandbox.IsClass(err, sandbox.Conflict) {
		t.Errorf("a second create = %v", err)
	}
	started = time.Now()
	if err := m.Kill(f.ctx(time.Minute)); err != nil {
		t.Fatal(err)
	}
	t.Logf("kill: %v", time.Since(started))
	select {
	case <-m.Exited():
	default:
		t.Error("Kill returned before Exited")
	}
	if m.End().Reason != sandbox.EndKilled {
		t.Errorf("End() = %+v", m.End())
	}
	if err := m.Kill(f.ctx(time.Minute)); err != nil {
		t.Errorf("a second Kill: %v", err)
	}
	started = time.Now()
	f.discard(spec.ID)
	t.Logf("discard: %v", time.Since(started))
	f.discard(spec.ID)
	if ids, err := f.d.List(context.Background()); err != nil || len(ids) != 0 {
		t.Errorf("List() = %v, %v", ids, err)
	}
	if _, err := f.d.Adopt(f.ctx(time.Minute), spec.ID); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("Adopt = %v", err)
	}
}

func TestEnds(t *testing.T) {
	f := newFixture(t)
	for _, c := range []struct {
		name   string
		end    func(m driver.Machine, l *link)
		reason sandbox.EndReason
		detail string
	}{
		{"exit", func(_ driver.Machine, l *link) { _, _ = l.try(0, "exit", "7") }, sandbox.EndExited, "code 7"},
		{"panic", func(_ driver.Machine, l *link) { _, _ = l.try(0, "panic", "oh dear") }, sandbox.EndExited, "code 2"},
		{"kill -9 1", func(_ driver.Machine, l *link) { _, _ = l.try(0, "kill1") }, sandbox.EndExited, "signal 9"},
		{"host", func(m driver.Machine, _ *link) { _ = m.(*machine).rec.Sentry.Kill() }, sandbox.EndKilled, "signal 9"},
		{"request", func(m driver.Machine, _ *link) { _ = m.Kill(context.Background()) }, sandbox.EndKilled, "request"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := f.create(f.spec(128))
			c.end(m, f.link(m))
			select {
			case <-m.Exited():
			case <-time.After(20 * time.Second):
				t.Fatal("it did not end")
			}
			if e := m.End(); e.Reason != c.reason || !strings.Contains(e.Detail, c.detail) {
				t.Errorf("End() = %+v", e)
			}
			// Another daemon is told the same.
			other := f.open()
			var ended *driver.Ended
			if _, err := other.Adopt(f.ctx(time.Minute), m.ID()); !errors.As(err, &ended) || ended.End.Reason != c.reason {
				t.Errorf("Adopt = %v", err)
			}
			other.stop()
			f.discard(m.ID())
		})
	}
}
