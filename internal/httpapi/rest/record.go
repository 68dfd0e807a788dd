package rest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// writeTimeout is how long a peer may leave one write waiting.
const writeTimeout = 60 * time.Second

type recordKey struct{}

// record is what the router knows of one request, and its ResponseWriter.
type record struct {
	http.ResponseWriter
	id       string
	start    time.Time
	op       *operation
	pattern  string
	actor    string
	status   int
	bytes    int64
	hijacked bool
	err      error // what was answered, or cut the answer off
	gone     error // the peer went away
}

// recordOf returns r's record. A request that came by no router has an empty
// one, so that handlers can be tried alone.
func recordOf(r *http.Request) *record {
	if rec, ok := r.Context().Value(recordKey{}).(*record); ok {
		return rec
	}
	return &record{}
}

// RequestID returns the id under which the log has r.
func RequestID(ctx context.Context) string {
	if rec, ok := ctx.Value(recordKey{}).(*record); ok {
		return rec.id
	}
	return ""
}

func (rec *record) began() bool { return rec.status != 0 || rec.hijacked }

// WriteHeader notes the status.
func (rec *record) WriteHeader(status int) {
	if rec.status == 0 && status >= 200 {
		rec.status = status
	}
	rec.deadline()
	rec.ResponseWriter.WriteHeader(status)
}

// Write bounds how long the peer may leave it waiting.
func (rec *record) Write(b []byte) (int, error) {
	if rec.status == 0 {
		rec.status = http.StatusOK
	}
	rec.deadline()
	n, err := rec.ResponseWriter.Write(b)
	rec.bytes += int64(n)
	if err != nil {
		rec.gone = err
	}
	return n, err
}

// FlushError sends what is buffered.
func (rec *record) FlushError() error {
	rec.deadline()
	err := http.NewResponseController(rec.ResponseWriter).Flush()
	if err != nil {
		rec.gone = err
	}
	return err
}

// Hijack hands the connection over, without deadlines.
func (rec *record) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(rec.ResponseWriter).Hijack()
	if err == nil {
		rec.hijacked = true
		err = conn.SetDeadline(time.Time{})
	}
	return conn, rw, err
}

// Unwrap is for http.ResponseController.
func (rec *record) Unwrap() http.ResponseWriter { return rec.ResponseWriter }

func (rec *record) deadline() {
	_ = http.NewResponseController(rec.ResponseWriter).SetWriteDeadline(time.Now().Add(writeTimeout))
}

// access logs one finished request: no token, no query, no body.
func (rt *Router) access(rec *record, r *http.Request) {
	status := rec.status
	if rec.hijacked {
		status = http.StatusSwitchingProtocols
	}
	level := slog.LevelInfo
	attrs := []slog.Attr{
		slog.String("request", rec.id), slog.String("method", clip(r.Method, 20)), slog.String("path", clip(r.URL.Path, 200)),
		slog.Int("status", status), slog.Int64("bytes", rec.bytes), slog.Duration("took", time.Since(rec.start).Round(time.Microsecond)),
		slog.String("peer", r.RemoteAddr),
	}
	if rec.actor != "" {
		attrs = append(attrs, slog.String("key", rec.actor))
	}
	if e := sandbox.AsError(rec.err); e != nil {
		attrs = append(attrs, slog.String("class", string(e.Class)), slog.String("code", e.Code))
		if e.Class == sandbox.Internal {
			level = slog.LevelError
			attrs = append(attrs, slog.String("error", e.Error()))
		}
	}
	if rec.gone != nil {
		attrs = append(attrs, slog.Bool("peer_gone", true))
	}
	if rec.op != nil && rec.op.id == "getHealth" && status == http.StatusOK {
		level = slog.LevelDebug
	}
	rt.log.LogAttrs(context.WithoutCancel(r.Context()), level, "request", attrs...)
	if rt.observe != nil {
		rt.observe(status, time.Since(rec.start), sandbox.AsError(rec.err))
	}
}

// Upload reads r's body: at most limit bytes (more is 413), and with at most
// wait between two pieces. When it has ended no read deadline is left, so that
// the connection's other duties go on.
func Upload(w http.ResponseWriter, r *http.Request, limit int64, wait time.Duration) io.Reader {
	u := &upload{
		body: http.MaxBytesReader(w, r.Body, limit), rc: http.NewResponseController(w), wait: wait, limit: limit,
	}
	if r.ContentLength > limit {
		u.err = TooLarge(limit) // before anything is done with the rest
	}
	return u
}

type upload struct {
	body  io.Reader
	rc    *http.ResponseController
	wait  time.Duration
	limit int64
	err   error
}

func (u *upload) Read(p []byte) (int, error) {
	if u.err != nil {
		return 0, u.err
	}
	_ = u.rc.SetReadDeadline(time.Now().Add(u.wait))
	n, err := u.body.Read(p)
	if err == nil {
		return n, nil
	}
	_ = u.rc.SetReadDeadline(time.Time{})
	var large *http.MaxBytesError
	switch {
	case errors.Is(err, io.EOF):
	case errors.As(err, &large):
		err = TooLarge(u.limit)
	default:
		err = sandbox.Errorf(sandbox.Invalid, "body_cut", "the body ended too early: %w", err)
	}
	u.err = err
	return n, err
}
