package gvisor

import (
	"context"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// TestExcess has a user take more than there is, in every way that an honest
// program might, and sees that only the user's own processes suffer.
func TestExcess(t *testing.T) {
	f := newFixture(t)
	for _, c := range []struct {
		name string
		args []string
		want func(result) bool
	}{
		{"anonymous memory", []string{"anon", "2000"}, func(r result) bool { return r.Code == -9 }},
		{"dev shm", []string{"fill", "/dev/shm/x", "2000"}, func(r result) bool { return strings.Contains(r.Out, "no space") }},
		{"tmp", []string{"fill", "/tmp/x", "2000"}, func(r result) bool { return strings.Contains(r.Out, "no space") }},
		{"forks", []string{"fork"}, func(r result) bool { return r.Code == 0 && strings.Contains(r.Out, "refused after") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec := f.spec(192)
			spec.Resources.DiskMiB = 512
			m := f.create(spec)
			defer f.discard(m.ID())
			l := f.link(m)
			next := f.create(f.spec(128))
			defer f.discard(next.ID())
			neighbour := f.link(next)
			for range 2 {
				started := time.Now()
				r, err := l.try(1000, c.args...)
				if err != nil {
					t.Fatalf("the machine is gone: %v, %+v", err, m.End())
				}
				if !c.want(r) {
					t.Errorf("%v = %+v", c.args, r)
				}
				st, err := m.Stats(context.Background())
				if err != nil {
					t.Fatal(err)
				}
				kills, err := f.d.group(m.ID()).OOMKills()
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("%v in %v: code %d, %q; then %d MiB, %d tasks, %d MiB of disk, %d kills", c.args, time.Since(started).Round(time.Millisecond),
					r.Code, strings.TrimSpace(r.Out), st.MemoryBytes>>20, st.Processes, st.DiskBytes>>20, kills)
			}
			if r := l.run(1000, "cat", "/etc/mark"); r.Out != "from the image" {
				t.Errorf("afterwards: %+v", r)
			}
			if r := neighbour.run(1000, "cat", "/etc/mark"); r.Out != "from the image" {
				t.Errorf("the neighbour: %+v", r)
			}
			select {
			case <-m.Exited():
				t.Errorf("it ended: %+v", m.End())
			default:
			}
		})
	}
}

// TestMemfd: memory in a file without a name belongs to the sentry and has no
// bound of its own, so this may end the machine; the host's limit holds, the
// reason is told, and nobody else notices.
func TestMemfd(t *testing.T) {
	f := newFixture(t)
	m, next := f.create(f.spec(192)), f.create(f.spec(128))
	l, neighbour := f.link(m), f.link(next)
	r, err := l.try(1000, "memfd", "2000")
	if err == nil {
		t.Logf("it survived: %+v", r)
	} else {
		<-m.Exited()
		if m.End().Reason != sandbox.EndOOM {
			t.Errorf("End() = %+v", m.End())
		}
	}
	if r := neighbour.run(1000, "cat", "/etc/mark"); r.Out != "from the image" {
		t.Errorf("the neighbour: %+v", r)
	}
}
