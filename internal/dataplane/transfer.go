package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// uploadWait is how long a client may leave an upload waiting.
const uploadWait = 60 * time.Second

// ReadFile answers a file, or a range of it.
func (p *Plane) ReadFile(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.ReadFileParams) {
	info, err := p.regular(r.Context(), sandboxID, params.Path)
	if err != nil {
		rest.Fail(w, r, guestapi.FromRPC(err))
		return
	}
	from, length, partial, err := fileRange(r.Header.Get("Range"), info.Size)
	if err != nil {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", info.Size))
		rest.Fail(w, r, err)
		return
	}
	ctx, t, err := p.bulk(r.Context(), sandboxID)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	defer t.done()
	// Files that say they are empty may not be (those of /proc): read them to
	// their end, without a length.
	whole := info.Size == 0
	stream, err := t.client.Read(ctx, connect.NewRequest(&guestv1.ReadRequest{
		Path: params.Path, Offset: uint64(from), Length: uint64(length), Whole: whole,
	}))
	if err != nil {
		rest.Fail(w, r, guestapi.FromRPC(err))
		return
	}
	h, status := w.Header(), http.StatusOK
	h.Set("Accept-Ranges", "bytes")
	h.Set("Last-Modified", info.ModifiedAt.Format(http.TimeFormat))
	want := int64(-1)
	if !whole {
		want = length
		h.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	if partial {
		status = http.StatusPartialContent
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, from+length-1, info.Size))
	}
	t.send(w, r, stream, status, octets, want)
}

// regular makes sure that a path is a file that can be read.
func (p *Plane) regular(ctx context.Context, sandboxID, path string) (api.FileInfo, error) {
	if err := p.running(ctx, sandboxID); err != nil {
		return api.FileInfo{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	client, err := p.o.Guests.Client(ctx, sandboxID)
	if err != nil {
		return api.FileInfo{}, err
	}
	info, err := stat(ctx, client, path, true)
	switch {
	case err != nil:
		return api.FileInfo{}, err
	case info.Type == api.TypeDir:
		return api.FileInfo{}, sandbox.Errorf(sandbox.FailedPrecondition, "is_directory", "that path is a directory").
			WithHint("read it with GET …/files/archive or list it with GET …/files/list")
	case info.Type != api.TypeFile:
		return api.FileInfo{}, sandbox.Errorf(sandbox.FailedPrecondition, "not_a_file", "that path is not a regular file")
	}
	return info, nil
}

// fileRange reads a Range header of one range; what is not one is ignored.
func fileRange(header string, size int64) (from, length int64, partial bool, err error) {
	spec, ok := strings.CutPrefix(strings.ToLower(strings.TrimSpace(header)), "bytes=")
	first, last, dash := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok || !dash || strings.Contains(spec, ",") {
		return 0, size, false, nil
	}
	number := func(s string) (int64, bool) {
		n, err := strconv.ParseUint(s, 10, 63)
		return int64(n), err == nil && s[0] != '+'
	}
	outside := rest.WithStatus(http.StatusRequestedRangeNotSatisfiable,
		sandbox.Errorf(sandbox.Invalid, "range_not_satisfiable", "the file has %d bytes", size))
	if first == "" {
		n, ok := number(last)
		switch {
		case !ok:
			return 0, size, false, nil
		case n == 0 || size == 0:
			return 0, 0, false, outside
		}
		n = min(n, size)
		return size - n, n, true, nil
	}
	from, ok = number(first)
	end := int64(math.MaxInt64)
	if ok && last != "" {
		end, ok = number(last)
	}
	switch {
	case !ok || end < from:
		return 0, size, false, nil
	case from >= size:
		return 0, 0, false, outside
	}
	end = min(end, size-1)
	return from, end - from + 1, true, nil
}

// chunks is a stream of a guest's bytes.
type chunks interface {
	Receive() bool
	Msg() *guestv1.Chunk
	Err() error
}

// send answers what the guest streams: exactly want bytes, or (-1) all. The
// first chunk is awaited before the status, so that a refusal has its own.
func (t *transfer) send(w http.ResponseWriter, r *http.Request, stream chunks, status int, contentType string, want int64) {
	begun := false
	for left := want; ; {
		more := false
		t.watch(func() { more = stream.Receive() })
		var data []byte
		if more {
			data = stream.Msg().GetData()
		} else if err := stream.Err(); err != nil {
			rest.Fail(w, r, guestapi.FromRPC(err))
			return
		}
		if want >= 0 && int64(len(data)) > left || !more && left > 0 {
			rest.Fail(w, r, guestFault("a file of another length than it said"))
			return
		}
		if !begun {
			begun = true
			w.Header().Set("Content-Type", contentType)
			w.WriteHeader(status)
		}
		if !more {
			return
		}
		if want >= 0 {
			left -= int64(len(data))
		}
		if _, err := w.Write(data); err != nil {
			return
		}
	}
}

// ReadArchive answers a tree as a tar.
func (p *Plane) ReadArchive(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.ReadArchiveParams) {
	ctx, t, err := p.transfer(r.Context(), sandboxID, p.running)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	defer t.done()
	stream, err := t.client.TarOut(ctx, connect.NewRequest(&guestv1.TarOutRequest{Path: params.Path}))
	if err != nil {
		rest.Fail(w, r, guestapi.FromRPC(err))
		return
	}
	t.send(w, r, stream, http.StatusOK, "application/x-tar", -1)
}

// transfer is bulk for a sandbox that is made ready first.
func (p *Plane) transfer(ctx context.Context, sandboxID string, ready func(context.Context, string) error) (context.Context, *transfer, error) {
	if err := ready(ctx, sandboxID); err != nil {
		return nil, nil, err
	}
	return p.bulk(ctx, sandboxID)
}

// WriteFile writes a file from the body.
func (p *Plane) WriteFile(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.WriteFileParams) {
	ctx, t, err := p.transfer(r.Context(), sandboxID, p.awake)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	defer t.done()
	open := &guestv1.WriteOpen{Path: params.Path, Mode: fileMode(params.Mode, 0o644), User: params.User, Parents: params.Parents}
	if params.Offset != nil {
		open.AtOffset, open.Offset = true, uint64(*params.Offset)
	}
	stream := t.client.Write(ctx)
	sent, err := t.receive(w, r, func(first bool, data []byte) error {
		m := &guestv1.WriteRequest{Data: data}
		if first {
			m.Open = open
		}
		return stream.Send(m)
	})
	var written uint64
	err = finish(t, err, func() error {
		answer, err := stream.CloseAndReceive()
		if err == nil {
			written = answer.Msg.GetWritten()
		}
		return err
	})
	if err != nil {
		rest.Fail(w, r, guestapi.FromRPC(err))
		return
	}
	if written != uint64(sent) {
		rest.Fail(w, r, guestFault("it wrote another number of bytes than it got"))
		return
	}
	rest.JSON(w, r, http.StatusOK, api.FileWritten{Written: sent})
}

// WriteArchive unpacks the tar in the body.
func (p *Plane) WriteArchive(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.WriteArchiveParams) {
	ctx, t, err := p.transfer(r.Context(), sandboxID, p.awake)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	defer t.done()
	stream := t.client.TarIn(ctx)
	_, err = t.receive(w, r, func(first bool, data []byte) error {
		m := &guestv1.TarInRequest{Data: data}
		if first {
			m.Open = &guestv1.TarInOpen{Path: params.Path, User: params.User}
		}
		return stream.Send(m)
	})
	var entries uint64
	err = finish(t, err, func() error {
		answer, err := stream.CloseAndReceive()
		if err == nil {
			entries = answer.Msg.GetEntries()
		}
		return err
	})
	if err != nil {
		rest.Fail(w, r, guestapi.FromRPC(err))
		return
	}
	rest.JSON(w, r, http.StatusOK, api.ArchiveWritten{Entries: int64(min(entries, math.MaxInt64))})
}

// receive sends the body to the guest, piece by piece. The first piece is sent
// even when the body is empty, since it opens the file.
func (t *transfer) receive(w http.ResponseWriter, r *http.Request, send func(first bool, data []byte) error) (sent int64, err error) {
	body := rest.Upload(w, r, math.MaxInt64, uploadWait)
	buf := make([]byte, chunkSize)
	for first := true; ; first = false {
		n, err := io.ReadAtLeast(body, buf, len(buf))
		ended := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !ended {
			return sent, err
		}
		if n > 0 || first {
			var sendErr error
			t.watch(func() { sendErr = send(first, buf[:n]) })
			if sendErr != nil {
				return sent, sendErr
			}
			sent += int64(n)
		}
		if ended {
			return sent, nil
		}
	}
}

// finish ends an upload: a body that broke off is cancelled, so that the guest
// drops what it has; a guest that ended the stream (io.EOF) says why in its
// answer.
func finish(t *transfer, broke error, answer func() error) (err error) {
	if broke != nil && !errors.Is(broke, io.EOF) {
		t.cancel()
		return broke
	}
	t.watch(func() { err = answer() })
	if err == nil && broke != nil {
		return guestFault("it ended an upload early and took it for whole")
	}
	return err
}
