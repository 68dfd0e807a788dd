package kernel

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// arReader reads the members of an ar archive as a stream: the container of a
// .deb (deb(5); the format is that of ar(5), without its long names).
type arReader struct {
	r    *bufio.Reader
	left int64 // of the current member
	odd  bool  // it is followed by a byte of padding
}

var errNoAr = errors.New("this is no ar archive")

func newArReader(r io.Reader) (*arReader, error) {
	a := &arReader{r: bufio.NewReaderSize(r, 64<<10)}
	var magic [8]byte
	if _, err := io.ReadFull(a.r, magic[:]); err != nil || string(magic[:]) != "!<arch>\n" {
		return nil, errNoAr
	}
	return a, nil
}

// Next goes to the next member; io.EOF after the last.
func (a *arReader) Next() (name string, size int64, err error) {
	skip := a.left
	if a.odd {
		skip++
	}
	if n, err := io.CopyN(io.Discard, a.r, skip); err != nil && n < a.left {
		return "", 0, io.ErrUnexpectedEOF // the last padding may be missing
	}
	a.left, a.odd = 0, false
	var h [60]byte
	switch _, err := io.ReadFull(a.r, h[:]); {
	case errors.Is(err, io.EOF):
		return "", 0, io.EOF
	case err != nil:
		return "", 0, fmt.Errorf("a member's header: %w", err)
	case string(h[58:]) != "`\n":
		return "", 0, errNoAr
	}
	size, err = strconv.ParseInt(strings.TrimRight(string(h[48:58]), " "), 10, 64)
	if err != nil || size < 0 {
		return "", 0, errNoAr
	}
	a.left, a.odd = size, size%2 == 1
	return strings.TrimSuffix(strings.TrimRight(string(h[:16]), " "), "/"), size, nil
}

// Read reads from the current member.
func (a *arReader) Read(p []byte) (int, error) {
	if a.left == 0 {
		return 0, io.EOF
	}
	n, err := a.r.Read(p[:min(int64(len(p)), a.left)])
	a.left -= int64(n)
	if errors.Is(err, io.EOF) && a.left > 0 {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}
