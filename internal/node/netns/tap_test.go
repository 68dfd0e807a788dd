package netns

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"cloche.dev/cloche/internal/sandbox"
)

// vnetHeader is what comes before each frame of such a tap; all zero: nothing
// is left to the other side.
const vnetHeader = 10

// vmm is the descriptor that a VMM has of its tap.
type vmm struct{ *os.File }

func (v vmm) send(frame []byte) error {
	_, err := v.Write(append(make([]byte, vnetHeader), frame...))
	return err
}

// attach does what a VMM does with the name of a tap.
func attach(name string) (vmm, error) {
	fd, err := syscall.Open("/dev/net/tun", syscall.O_RDWR|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return vmm{}, err
	}
	var req struct {
		name  [16]byte
		flags uint16
		_     [22]byte
	}
	copy(req.name[:], name)
	req.flags = syscall.IFF_TAP | syscall.IFF_NO_PI | syscall.IFF_VNET_HDR
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), syscall.TUNSETIFF, uintptr(unsafe.Pointer(&req))); errno != 0 {
		_ = syscall.Close(fd)
		return vmm{}, errno
	}
	return vmm{os.NewFile(uintptr(fd), name)}, nil
}

// newTap is a pair whose machine is this test, at the tap's other end.
func newTap(t *testing.T) (*wire, vmm) {
	t.Helper()
	needRoot(t)
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skipf("SKIP: no taps here: %v", err)
	}
	ctx := context.Background()
	w := &wire{t: t, m: New(Options{Dir: filepath.Join(t.TempDir(), "netns")}), id: sandbox.NewID(sandbox.KindSandbox)}
	var err error
	if w.ns, err = w.m.Create(ctx, w.id); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.m.Delete(ctx, w.id); err != nil {
			t.Error(err)
		}
	})
	name, mac, err := w.m.Tap(ctx, w.id, os.Getuid())
	if err != nil {
		t.Fatal(err)
	}
	if mac != machineMAC.String() {
		t.Errorf("the machine shall have the address %s", mac)
	}
	var v vmm
	err = in(w.ns, func() (err error) {
		v, err = attach(name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { v.Close() })
	if err := w.m.MoveTap(ctx, w.id); err != nil {
		t.Fatal(err)
	}
	w.proxy, w.dns, w.udp = w.sockets()
	return w, v
}

// What holds at a veth holds at a tap that was moved under its VMM.
func TestTap(t *testing.T) {
	w, v := newTap(t)
	for _, tt := range hostile {
		t.Run(tt.name, func(t *testing.T) {
			w.t = t
			f, before := honest(), w.counters()
			tt.edit(&f)
			if err := v.send(f.bytes()); err != nil {
				t.Fatal(err)
			}
			w.grown(before, tt.counter, 1)
		})
	}
	w.t = t
	for _, what := range []string{"an acknowledgement of nothing", "SYN and FIN"} { // the only ones that are answered
		if reply := v.expect(t, syscall.IPPROTO_TCP); reply[33]&4 == 0 {
			t.Errorf("%s is answered with %x", what, reply)
		}
	}
	if err := v.send(honest().bytes()); err != nil {
		t.Fatal(err)
	}
	from := w.read("hostil")
	if _, err := w.udp.WriteToUDP([]byte("answer"), from); err != nil {
		t.Fatal(err)
	}
	answer := v.expect(t, syscall.IPPROTO_UDP)
	if !bytes.HasSuffix(answer, []byte("answer")) || !bytes.Equal(answer[12:16], honest().dst.AsSlice()) || binary.BigEndian.Uint16(answer[20:]) != 53 {
		t.Errorf("the answer is %x", answer)
	}

	syn := honest()
	syn.proto, syn.dport, syn.flags = syscall.IPPROTO_TCP, 443, 2
	if err := v.send(syn.bytes()); err != nil {
		t.Fatal(err)
	}
	reply := v.expect(t, syscall.IPPROTO_TCP)
	if reply[33] != 0x12 || !bytes.Equal(reply[12:16], syn.dst.AsSlice()) || binary.BigEndian.Uint16(reply[20:]) != 443 {
		t.Fatalf("no handshake: %x", reply)
	}
	ack := syn
	ack.flags, ack.seq, ack.ack = 0x10, 2, binary.BigEndian.Uint32(reply[24:])+1
	if err := v.send(ack.bytes()); err != nil {
		t.Fatal(err)
	}
	if s, was := accept(t, w.proxy); was != "198.51.100.7:443" || s.RemoteAddr().String() != "169.254.77.2:40000" {
		t.Errorf("a connection from %v to %s", s.RemoteAddr(), was)
	}
}

// expect reads the next IPv4 packet of a protocol that comes out of the tap,
// and sees that nothing else does that is not IPv4 to the machine.
func (v vmm) expect(t *testing.T, proto byte) []byte {
	t.Helper()
	if err := v.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4096)
	for {
		n, err := v.Read(b)
		if err != nil {
			t.Fatalf("nothing comes out of the tap: %v", err)
		}
		frame := b[vnetHeader:n]
		if !bytes.Equal(frame[:6], machineMAC) || !bytes.Equal(frame[6:12], gatewayMAC) || binary.BigEndian.Uint16(frame[12:]) != syscall.ETH_P_IP {
			t.Errorf("the gateway sends %x", frame)
			continue
		}
		if frame[14+9] == proto {
			return frame[14:]
		}
	}
}

// A tap can't be attached to from elsewhere, nor moved twice, and without a
// sandbox there is none.
func TestTapMisuse(t *testing.T) {
	w, _ := newTap(t)
	err := in(w.ns, func() error {
		v, err := attach("tap0") // makes another one
		if err == nil {
			defer v.Close()
			if err := v.send(honest().bytes()); err == nil {
				t.Error("a tap that is down takes packets")
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if err := w.m.MoveTap(context.Background(), w.id); err == nil {
		t.Error("a second tap was moved")
	}
	if _, _, err := w.m.Tap(context.Background(), sandbox.NewID(sandbox.KindSandbox), 1); err == nil {
		t.Error("a sandbox without namespaces has a tap")
	}
}
