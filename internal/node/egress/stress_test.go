package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"cloche.dev/cloche/internal/egress/gatewayrpc"
	"cloche.dev/cloche/internal/sandbox"
)

// loopback are networks whose sockets are the host's own; some calls fail.
type loopback struct{ fail bool }

func (l *loopback) Sockets(context.Context, string) (proxy, dnsTCP, dnsUDP *os.File, err error) {
	if l.fail && rand.IntN(10) == 0 {
		return nil, nil, nil, errors.New("boom")
	}
	var files []*os.File
	for range 2 {
		l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			return nil, nil, nil, err
		}
		f, err := l.File()
		_ = l.Close()
		if err != nil {
			return nil, nil, nil, err
		}
		files = append(files, f)
	}
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, nil, nil, err
	}
	f, err := c.File()
	_ = c.Close()
	return files[0], files[1], f, err
}

func (l *loopback) Counters(context.Context, string) (map[string]uint64, error) {
	return map[string]uint64{"udp": rand.Uint64N(5)}, nil
}

// Whatever is done at once, and however often the gateway ends meanwhile: what
// it has in the end is what it is to have.
func TestEverythingAtOnce(t *testing.T) {
	dir, err := os.MkdirTemp("", "ceg")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	self, err := os.Executable()
	must(t, err)
	nets := &loopback{fail: true}
	m, err := New(Options{
		RunDir: filepath.Join(dir, "r"), StateDir: filepath.Join(dir, "s"), Program: []string{self, "egress-gateway"}, Networks: nets,
		Build: "1", Log: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	ctx, cancel := context.WithCancel(background)
	done := make(chan struct{})
	go func() { defer close(done); _ = m.Run(ctx) }()
	s := &site{t: t, dir: dir, spec: spec{RunDir: filepath.Join(dir, "r")}}
	t.Cleanup(func() {
		p := s.gateway(m)
		cancel()
		<-done
		p.end()
	})

	ids := make([]string, 12)
	wanted := make([]bool, len(ids))
	revisions := make([]int64, len(ids))
	var wg sync.WaitGroup
	for i := range ids {
		ids[i] = sandbox.NewID(sandbox.KindSandbox)
		wg.Go(func() {
			for range 25 {
				switch rand.IntN(6) {
				case 0:
					_ = m.Detach(background, ids[i])
					wanted[i] = false
				case 1:
					_ = m.Reset(background, ids[i])
				default:
					revisions[i]++
					a := none(ids[i])
					a.Revision = revisions[i]
					a.Project = fmt.Sprint("prj", i)
					_ = m.Set(background, *a)
					_ = m.Attach(background, ids[i])
					wanted[i] = true
				}
			}
		})
	}
	for range 3 {
		p := s.gatewayOf(m)
		p.end()
		another(t, m, p)
	}
	wg.Wait()
	nets.fail = false
	n := 0
	for i, id := range ids {
		if wanted[i] {
			n++
			must(t, m.Attach(background, id))
		} else {
			must(t, m.Detach(background, id))
		}
	}
	m.mu.Lock()
	g := m.current
	m.mu.Unlock()
	a, err := m.call(background, g, gatewayrpc.Request{Op: gatewayrpc.OpList})
	must(t, err)
	if len(a.Sandboxes) != n {
		t.Errorf("the gateway has %d sandboxes, not %d", len(a.Sandboxes), n)
	}
	for _, got := range a.Sandboxes {
		for i, id := range ids {
			if got.Sandbox == id && (!wanted[i] || got.Revision != revisions[i]) {
				t.Errorf("%s has revision %d, want %d (%v)", id, got.Revision, revisions[i], wanted[i])
			}
		}
	}
	for _, id := range ids {
		must(t, m.Detach(background, id))
		m.Forget(id)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.boxes) != 0 {
		t.Errorf("%d sandboxes are remembered", len(m.boxes))
	}
}

// gatewayOf waits for a gateway.
func (s *site) gatewayOf(m *Manager) process {
	another(s.t, m, process{})
	return s.gateway(m)
}
