package egress

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/sandbox"
)

// datagrams has a machine send some where nothing may go.
func (s *site) datagrams(id, network, to string, n int) {
	s.t.Helper()
	must(s.t, s.inside(id, func() error {
		c, err := net.Dial(network, to)
		if err != nil {
			return err
		}
		defer c.Close()
		for range n {
			if _, err := c.Write(make([]byte, 8)); err != nil {
				return err
			}
		}
		return nil
	}))
}

// packetsOf is what the audit has of a sandbox's dropped packets.
func packetsOf(t *testing.T, m *Manager, id string) (found []sandbox.EgressRecord, count uint64) {
	t.Helper()
	found, err := m.Audit().EgressRecords(background, sandbox.EgressAuditFilter{Sandbox: id, Kind: "packet", Limit: 1000})
	must(t, err)
	for _, r := range found {
		count += r.Count
	}
	return found, count
}

// A dropped packet is in the audit before anybody looks at a counter, with where
// it was to go, and once; and a flood is there whole.
func TestDroppedPackets(t *testing.T) {
	s := newSite(t)
	m, _, stop := s.manager()
	id, to := s.box(), "192.0.2.1:9"
	must(t, m.Set(background, s.reaches(id, 1)))
	must(t, m.Attach(background, id))
	one := func(m *Manager, after int64, network, to string, want sandbox.EgressRecord) (seq int64) {
		t.Helper()
		s.datagrams(id, network, to, 1)
		ctx, cancel := context.WithTimeout(background, countEvery/2)
		defer cancel()
		enough := errors.New("enough")
		err := m.Audit().FollowEgress(ctx, sandbox.EgressAuditFilter{Sandbox: id, Kind: "packet", After: after}, func(r sandbox.EgressRecord) error {
			if r.Reason != want.Reason {
				return nil
			}
			seq, want.Seq, want.At = r.Seq, r.Seq, r.At
			if diff := cmp.Diff(want, r, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
				t.Errorf("the audit has another record (+):\n%s", diff)
			}
			return enough
		})
		if !errors.Is(err, enough) {
			t.Fatalf("the audit says nothing: %v", err)
		}
		return seq
	}
	udp := sandbox.EgressRecord{
		Sandbox: id, Project: "prj_test", Profile: "world", Version: 1, Kind: "packet", Verdict: "denied", Reason: "packet:udp",
		Scheme: "udp", Dialled: netip.MustParseAddrPort(to), Sent: 36, Count: 1,
	}
	last := one(m, 0, "udp4", to, udp)
	for range 3 {
		m.countAll(background)
	}
	if found, n := packetsOf(t, m, id); len(found) != 1 || n != 1 {
		t.Errorf("the audit has %+v", found)
	}

	const flood = 300
	s.datagrams(id, "udp4", to, flood)
	icmp := udp // what comes after it all
	icmp.Reason, icmp.Scheme, icmp.Dialled, icmp.Sent = "packet:icmp", "icmp", netip.MustParseAddrPort("192.0.2.1:0"), 28
	last = one(m, last, "ip4:icmp", "192.0.2.1", icmp)
	for range 3 {
		m.countAll(background)
	}
	if found, n := packetsOf(t, m, id); n != 1+flood+1 || len(found) < 10 || len(found) > 100 {
		t.Errorf("the audit tells of %d packets in %d records", n, len(found))
	}

	// The next daemon's gateway, which it adopts, and another gateway.
	stop()
	m, _, _ = s.manager()
	must(t, m.Set(background, s.reaches(id, 1)))
	must(t, m.Attach(background, id))
	last = one(m, last, "ip4:icmp", "192.0.2.1", icmp)
	p := s.gateway(m)
	p.end()
	another(t, m, p)
	must(t, m.Attach(background, id))
	one(m, last, "ip4:icmp", "192.0.2.1", icmp)

	_, n := packetsOf(t, m, id)
	s.datagrams(id, "udp4", to, flood)
	must(t, m.Detach(background, id)) // looks once more
	_, before := packetsOf(t, m, id)
	if before < n+flood {
		t.Errorf("the audit tells of %d packets since then", before-n)
	}
	s.datagrams(id, "udp4", to, 1)
	m.countAll(background)
	if _, n := packetsOf(t, m, id); n != before {
		t.Errorf("the audit tells of %d packets of a sandbox that is detached", n-before)
	}
}

// A kernel that doesn't tell is asked once, and what it counts is there at once.
func TestDroppedPacketsWithoutALog(t *testing.T) {
	store, err := audit.Open(audit.Options{Dir: t.TempDir()})
	must(t, err)
	nets := &mute{}
	warned := &warnings{}
	m := &Manager{o: Options{Networks: nets, Log: warned.log()}, boxes: map[string]*box{}, now: time.Now, audit: store}
	defer m.Close()
	for _, id := range []string{"a", "b"} {
		b := &box{id: id, on: &gateway{}, counts: map[string]uint64{}}
		m.boxes[id] = b
		m.watch(background, b)
		m.watch(background, b)
	}
	if nets.asked != 1 || warned.n != 1 {
		t.Errorf("the kernel was asked %d times, of which %d warnings tell", nets.asked, warned.n)
	}
	m.countAll(background)
	m.countAll(background)
	for id := range m.boxes {
		if found, n := packetsOf(t, m, id); len(found) != 1 || n != 7 {
			t.Errorf("the audit has %+v", found)
		}
	}
}

// Whenever a packet is told of after it was counted, or before: all records
// together are the counter, and no look has more than the counter at that time.
func TestLeftOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := &box{unwatch: func() {}, single: map[string]uint64{}}
		var counted, recorded uint64
		look := func(grown uint64) {
			counted += grown
			recorded += b.leftOut("udp", grown)
			if recorded > counted {
				t.Fatalf("%d packets are recorded of %d", recorded, counted)
			}
		}
		tell := func(n uint64) {
			b.single["udp"] += n
			recorded += n
		}
		some := rapid.Uint64Range(0, 5)
		late := uint64(0)
		for range rapid.IntRange(1, 20).Draw(t, "looks") {
			tell(late) // of what the last look found
			early := some.Draw(t, "told, and then found")
			tell(early)
			late = some.Draw(t, "found, and then told")
			look(early + late + some.Draw(t, "found only"))
		}
		tell(late)
		b.unwatch = nil
		look(0)
		if recorded != counted {
			t.Errorf("%d packets are recorded of %d", recorded, counted)
		}
	})
}

// mute are networks of a kernel that counts only.
type mute struct {
	Networks
	asked int
}

func (n *mute) Counters(context.Context, string) (map[string]uint64, error) {
	return map[string]uint64{"udp": 7}, nil
}

func (n *mute) Drops(context.Context, string, func(sandbox.DroppedPacket)) (func(), error) {
	n.asked++
	return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_nflog", "not here")
}

// warnings counts them.
type warnings struct{ n int }

func (w *warnings) Write(p []byte) (int, error) { w.n++; return len(p), nil }

func (w *warnings) log() *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn}))
}
