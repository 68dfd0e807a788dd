package client

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

// The frames come from a daemon that passes on what a sandbox printed: no
// stream may make the reader panic, grow without bound or go on for ever.
func FuzzFrame(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03abc\x07\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00"))
	f.Add([]byte("\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x1b{\"exit\":{\"code\":7},\"to\":-1}"))
	f.Add([]byte("\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		var buf []byte
		for n := 0; ; n++ {
			e, next, err := readFrame(r, buf)
			buf = next
			if cap(buf) > maxFramePayload+frameHead {
				t.Fatalf("the buffer grew to %d", cap(buf))
			}
			if err != nil {
				if !errors.Is(err, errFrame) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Fatalf("an error of another kind: %v", err)
				}
				return
			}
			if n > len(b) || e.Offset < 0 || e.Type == "" {
				t.Fatalf("frame %d of %d bytes: %+v", n, len(b), e)
			}
		}
	})
}
