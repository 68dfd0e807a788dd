package client

import (
	"context"
	"net/http"
	"net/url"

	"cloche.dev/cloche/api"
)

// Session is a handle on one command in a sandbox. It remembers no state of
// the command: any number of handles, in any number of processes, may follow
// the same session.
type Session struct {
	Sandbox string
	ID      string
	Token   string // good for this session alone; "" uses the client's key
	c       *Client
}

// CreateSession makes a session. Its command starts when it is attached.
func (c *Client) CreateSession(ctx context.Context, sandbox string, p api.ProcessSpec) (*Session, error) {
	var made api.CreatedSession
	err := c.do(ctx, call{method: http.MethodPost, path: sandboxPath(sandbox) + "/sessions", json: p, creates: true}, &made)
	if err != nil {
		return nil, err
	}
	return &Session{Sandbox: sandbox, ID: made.Session.Id, Token: made.Token, c: c}, nil
}

// Session returns a handle on a session that exists, with the client's key.
func (c *Client) Session(sandbox, id string) *Session {
	return &Session{Sandbox: sandbox, ID: id, c: c}
}

// Sessions returns all sessions of a sandbox, newest first.
func (c *Client) Sessions(ctx context.Context, sandbox string) ([]api.Session, error) {
	return pages(url.Values{}, 0, func(q url.Values) ([]api.Session, string, error) {
		var l api.SessionList
		err := c.do(ctx, call{method: http.MethodGet, path: sandboxPath(sandbox) + "/sessions", query: q}, &l)
		return l.Items, l.NextPageToken, err
	})
}

// Exec runs a command, waits for it on the daemon's side (bounded by the
// request) and returns the beginning of its output. Use a Session for commands
// that run long, print much or read input.
func (c *Client) Exec(ctx context.Context, sandbox string, req api.ExecRequest) (r api.ExecResult, err error) {
	err = c.do(ctx, call{method: http.MethodPost, path: sandboxPath(sandbox) + "/exec", json: req, creates: true}, &r)
	return r, err
}

func (s *Session) path(rest string) string {
	return sandboxPath(s.Sandbox) + "/sessions/" + seg(s.ID) + rest
}

// Get tells how far the session is.
func (s *Session) Get(ctx context.Context) (info api.Session, err error) {
	err = s.c.do(ctx, call{method: http.MethodGet, path: s.path(""), token: s.Token}, &info)
	return info, err
}

// Start starts the command, where it has not been started, without following
// its output.
func (s *Session) Start(ctx context.Context) (info api.Session, err error) {
	k := call{method: http.MethodPost, path: s.path("/attach"), token: s.Token, header: accept("application/json")}
	err = s.c.do(ctx, k, &info)
	return info, err
}

// Signal sends a signal to the command's whole process group.
func (s *Session) Signal(ctx context.Context, name api.SignalName) error {
	k := call{method: http.MethodPost, path: s.path("/signal"), token: s.Token, json: api.SignalRequest{Signal: name}, once: true}
	return s.c.do(ctx, k, nil)
}

// Resize tells the command's terminal its size.
func (s *Session) Resize(ctx context.Context, size api.WindowSize) error {
	return s.c.do(ctx, call{method: http.MethodPost, path: s.path("/resize"), token: s.Token, json: size}, nil)
}
