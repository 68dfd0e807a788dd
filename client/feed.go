package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"cloche.dev/cloche/api"
)

// maxEventLine bounds one line of a feed.
const maxEventLine = 4 << 20

// feed is a stream of server-sent events that do not end, which is connected
// again where it breaks. Who embeds it knows where to go on.
type feed struct {
	c    *Client
	path string
	out  outage

	body   io.ReadCloser
	lines  *bufio.Scanner
	cancel context.CancelFunc
}

func newFeed(c *Client, path string, interrupted func(error), resumed func()) feed {
	return feed{c: c, path: path, out: outage{window: c.reconnect, interrupted: interrupted, resumed: resumed}}
}

// Close drops the connection.
func (f *feed) Close() {
	if f.body != nil {
		f.cancel()
		_ = f.body.Close()
		f.body = nil
	}
}

// next hands events to take until it says that one is its caller's. begin
// says, at each connection, where it shall begin.
func (f *feed) next(ctx context.Context, begin func(context.Context) (url.Values, error), take func(kind string, data []byte) (bool, error)) error {
	for {
		err := f.read(ctx, begin, take)
		if err == nil {
			return nil
		}
		f.Close()
		if err := f.out.wait(ctx, err); err != nil {
			return err
		}
	}
}

func (f *feed) read(ctx context.Context, begin func(context.Context) (url.Values, error), take func(kind string, data []byte) (bool, error)) error {
	if f.body == nil {
		q, err := begin(ctx)
		if err == nil {
			err = f.connect(ctx, q)
		}
		if err != nil {
			return err
		}
	}
	for {
		kind, data, err := f.block(ctx)
		if err != nil {
			return err
		}
		if kind == "error" {
			var body api.ErrorBody
			if err := json.Unmarshal(data, &body); err != nil {
				return badEvent(err)
			}
			return FromBody(&body)
		}
		if kind != "retry" {
			f.out.over()
		}
		if told, err := take(kind, data); err != nil || told {
			return err
		}
	}
}

func (f *feed) connect(ctx context.Context, q url.Values) error {
	whole, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	resp, err := f.c.sendOnce(whole, call{ //nolint:bodyclose // Close closes it
		method: http.MethodGet, path: f.path, query: q, header: accept("text/event-stream"),
	})
	if err != nil {
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	f.body, f.cancel, f.lines = resp.Body, cancel, bufio.NewScanner(resp.Body)
	f.lines.Buffer(make([]byte, 0, 64<<10), maxEventLine)
	return nil
}

// block reads one event of the feed; a comment has no kind. It is bounded by
// ctx and by silence.
func (f *feed) block(ctx context.Context) (kind string, data []byte, err error) {
	stop := context.AfterFunc(ctx, f.cancel)
	defer stop()
	watch := time.AfterFunc(silence, f.cancel)
	defer watch.Stop()
	for f.lines.Scan() {
		line := f.lines.Bytes()
		if len(line) == 0 {
			return kind, data, nil
		}
		field, value, _ := bytes.Cut(line, []byte(": "))
		switch string(field) {
		case "event":
			kind = string(value)
		case "retry":
			kind = "retry" // the head of the stream, which proves no health
		case "data":
			data = append(data, value...)
		}
	}
	err = f.lines.Err()
	switch {
	case ctx.Err() != nil:
		return "", nil, context.Cause(ctx)
	case errors.Is(err, bufio.ErrTooLong):
		return "", nil, badEvent(err)
	}
	return "", nil, &Error{Class: api.ClassUnavailable, Code: CodeUnreachable, Message: "the stream was cut", Retryable: true, cause: err}
}

func badEvent(err error) error {
	return &Error{
		Class: api.ClassInternal, Code: CodeBadAnswer, cause: err, Message: fmt.Sprintf("the stream of events can't be understood: %v", err),
		Hint: "check the URL, and any proxy between",
	}
}
