package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/sandbox"
)

// drops reads the log of what is dropped.
func (w *wire) drops() <-chan sandbox.DroppedPacket {
	w.t.Helper()
	lines := make(chan sandbox.DroppedPacket, 1000)
	stop, err := w.m.Drops(context.Background(), w.id, func(d sandbox.DroppedPacket) { lines <- d })
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(stop)
	return lines
}

// told expects the log's next line to be of a frame that was dropped.
func told(t *testing.T, lines <-chan sandbox.DroppedPacket, reason string, f frame) {
	t.Helper()
	var d sandbox.DroppedPacket
	select {
	case d = <-lines:
	case <-time.After(patience):
		t.Fatal("the log has no line of it")
	}
	want := sandbox.DroppedPacket{Reason: reason, Protocol: d.Protocol, From: d.From, To: d.To, Length: d.Length}
	if f.raw == nil {
		from, to := f.sport, f.dport
		if !slices.Contains(ported, f.proto) || f.fragment&0x1fff != 0 {
			from, to = 0, 0
		}
		want = sandbox.DroppedPacket{
			Reason: reason, Protocol: protocols[f.proto], From: netip.AddrPortFrom(f.src, from), To: netip.AddrPortFrom(f.dst, to),
			Length: len(f.bytes()) - 14,
		}
	}
	if d != want {
		t.Errorf("the log has %+v, not %+v", d, want)
	}
}

// A flood of one kind is counted whole and logged in part, and hides no other.
func TestDropsAreBounded(t *testing.T) {
	w := newWire(t)
	lines, p, flood, before := w.drops(), w.packets(), honest(), w.counters()
	flood.dport = 443
	const sent = 1000
	begun := time.Now()
	for range sent {
		if err := p.send(flood.bytes()); err != nil {
			t.Fatal(err)
		}
	}
	w.grown(before, UDP, sent)
	most := logBurst + logRate*(2+int(time.Since(begun)/time.Second))
	ping := honest()
	ping.proto, ping.dst = syscall.IPPROTO_ICMP, netip.MustParseAddr("192.0.2.1")
	if err := p.send(ping.bytes()); err != nil {
		t.Fatal(err)
	}
	for n := 0; ; n++ {
		select {
		case d := <-lines:
			if d.Reason == UDP && n < most {
				continue
			}
			if d.Reason != ICMP || d.Protocol != "icmp" || d.To.Addr() != ping.dst || n < logBurst {
				t.Errorf("the line after %d lines of a flood is %+v", n, d)
			}
		case <-time.After(patience):
			t.Errorf("after %d lines of a flood the log has no more", n)
		}
		return
	}
}

// One reads at a time, the next one where the one before has stopped.
func TestDropsReaders(t *testing.T) {
	w := newWire(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	p, f := w.packets(), honest()
	f.dport = 443
	var e *sandbox.Error
	for range 3 {
		lines := make(chan sandbox.DroppedPacket, 10)
		stop, err := w.m.Drops(context.Background(), w.id, func(d sandbox.DroppedPacket) { lines <- d })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.m.Drops(context.Background(), w.id, nil); !errors.Is(err, syscall.EBUSY) && !errors.Is(err, syscall.EPERM) {
			t.Errorf("a second reader at once: %v", err)
		}
		if err := p.send(f.bytes()); err != nil {
			t.Fatal(err)
		}
		told(t, lines, UDP, f)
		stop()
		stop()
		if err := p.send(f.bytes()); err != nil {
			t.Fatal(err)
		}
		if len(lines) > 0 {
			t.Error("it tells of packets after its end")
		}
	}
	w.grown(map[string]uint64{}, UDP, 6)
	if _, err := w.m.Drops(context.Background(), sandbox.NewID(sandbox.KindSandbox), nil); !errors.As(err, &e) || e.Code != "no_network" {
		t.Errorf("of a sandbox without a network: %v", err)
	}
}

// A kernel that can't log counts nevertheless.
func TestNoLog(t *testing.T) {
	able := logging
	logging = func() error { return syscall.EOPNOTSUPP }
	defer func() { logging = able }()
	w := newWire(t)
	var e *sandbox.Error
	if _, err := w.m.Drops(context.Background(), w.id, nil); !errors.As(err, &e) || e.Class != sandbox.FailedPrecondition || e.Code != "no_nflog" {
		t.Errorf("Drops: %v", err)
	}
	p := w.packets()
	for _, tt := range hostile {
		f, before := honest(), w.counters()
		tt.edit(&f)
		if err := p.send(f.bytes()); err != nil {
			t.Fatal(err)
		}
		w.grown(before, tt.counter, 1)
	}
}

func TestDroppedPacket(t *testing.T) {
	ip := func(edit func(*frame)) []byte {
		f := honest()
		edit(&f)
		return f.bytes()[14:]
	}
	six := append([]byte{0x60, 0, 0, 0, 0, 8, syscall.IPPROTO_UDP, 64}, netip.MustParseAddr("2001:db8::1").AsSlice()...)
	six = append(append(six, netip.MustParseAddr("2001:db8::2").AsSlice()...), 0, 7, 0, 9, 0, 8, 0, 0)
	for _, tt := range []struct {
		name     string
		kind     uint16
		b        []byte
		protocol string
		from, to string
		length   int
	}{
		{"udp", syscall.ETH_P_IP, ip(func(*frame) {}), "udp", "169.254.77.2:40000", "198.51.100.7:53", 34},
		{"options", syscall.ETH_P_IP, ip(func(f *frame) { f.options = make([]byte, 40) }), "udp", "169.254.77.2:40000", "198.51.100.7:53", 74},
		{"cut in its options", syscall.ETH_P_IP, ip(func(f *frame) { f.options = make([]byte, 40) })[:30], "udp", "169.254.77.2:0", "198.51.100.7:0", 74},
		{"later fragment", syscall.ETH_P_IP, ip(func(f *frame) { f.fragment = 1 }), "udp", "169.254.77.2:0", "198.51.100.7:0", 34},
		{"unnamed", syscall.ETH_P_IP, ip(func(f *frame) { f.proto = 253 }), "ip-253", "169.254.77.2:0", "198.51.100.7:0", 24},
		{"no header", syscall.ETH_P_IP, []byte{0x44}, "malformed", "", "", 1},
		{"short header", syscall.ETH_P_IP, append([]byte{0x44}, make([]byte, 19)...), "malformed", "", "", 20},
		{"nothing", syscall.ETH_P_IPV6, nil, "malformed", "", "", 0},
		{"ipv6", syscall.ETH_P_IPV6, six, "udp", "[2001:db8::1]:7", "[2001:db8::2]:9", 48},
		{"arp", syscall.ETH_P_ARP, arp(1, machineAddr, gatewayAddr), "arp", "169.254.77.2:0", "169.254.77.1:0", 46},
		{"short arp", syscall.ETH_P_ARP, []byte{0, 1}, "arp", "", "", 2},
		{"mpls", 0x8847, make([]byte, 9), "ether-8847", "", "", 9},
	} {
		want := sandbox.DroppedPacket{Protocol: tt.protocol, Length: tt.length}
		if tt.from != "" {
			want.From, want.To = netip.MustParseAddrPort(tt.from), netip.MustParseAddrPort(tt.to)
		}
		if got := dropped(tt.kind, tt.b); got != want {
			t.Errorf("%s: %+v, not %+v", tt.name, got, want)
		}
	}
}

// FuzzDroppedPacket reads whatever a machine may send and a log may hold.
func FuzzDroppedPacket(f *testing.F) {
	for _, tt := range hostile {
		h := honest()
		tt.edit(&h)
		b := h.bytes()
		f.Add(binary.BigEndian.Uint16(b[12:]), b[14:], []byte{})
	}
	f.Fuzz(func(t *testing.T, kind uint16, packet, junk []byte) {
		packet = packet[:min(len(packet), snapLen)]
		d := dropped(kind, packet)
		if d.Protocol == "" || len(d.Protocol) > 16 || d.Length < len(packet) || d.Length > 40+1<<16 || d.To.Addr().Zone() != "" {
			t.Errorf("%+v", d)
		}
		attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
			{Type: attrHeader, Data: append(binary.BigEndian.AppendUint16(nil, kind), 0, 0)},
			{Type: attrPrefix, Data: []byte(UDP + "\x00")},
			{Type: attrPayload, Data: packet},
		})
		if err != nil {
			t.Fatal(err)
		}
		d.Reason = UDP
		line := netlink.Message{Header: netlink.Header{Type: msgPacket}, Data: append([]byte{0, 0, 0, 1}, attrs...)}
		if got, ok := decode(line); !ok || got != d {
			t.Errorf("%+v, not %+v", got, d)
		}
		line.Data = append(line.Data, junk...)
		decode(line)
		line.Data = junk
		decode(line)
	})
}
