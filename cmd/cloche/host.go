package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/internal/doctor"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/server"
)

func newServe(a *app) *cobra.Command {
	var o server.Options
	var level string
	cmd := &cobra.Command{
		Use:   "serve [flags]",
		Short: "Run the daemon (as root)",
		Long: `Run the daemon in the foreground until SIGTERM or Ctrl-C. Stopping it ends no sandbox: they live on, and the next
start takes them up again. It logs to standard error, as text on a terminal and else as JSON.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var l slog.Level
			if err := l.UnmarshalText([]byte(level)); err != nil {
				return usage("--log-level must be debug, info, warn or error, not %q", level)
			}
			o.StateDir = a.stateDir
			for _, dir := range []*string{&o.StateDir, &o.RunDir} {
				abs, err := filepath.Abs(*dir)
				if err != nil {
					return err
				}
				*dir = abs
			}
			o.Version, o.Log = version, newLog(a.err, l)
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return domain(server.Run(ctx, o))
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Listen, "listen", envOr("CLOCHE_LISTEN", "127.0.0.1:7070"), "address to listen on")
	fs.StringVar(&o.RunDir, "run-dir", envOr("CLOCHE_RUN_DIR", "/run/cloche"), "directory of sockets; its path must be short")
	fs.BoolVar(&o.Insecure, "insecure", false, "allow an address that is not loopback without TLS")
	fs.StringVar(&o.TLSCert, "tls-cert", "", "certificate `FILE` (PEM, with its chain)")
	fs.StringVar(&o.TLSKey, "tls-key", "", "private key `FILE` (PEM)")
	fs.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	return cmd
}

// newLog logs for people on a terminal and for programs elsewhere.
func newLog(to *os.File, level slog.Level) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if isTerminal(to) {
		return slog.New(slog.NewTextHandler(to, o))
	}
	return slog.New(slog.NewJSONHandler(to, o))
}

// domain gives an error of the daemon the shape of one of its answers, so that
// both end in the same exit codes and the same two lines.
func domain(err error) error {
	var e *sandbox.Error
	switch {
	case err == nil || errors.Is(err, context.Canceled):
		return nil
	case errors.As(err, &e):
		return &client.Error{Class: api.ErrorClass(e.Class), Code: e.Code, Message: e.Message, Hint: e.Hint, Retryable: e.Retryable}
	}
	return err
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// doctorWait bounds all checks together.
const doctorWait = 2 * time.Minute

func newDoctor(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Say what this machine can and can't do, why, and how to mend it",
		Long: `Look at this machine and try what only a trial proves: that a machine starts, and that /dev/kvm runs code. It needs
no daemon. The exit code is 0 when sandboxes can run here, else 3.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := filepath.Abs(a.stateDir)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), doctorWait)
			defer cancel()
			p := a.begin("looking at this machine")
			o := doctor.Options{
				StateDir: dir, Version: version, Daemon: a.daemonVersion, Driver: "gvisor",
				Began: func(name string) { p.set("looking at this machine: " + name) },
			}
			if os.Geteuid() == 0 {
				o.Probe = server.Probe
			}
			if self := executable(); self != nil {
				o.KVM = append(self, kvmProbe)
			}
			r := doctor.Run(ctx, o)
			p.end()
			if err := a.printReport(r); err != nil {
				return err
			}
			if !r.CanRun {
				return exitError(exitConflict)
			}
			return nil
		},
	}
}

func (a *app) daemonVersion(ctx context.Context) (string, error) {
	c, err := a.dial(-1)
	if err != nil {
		return "", err
	}
	v, err := c.Version(ctx)
	var e *client.Error
	if errors.As(err, &e) {
		return "", errors.New(e.Message)
	}
	return v.Version, err
}

func (a *app) printReport(r doctor.Report) error {
	if a.json {
		return a.printJSON(r)
	}
	wide := 0
	for _, c := range r.Checks {
		wide = max(wide, len(c.Name))
	}
	var b strings.Builder
	for _, c := range r.Checks {
		fmt.Fprintf(&b, "%s %-*s  %s\n", a.mark(c.Status), wide, c.Name, line(c.Detail))
		if c.Mend != "" {
			fmt.Fprintf(&b, "     %*s  → %s\n", wide, "", line(c.Mend))
		}
	}
	if r.CanRun {
		b.WriteString("\nSandboxes can run on this machine.\n")
	} else {
		b.WriteString("\nSandboxes can't run on this machine before what FAIL says is mended.\n")
	}
	_, err := fmt.Fprint(a.out, b.String())
	return err
}

func (a *app) mark(s doctor.Status) string {
	word, colour := fmt.Sprintf("%-4s", strings.ToUpper(string(s))), map[doctor.Status]string{doctor.OK: "32", doctor.Warn: "33", doctor.Fail: "31"}[s]
	if !isTerminal(a.out) || os.Getenv("NO_COLOR") != "" {
		return word
	}
	return "\x1b[" + colour + "m" + word + "\x1b[0m"
}

// kvmProbe is the command by which doctor runs itself as the child that tries
// KVM, since that may never come back.
const kvmProbe = "kvm-probe"

func newKVMProbe(a *app) *cobra.Command {
	return &cobra.Command{
		Use: kvmProbe, Hidden: true, Args: noArgs,
		RunE: func(*cobra.Command, []string) error { return doctor.RunKVM(a.out, a.err) },
	}
}
