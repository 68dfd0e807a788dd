package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

func newCopy(a *app) *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "cp [flags] SOURCE… TARGET",
		Short: "Copy files and trees into a sandbox, or out of it",
		Long: `Copy files and trees between this machine and a sandbox. A path in a sandbox is SANDBOX:/path; - is standard
input or output, as a tar where the other side is a directory.

As with cp -r: a source is copied into a target that is a directory, else to the target's own name. What comes out
of a sandbox is written below the target only, with plain permissions and no owner; devices and links that lead
out of it are left out and told.`,
		Example: "  cloche cp ./project dev:/home/user\n  cloche cp dev:/home/user/out.csv .\n  cloche cp dev:/var/log - | tar t",
		Args:    between(2, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			target := args[len(args)-1]
			sources := args[:len(args)-1]
			toName, toPath, up := remote(target)
			for _, s := range sources {
				if _, _, is := remote(s); is == up {
					return &usageError{text: fmt.Sprintf("%s and %s: one side must be a sandbox's path, like SANDBOX:/path", s, target)}
				}
			}
			if up {
				c, id, err := a.dialFor(ctx, toName)
				if err != nil {
					return err
				}
				return a.copyIn(ctx, c, id, sources, toPath, user)
			}
			for _, s := range sources {
				name, from, _ := remote(s)
				c, id, err := a.dialFor(ctx, name)
				if err != nil {
					return err
				}
				if err := a.copyOut(ctx, c, id, from, target); err != nil {
					return fmt.Errorf("%s: %w", s, err)
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "owner of what is copied in, by name or UID[:GID] (default: the template's user)")
	return cmd
}

// remote splits "SANDBOX:/path". A path with a slash before its colon is one
// of this machine.
func remote(arg string) (sandbox, p string, ok bool) {
	sandbox, p, ok = strings.Cut(arg, ":")
	if !ok || sandbox == "" || strings.ContainsAny(sandbox, "/\\") || !strings.HasPrefix(p, "/") {
		return "", arg, false
	}
	return sandbox, path.Clean(p) + trailing(p), true
}

// trailing keeps the slash by which a user says "a directory".
func trailing(p string) string {
	if strings.HasSuffix(p, "/") && path.Clean(p) != "/" {
		return "/"
	}
	return ""
}

// copyIn copies files and trees into a sandbox.
func (a *app) copyIn(ctx context.Context, c *client.Client, id string, sources []string, to, user string) error {
	if user == "" {
		var err error
		if user, err = defaultUser(ctx, c, id); err != nil {
			return err
		}
	}
	dir := false
	info, err := c.Stat(ctx, id, strings.TrimSuffix(to, "/"), true)
	switch {
	case to == "/":
		dir = true
	case err == nil:
		dir = info.Type == api.TypeDir
	case !client.IsClass(err, api.ClassNotFound):
		return err
	}
	if (len(sources) > 1 || strings.HasSuffix(to, "/")) && !dir {
		return &client.Error{Class: api.ClassNotFound, Code: "no_directory", Message: to + " is no directory in the sandbox", Hint: "make it: `cloche exec " + id + " -- mkdir -p " + to + "`"}
	}
	p := a.begin("copying into " + id)
	defer p.end()
	for _, source := range sources {
		if err := a.copyOneIn(ctx, c, id, source, to, user, dir, p); err != nil {
			return fmt.Errorf("%s: %w", source, err)
		}
	}
	return nil
}

// defaultUser is the user of a sandbox's template, who shall own what comes in.
func defaultUser(ctx context.Context, c *client.Client, id string) (string, error) {
	s, err := c.Sandbox(ctx, id)
	if err != nil {
		return "", err
	}
	t, err := c.Template(ctx, s.Digest)
	if err != nil {
		return "", err
	}
	if t.Config.User == "" {
		return "root", nil
	}
	return t.Config.User, nil
}

func (a *app) copyOneIn(ctx context.Context, c *client.Client, id, source, to, user string, dir bool, p *progress) error {
	if source == "-" {
		in := &counted{r: a.in, p: p, what: "copying into " + id}
		if dir {
			_, err := c.WriteTree(ctx, id, to, in, user)
			return err
		}
		_, err := c.WriteFile(ctx, id, to, in, client.WriteOptions{User: user})
		return err
	}
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	full, err := filepath.Abs(source)
	if err != nil {
		return err
	}
	name, into := filepath.Base(full), to
	if !dir {
		name, into = path.Base(to), path.Dir(to)
	}
	if info.Mode().IsRegular() {
		f, err := os.Open(full)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = c.WriteFile(ctx, id, path.Join(into, name), &counted{r: f, p: p, what: "copying " + name}, client.WriteOptions{Mode: info.Mode().Perm(), User: user})
		return err
	}
	if !info.IsDir() {
		return usage("it is neither a file nor a directory")
	}
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := packTree(w, full, name)
		w.CloseWithError(err)
		packed <- err
	}()
	_, err = c.WriteTree(ctx, id, into, &counted{r: r, p: p, what: "copying " + name}, user)
	_ = r.CloseWithError(errors.New("the copy has ended"))
	if packErr := <-packed; packErr != nil && err != nil && !errors.Is(err, context.Canceled) && isLocal(packErr) {
		return packErr // the cause, where the upload failed because of it
	}
	return err
}

// isLocal tells whether an error is of this machine's files.
func isLocal(err error) bool {
	var p *os.PathError
	return errors.As(err, &p)
}

// counted shows how much has been read.
type counted struct {
	r    io.Reader
	p    *progress
	what string
	n    int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	if c.p != nil && c.p.tty {
		c.p.set(fmt.Sprintf("%s: %s", c.what, amount(c.n)))
	}
	return n, err
}

// copyOut copies a file or tree out of a sandbox.
func (a *app) copyOut(ctx context.Context, c *client.Client, id, from, to string) error {
	info, err := c.Stat(ctx, id, strings.TrimSuffix(from, "/"), true)
	if from == "/" {
		info, err = api.FileInfo{Name: id, Type: api.TypeDir}, nil
	}
	if err != nil {
		return err
	}
	from = strings.TrimSuffix(from, "/")
	if from == "" {
		from = "/"
	}
	p := a.begin("copying out of " + id)
	defer p.end()
	if info.Type == api.TypeFile {
		r, err := c.ReadFile(ctx, id, from, 0, -1)
		if err != nil {
			return err
		}
		defer r.Close()
		in := &counted{r: r, p: p, what: "copying " + path.Base(from)}
		if to == "-" {
			_, err = io.Copy(a.out, in)
			return err
		}
		return writeLocal(to, path.Base(from), in, info.Mode)
	}
	if info.Type != api.TypeDir {
		return usage("it is neither a file nor a directory")
	}
	r, err := c.ReadTree(ctx, id, from)
	if err != nil {
		return err
	}
	defer r.Close()
	in := &counted{r: r, p: p, what: "copying " + from}
	if to == "-" {
		_, err = io.Copy(a.out, in)
		return err
	}
	name := path.Base(from)
	if from == "/" {
		name = id
	}
	dir, name, err := localTarget(to, name)
	if err != nil {
		return err
	}
	return unpackTree(tar.NewReader(in), dir, path.Base(from), name, func(what string) { a.note("cloche: left out: %s", line(what)) })
}
