package gatewayrpc

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Client asks a gateway over one connection. Its methods may be called at once;
// they take turns. After an error of the connection it is of no more use.
type Client struct {
	conn *Conn
	turn chan struct{}
	once sync.Once
	done chan struct{} // closed when the connection is
}

// Absent tells whether an error of Dial means that nobody listens there.
func Absent(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}

// Dial connects with the gateway whose socket lies at path.
func Dial(ctx context.Context, path string) (*Client, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return &Client{conn: NewConn(c.(*net.UnixConn)), turn: make(chan struct{}, 1), done: make(chan struct{})}, nil
}

// Close ends the connection and whoever waits on it.
func (c *Client) Close() {
	c.once.Do(func() {
		close(c.done)
		_ = c.conn.Close()
	})
}

// Done is closed when the connection is of no more use.
func (c *Client) Done() <-chan struct{} { return c.done }

// Call asks and waits for the answer. An error of class Unavailable, code
// egress_gateway_gone, is the connection's; another one is the gateway's
// answer, or ctx's where nothing was asked yet. A ctx that ends after that ends
// the connection, because the answer would be taken for the next question's.
func (c *Client) Call(ctx context.Context, r Request, files ...*os.File) (Answer, error) {
	select {
	case c.turn <- struct{}{}:
	case <-c.done:
		return Answer{}, gone(net.ErrClosed)
	case <-ctx.Done():
		return Answer{}, ctx.Err()
	}
	defer func() { <-c.turn }()
	if ctx.Err() != nil {
		return Answer{}, ctx.Err()
	}
	stop := context.AfterFunc(ctx, func() { _ = c.conn.Raw().SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var a Answer
	err := c.conn.Send(r, MaxRequest, files...)
	var refused *sandbox.Error
	if errors.As(err, &refused) { // nothing was sent
		return Answer{}, err
	}
	if err == nil {
		err = c.conn.Receive(&a, MaxAnswer)
	}
	if err != nil || !stop() {
		c.Close()
		if err == nil {
			err = ctx.Err()
		}
		return Answer{}, gone(err)
	}
	if a.Error != nil {
		return a, a.Error
	}
	return a, nil
}

// GoneCode is the code of an error of the connection.
const GoneCode = "egress_gateway_gone"

func gone(why error) error {
	return sandbox.Errorf(sandbox.Unavailable, GoneCode, "the egress gateway does not answer: %w", why)
}

// Gone tells whether err is of a connection that has ended.
func Gone(err error) bool {
	var e *sandbox.Error
	return errors.As(err, &e) && e.Code == GoneCode
}
