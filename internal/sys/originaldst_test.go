package sys

import (
	"net"
	"testing"
)

// TestOriginalDst: where nothing redirects there is no answer, or the address
// that was dialled. What a redirected connection tells is tested with netns.
func TestOriginalDst(t *testing.T) {
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if dst, err := OriginalDst(s); err == nil && dst.String() != l.Addr().String() {
		t.Errorf("it was dialled as %s, not %s", dst, l.Addr())
	}
	_ = s.Close()
	if _, err := OriginalDst(s); err == nil {
		t.Error("a closed connection has an answer")
	}
}
