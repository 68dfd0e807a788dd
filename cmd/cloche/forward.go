package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/client"
)

// mostTunnels bounds the connections that one forward carries at once.
const mostTunnels = 128

func newForward(a *app) *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:   "forward [flags] SANDBOX [LOCAL:]PORT…",
		Short: "Make ports in a sandbox reachable from this machine",
		Long: `Listen on this machine and carry every connection to a port in the sandbox, until Ctrl-C. LOCAL is the port here: the
same number where it is left out, any free one where it is 0.`,
		Example: "  cloche forward dev 8000\n  cloche forward dev 0:8000 5433:5432",
		Args:    between(2, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, id, err := a.dialFor(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			var listeners []net.Listener
			defer func() {
				for _, l := range listeners {
					_ = l.Close()
				}
			}()
			var ports []int
			for _, arg := range args[1:] {
				local, port, err := portPair(arg)
				if err != nil {
					return err
				}
				l, err := net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(local)))
				if err != nil {
					return fmt.Errorf("this machine's port %d: %w", local, err)
				}
				listeners, ports = append(listeners, l), append(ports, port)
			}
			for i, l := range listeners {
				if err := a.announce(l.Addr().String(), id, ports[i]); err != nil {
					return err
				}
			}
			return a.forward(cmd.Context(), c, id, listeners, ports)
		},
	}
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "address to listen on")
	return cmd
}

func (a *app) announce(local, id string, port int) error {
	if a.json {
		return a.printLine(map[string]any{"local": local, "sandbox": id, "port": port})
	}
	_, err := fmt.Fprintf(a.out, "%s → %s:%d\n", local, id, port)
	return err
}

// portPair reads "8000" or "9000:8000".
func portPair(s string) (local, port int, err error) {
	l, p, ok := strings.Cut(s, ":")
	if !ok {
		p = l
	}
	local, err1 := strconv.Atoi(l)
	port, err2 := strconv.Atoi(p)
	if err1 != nil || err2 != nil || local < 0 || local > 65535 || port < 1 || port > 65535 {
		return 0, 0, usage("%q is no pair of ports like 8000 or 9000:8000", s)
	}
	return local, port, nil
}

// forward carries connections until a signal, and returns when all are closed.
func (a *app) forward(ctx context.Context, c *client.Client, id string, listeners []net.Listener, ports []int) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	slots := make(chan struct{}, mostTunnels)
	var wg sync.WaitGroup
	for i, l := range listeners {
		wg.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				select {
				case slots <- struct{}{}:
				default:
					a.note("cloche: more than %d connections at once: one was refused", mostTunnels)
					_ = conn.Close()
					continue
				}
				wg.Go(func() {
					defer func() { <-slots }()
					a.carry(ctx, c, id, ports[i], conn)
				})
			}
		})
	}
	<-ctx.Done()
	for _, l := range listeners {
		_ = l.Close()
	}
	wg.Wait()
	return nil
}

// carry connects one local connection with one tunnel.
func (a *app) carry(ctx context.Context, c *client.Client, id string, port int, local net.Conn) {
	defer local.Close()
	far, err := c.Tunnel(ctx, id, port)
	if err != nil {
		if ctx.Err() == nil {
			a.note("cloche: %s", line(err.Error()))
		}
		return
	}
	defer far.Close()
	stop := context.AfterFunc(ctx, func() {
		_ = local.Close()
		_ = far.Close()
	})
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, err := io.Copy(local, far)
		var e *client.Error
		if errors.As(err, &e) {
			a.note("cloche: %s", line(e.Message))
		}
		if err != nil {
			_ = local.Close()
			return
		}
		shut(local)
	}()
	if _, err := io.Copy(far, local); err != nil {
		_ = far.Close()
	}
	shut(far)
	<-done
}

// shut ends one direction of a connection.
func shut(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
	}
}
