package vmm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"unicode"

	"cloche.dev/cloche/internal/sandbox"
)

// Limits of what is read from a VMM for one request.
const (
	maxHeader  = 64 << 10
	maxBody    = 1 << 20
	maxMessage = 1 << 10 // of a Fault
)

// ErrGone is in the chain of an error that tells that no VMM is at the socket,
// or that it went away before it had answered: it may or may not have done what
// it was asked to.
var ErrGone = errors.New("the VMM is gone")

// NotThere tells of an error that no VMM listens at the socket, yet or any more: it
// was asked nothing. It implies ErrGone.
func NotThere(err error) bool {
	var gone *goneError
	return errors.As(err, &gone) && (errors.Is(gone.cause, syscall.ENOENT) || errors.Is(gone.cause, syscall.ECONNREFUSED))
}

// call makes one request. A nil answer wants a 204, any other a 200 with JSON
// for it. A context that has ended wins over every other error.
func (c *Client) call(ctx context.Context, method, path string, body, answer any) error {
	request := method + " " + path
	status, data, err := c.exchange(ctx, method, path, body)
	if err != nil {
		return c.explain(ctx, request, err)
	}
	switch {
	case status >= 400:
		return sandbox.Errorf(sandbox.Internal, "vmm_fault", "the VMM refused %s: %w", request, &Fault{status, reason(data)})
	case answer == nil && status == http.StatusNoContent:
		return nil
	case answer != nil && status == http.StatusOK:
		if err := json.Unmarshal(data, answer); err != nil {
			return strange(request, errors.New(clean(err.Error())))
		}
		return nil
	}
	return strange(request, fmt.Errorf("status %d", status))
}

// exchange sends one request on a connection of its own and reads the answer,
// which is bounded. The connection is closed even though a VMM would keep it:
// it has ten at most, and a kept one tells nothing of the VMM's life.
func (c *Client) exchange(ctx context.Context, method, path string, body any) (status int, data []byte, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.life, cancel)()
	if err := ctx.Err(); err != nil {
		return 0, nil, err
	}
	req, err := newRequest(ctx, method, path, body)
	if err != nil {
		return 0, nil, err
	}
	conn, err := dial(ctx, c.socket)
	if err != nil {
		return 0, nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()

	// A VMM that answers and goes may do so before it has read everything:
	// what it said matters more than that it could not be written to.
	written := req.Write(conn)
	status, data, err = readAnswer(conn, req)
	if err != nil && written != nil {
		return 0, nil, written
	}
	return status, data, err
}

// newRequest makes a request as Firecracker's own small HTTP server likes it:
// a body always has a length.
func newRequest(ctx context.Context, method, path string, body any) (*http.Request, error) {
	var content io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		content = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://localhost"+path, content)
	if err != nil {
		return nil, err
	}
	req.Header.Set("User-Agent", "") // none
	req.Header.Set("Accept", "application/json")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return req, nil
}

var errTooLong = errors.New("it is too long")

// readAnswer reads one answer to req within the limits.
func readAnswer(conn io.Reader, req *http.Request) (status int, data []byte, err error) {
	limit := &io.LimitedReader{R: conn, N: maxHeader}
	resp, err := http.ReadResponse(bufio.NewReader(limit), req)
	if err != nil {
		if limit.N == 0 {
			err = errTooLong
		}
		return 0, nil, err
	}
	defer resp.Body.Close()
	if resp.ContentLength > maxBody {
		return 0, nil, errTooLong
	}
	// Twice, for what a chunked body has beside its content.
	limit.N = 2 * maxBody
	data, err = io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if len(data) > maxBody || limit.N == 0 {
		return 0, nil, errTooLong
	}
	return resp.StatusCode, data, err
}

// oPath is O_PATH, which package syscall has no name for; it is the same on
// every processor that Firecracker runs on.
const oPath = 0x200000

var errNotSocket = errors.New("it is not a socket")

// dial connects to the socket that has this path. The VMM can write in the
// folder of its socket, so the last element may have become a symbolic link to
// a socket that is somebody else's: what lies there is opened without following
// it, looked at, and then connected to by its descriptor, which also makes the
// path's length no matter.
func dial(ctx context.Context, socket string) (net.Conn, error) {
	fd, err := syscall.Open(socket, oPath|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", socket, err)
	}
	defer func() { _ = syscall.Close(fd) }()
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("stat %s: %w", socket, err)
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFSOCK {
		return nil, fmt.Errorf("%s: %w", socket, errNotSocket)
	}
	var d net.Dialer
	return d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d", fd))
}

// goneErrors are how a process that isn't there, or is just going, looks
// through its socket.
var goneErrors = []error{
	io.EOF, io.ErrUnexpectedEOF, syscall.ENOENT, syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE,
}

// explain makes an error of exchange one that tells what to think of the VMM.
func (c *Client) explain(ctx context.Context, request string, err error) error {
	ended := ctx.Err()
	if ended == nil && (errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)) {
		// The only deadline there is is the context's, which the dialer keeps by a
		// timer and a look at the clock of its own: it may be first.
		ended = context.DeadlineExceeded
	}
	if ended != nil {
		return fmt.Errorf("%s: the VMM has not answered: %w", request, ended)
	}
	if c.life.Err() != nil {
		return fmt.Errorf("%s: the client is closed: %w", request, net.ErrClosed)
	}
	for _, gone := range goneErrors {
		if errors.Is(err, gone) {
			return sandbox.Errorf(sandbox.Unavailable, "vmm_gone", "%w", &goneError{request: request, cause: err})
		}
	}
	if errors.Is(err, syscall.EAGAIN) {
		return sandbox.Errorf(sandbox.Unavailable, "vmm_busy", "%s: the VMM takes no more connections: %w", request, err)
	}
	if errors.Is(err, errNotSocket) {
		return sandbox.Errorf(sandbox.Internal, "vmm_socket", "%s: the VMM's socket can't be used: %w", request, err)
	}
	return strange(request, errors.New(clean(err.Error())))
}

// goneError is ErrGone with how it showed.
type goneError struct {
	request string
	cause   error
}

func (e *goneError) Error() string {
	return fmt.Sprintf("%s: %v (%s)", e.request, ErrGone, clean(e.cause.Error()))
}

func (e *goneError) Unwrap() []error { return []error{ErrGone, e.cause} }

// reason takes a VMM's words out of the body of a refusal: fault_message of its
// API, or error of its HTTP server; "" where there is neither.
func reason(body []byte) string {
	var b struct {
		Fault string `json:"fault_message"`
		Error string `json:"error"`
	}
	if err := json.Unmarshal(body, &b); err != nil {
		return ""
	}
	if b.Fault == "" {
		return clean(b.Error)
	}
	return clean(b.Fault)
}

// clean makes one line of printable text, at most maxMessage bytes, out of
// anything.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s[:min(len(s), maxMessage)], "?"))
}
