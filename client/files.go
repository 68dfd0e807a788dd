package client

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strconv"

	"cloche.dev/cloche/api"
)

func filesPath(sandbox string) string { return sandboxPath(sandbox) + "/files" }

// Stat tells what a path in a sandbox is; a symbolic link is followed where
// follow is true.
func (c *Client) Stat(ctx context.Context, sandbox, path string, follow bool) (i api.FileInfo, err error) {
	q := query("path", path, "follow", strconv.FormatBool(follow))
	err = c.do(ctx, call{method: http.MethodGet, path: filesPath(sandbox) + "/stat", query: q}, &i)
	return i, err
}

// List returns what a directory holds; truncated where that is too much.
func (c *Client) List(ctx context.Context, sandbox, path string) (entries []api.FileInfo, truncated bool, err error) {
	var l api.FileList
	err = c.do(ctx, call{method: http.MethodGet, path: filesPath(sandbox) + "/list", query: query("path", path)}, &l)
	return l.Items, l.Truncated, err
}

// Mkdir makes a directory.
func (c *Client) Mkdir(ctx context.Context, sandbox string, req api.MkdirRequest) error {
	return c.do(ctx, call{method: http.MethodPost, path: filesPath(sandbox) + "/mkdir", json: req, once: true}, nil)
}

// Move moves or renames.
func (c *Client) Move(ctx context.Context, sandbox, from, to string) error {
	return c.do(ctx, call{method: http.MethodPost, path: filesPath(sandbox) + "/move", json: api.MoveRequest{From: from, To: to}, once: true}, nil)
}

// Remove removes a file or, with recursive, a tree.
func (c *Client) Remove(ctx context.Context, sandbox, path string, recursive bool) error {
	q := query("path", path)
	if recursive {
		q.Set("recursive", "true")
	}
	return c.do(ctx, call{method: http.MethodDelete, path: filesPath(sandbox), query: q, once: true}, nil)
}

// ReadFile streams a file from offset on: length bytes, or all where length is
// negative. The caller closes what it returns; a transfer that was cut ends in
// io.ErrUnexpectedEOF, never in io.EOF.
func (c *Client) ReadFile(ctx context.Context, sandbox, path string, offset, length int64) (io.ReadCloser, error) {
	k := call{method: http.MethodGet, path: filesPath(sandbox), query: query("path", path), header: accept("application/octet-stream")}
	switch {
	case length == 0:
		return http.NoBody, nil
	case length > 0:
		k.header.Set("Range", fmt.Sprintf("bytes=%d-%d", offset, offset+length-1))
	case offset > 0:
		k.header.Set("Range", fmt.Sprintf("bytes=%d-", offset))
	}
	resp, err := c.send(ctx, k)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// WriteOptions say how a file is made. The zero value makes it root's, 0644.
type WriteOptions struct {
	Mode    fs.FileMode // permission and set-id bits; 0 is the daemon's default
	User    string      // owner, resolved inside
	Parents bool        // make missing directories
}

func octal(m fs.FileMode) string {
	if m == 0 {
		return ""
	}
	v := uint32(m.Perm())
	for bit, add := range map[fs.FileMode]uint32{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if m&bit != 0 {
			v |= add
		}
	}
	return fmt.Sprintf("%04o", v)
}

// WriteFile writes a file whole: it appears under its name when all of r has
// arrived.
func (c *Client) WriteFile(ctx context.Context, sandbox, path string, r io.Reader, o WriteOptions) (int64, error) {
	q := query("path", path, "mode", octal(o.Mode), "user", o.User)
	if o.Parents {
		q.Set("parents", "true")
	}
	var w api.FileWritten
	err := c.do(ctx, call{method: http.MethodPut, path: filesPath(sandbox), query: q, stream: r, kind: "application/octet-stream"}, &w)
	return w.Written, err
}

// ReadTree streams a file or tree as a tar. The caller closes it.
func (c *Client) ReadTree(ctx context.Context, sandbox, path string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, call{
		method: http.MethodGet, path: filesPath(sandbox) + "/archive", query: query("path", path),
		header: accept("application/x-tar"),
	})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// WriteTree unpacks a tar into a directory. user owns what is made; "" keeps
// the owners in the tar.
func (c *Client) WriteTree(ctx context.Context, sandbox, path string, tar io.Reader, user string) (entries int64, err error) {
	var w api.ArchiveWritten
	err = c.do(ctx, call{
		method: http.MethodPut, path: filesPath(sandbox) + "/archive", query: query("path", path, "user", user),
		stream: tar, kind: "application/x-tar",
	}, &w)
	return w.Entries, err
}

func accept(kind string) http.Header {
	return http.Header{"Accept": {kind + ", application/problem+json"}}
}
