// Package egress is the egress gateway's process: the one thing through which
// anything leaves a sandbox. It serves every sandbox of a host, each on three
// sockets that were opened in the sandbox's gateway namespace and handed over
// by the daemon, and composes for each a resolver, a proxy and an injector.
//
// What holds: the process is nobody's but its own (no user that owns anything,
// no capability, no file, no way back); it has no state but what it was told,
// and of secrets those of live profiles only; who calls is known by the
// listener alone; what it can't compile or read is denied. It outlives the
// daemon, which adopts it, so it keeps the audit for it meanwhile, in a queue
// whose losses are counted and told. It ends when nobody needs it.
//
// `cloche egress-gateway` runs it; internal/node/egress starts that, and speaks
// to it by package gatewayrpc.
package egress

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"

	"cloche.dev/cloche/internal/egress/gatewayrpc"
	"cloche.dev/cloche/internal/egress/resolve"
	"cloche.dev/cloche/internal/sys"
)

// nobody is the user and group that the gateway runs as.
const nobody = 65534

// maxFiles is how many descriptors the gateway asks for: some for each
// connection of each sandbox.
const maxFiles = 1 << 20

// One sandbox's connections may not use up the process's descriptors: where the
// host allows few, each sandbox has fewer connections, so that this many can
// have all of theirs.
const (
	filesOfConnection = 6 // two sockets, and a pipe each way
	leastSandboxes    = 3
)

// ListenerFD is the descriptor of the unix socket that the process is started
// with. The daemon makes it, so that the gateway needs no file, and so that a
// gateway which is still starting can be reached already.
const ListenerFD = 3

// Options make a gateway's process.
type Options struct {
	Listener *os.File // the unix socket that the daemon speaks to it by
	Root     string   // an empty directory: all of the file system that it sees
	Build    string
	Log      *os.File // gets JSON lines, and is emptied when it is full; nil: nowhere
}

// Run is the gateway's process. Where it begins as root it runs its own program
// once more, and so ends before it returns; what the caller has done before
// must be harmless twice.
func Run(ctx context.Context, o Options) error {
	files, err := sys.RaiseFiles(maxFiles)
	if err != nil {
		return err
	}
	root := os.Geteuid() == 0
	if root && !sys.NoNewPrivileges() {
		return sys.ExecWithoutNewPrivileges([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"})
	}
	if err := sys.NoDumps(); err != nil {
		return err
	}
	l, err := net.FileListener(o.Listener)
	if err != nil {
		return fmt.Errorf("take up the socket that the gateway was started with: %w", err)
	}
	defer l.Close()
	_ = o.Listener.Close()
	sock, ok := l.(*net.UnixListener)
	if !ok {
		return fmt.Errorf("the socket that the gateway was started with is a %s one", l.Addr().Network())
	}
	sock.SetUnlinkOnClose(false) // the path may be a later gateway's by then
	g := newGateway(o.Build, logTo(o.Log))
	g.connections = max(1, int(files/filesOfConnection/leastSandboxes))
	// What there is to be read of the host is read now.
	if g.process, err = sys.FindProcess(os.Getpid()); err != nil {
		return err
	}
	if g.hostRoots, err = x509.SystemCertPool(); err != nil {
		g.hostRoots = x509.NewCertPool()
	}
	if g.hostServers, err = resolve.HostServers("/etc/resolv.conf"); err != nil {
		g.log.Warn("read the host's name servers", "err", err)
	}
	if root {
		if err := sys.Confine(o.Root, nobody); err != nil {
			return err
		}
	}
	return g.serve(ctx, sock)
}

// maxLog bounds the log, which what comes from sandboxes can make long.
const maxLog = 4 << 20

// bounded is a file of bounded length.
type bounded struct {
	file *os.File
	mu   sync.Mutex
	size int64
}

// Write implements io.Writer.
func (b *bounded) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.size += int64(len(p)); b.size > maxLog {
		_ = b.file.Truncate(0) // where it is no file there is nothing to bound
		b.size = int64(len(p))
	}
	return b.file.Write(p)
}

func logTo(f *os.File) *slog.Logger {
	if f == nil {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewJSONHandler(&bounded{file: f}, nil))
}

// serve answers daemons until ctx ends or nobody needs the gateway.
func (g *gateway) serve(ctx context.Context, l *net.UnixListener) error {
	ctx, g.quit = context.WithCancel(ctx)
	defer g.quit()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	defer g.wg.Wait()
	g.wg.Go(func() { g.tick(ctx) })
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			g.quit()
			g.end()
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		g.wg.Go(func() { g.converse(ctx, gatewayrpc.NewConn(c)) })
	}
}

// converse answers one connection of a daemon.
func (g *gateway) converse(ctx context.Context, c *gatewayrpc.Conn) {
	defer func() { _ = c.Close() }()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	defer g.connected()()
	for {
		var r gatewayrpc.Request
		files, err := c.ReceiveFiles(&r, gatewayrpc.MaxRequest)
		if err != nil {
			return
		}
		a := g.answer(ctx, r, files)
		for _, f := range files {
			_ = f.Close()
		}
		if c.Send(a, gatewayrpc.MaxAnswer) != nil {
			return
		}
		if r.Op == gatewayrpc.OpDrain {
			g.retire() // after the answer: nothing may be attached
		}
	}
}
