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
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/internal/doctor"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/server"
)

// serveFlags are the flags of serve; `service install` has the same ones and
// writes them into the unit.
type serveFlags struct {
	server.Options
	open, resolvers []string
	keyCommand      string
	level, format   string
}

func (f *serveFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.Listen, "listen", envOr("CLOCHE_LISTEN", "127.0.0.1:7070"), "address to listen on")
	fs.StringVar(&f.RunDir, "run-dir", envOr("CLOCHE_RUN_DIR", "/run/cloche"), "directory of sockets; its path must be short")
	fs.BoolVar(&f.Insecure, "insecure", false, "allow addresses that are not loopback without TLS")
	fs.StringVar(&f.TLSCert, "tls-cert", "", "certificate `FILE` (PEM, with its chain)")
	fs.StringVar(&f.TLSKey, "tls-key", "", "private key `FILE` (PEM)")
	fs.StringVar(&f.Metrics, "metrics", "", "`ADDRESS` at which Prometheus finds /metrics, like 127.0.0.1:7071; none without it")
	fs.Float64Var(&f.MemoryOvercommit, "memory-overcommit", 4, "how often the host's memory may be lent to sandboxes that have a machine; 0 is no bound")
	fs.Float64Var(&f.CPUOvercommit, "cpu-overcommit", 0, "how often each core may be lent; 0 is no bound")
	fs.Int64Var(&f.DiskFloorMiB, "disk-floor", 1024, "`MIB` of the state directory's disk below which nothing new is begun that needs room")
	fs.StringVar(&f.Driver, "driver", server.DriverAuto, "what sandboxes run on that name no driver: firecracker (start fails where it doesn't work), gvisor, or auto for firecracker where a probe has proven it")
	fs.StringVar(&f.AllowFirecracker, "allow-vulnerable", "", "let this `RELEASE` of Firecracker pass although its jailer is known to have a hole; for tests only")
	_ = fs.MarkHidden("allow-vulnerable") // it exists
	fs.StringSliceVar(&f.open, "egress-open", nil, "private `CIDR` that egress profiles may let sandboxes reach (again for more), like that of a package mirror")
	fs.StringSliceVar(&f.resolvers, "egress-resolver", nil, "`ADDRESS` of a DNS server that the egress gateway asks (again for more); without it the host's")
	fs.StringVar(&f.Egress.RootsFile, "egress-roots", "", "`FILE` with the authorities (PEM) by which the egress gateway verifies servers; without it the host's")
	fs.StringVar(&f.keyCommand, "secret-kms", "", "`COMMAND` that wraps and unwraps the keys of secrets; without it a key file in the state directory")
	fs.StringVar(&f.level, "log-level", "info", "debug, info, warn or error")
	fs.StringVar(&f.format, "log-format", "", "text or json (default text on a terminal, else json)")
}

// settle makes the paths absolute and the log; what is wrong is an error of
// usage.
func (f *serveFlags) settle(a *app) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.level)); err != nil {
		return usage("--log-level must be debug, info, warn or error, not %q", f.level)
	}
	o := &slog.HandlerOptions{Level: level}
	switch {
	case f.format == "text" || f.format == "" && isTerminal(a.err):
		f.Log = slog.New(slog.NewTextHandler(a.err, o))
	case f.format == "json" || f.format == "":
		f.Log = slog.New(slog.NewJSONHandler(a.err, o))
	default:
		return usage("--log-format must be text or json, not %q", f.format)
	}
	if err := server.CheckDriver(f.Driver); err != nil {
		return domain(err)
	}
	f.StateDir, f.Version = a.stateDir, version
	if err := f.settleEgress(); err != nil {
		return err
	}
	for _, path := range []*string{&f.StateDir, &f.RunDir, &f.TLSCert, &f.TLSKey, &f.Egress.RootsFile} {
		if *path == "" {
			continue
		}
		abs, err := filepath.Abs(*path)
		if err != nil {
			return err
		}
		*path = abs
	}
	return nil
}

func newServe(a *app) *cobra.Command {
	var f serveFlags
	cmd := &cobra.Command{
		Use:   "serve [flags]",
		Short: "Run the daemon (as root)",
		Long: `Run the daemon in the foreground until SIGTERM or Ctrl-C. Stopping it ends no sandbox: they live on, and the next
start takes them up again. It logs to standard error, as text on a terminal and else as JSON.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.settle(a); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			tell := serviceManager()
			f.Ready = func() { tell("READY=1") }
			defer context.AfterFunc(ctx, func() { tell("STOPPING=1") })()
			return domain(server.Run(ctx, f.Options))
		},
	}
	f.register(cmd.Flags())
	return cmd
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
const doctorWait = 3 * time.Minute

func newDoctor(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Say what this machine can and can't do, why, and how to mend it",
		Long: `Look at this machine and try what only a trial proves: that machines start, and that /dev/kvm runs code. It needs
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
				o.Probe, o.Firecracker = server.Probe, server.ProbeFirecracker(dir)
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
