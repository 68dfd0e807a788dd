// Command cloche is Cloche's one program: the daemon, and the command line for
// it. `cloche serve` hands its flags to internal/server and holds nothing else;
// `cloche doctor` prints what internal/doctor found; `cloche firecracker` and
// `cloche kernel` install on this host what machines are made of. Every other
// command speaks to a daemon through the public client, and does nothing that
// another client could not do.
//
// Errors become one line, a hint and an exit code here and nowhere else, as
// docs/cli.md tells them. Whatever a command changed of its surroundings (the
// terminal, a sandbox of `run --rm`) is put back on every way out.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// run is main with its surroundings named, for tests.
func run(args []string, in, out, errOut *os.File) int {
	// A reader that goes away is an error of the write, not the end of this
	// process: what it made must still be cleaned up.
	signal.Ignore(syscall.SIGPIPE)
	a := &app{in: in, out: out, err: errOut}
	root := newRoot(a)
	root.SetArgs(args)
	cmd, err := root.ExecuteC()
	return a.finish(cmd, err)
}

// newRoot makes the tree of commands.
func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:           "cloche",
		Short:         "Run untrusted code in isolated machines on hosts you own",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return &usageError{text: fmt.Sprintf("there is no command %q", args[0]), hint: "`cloche --help` lists the commands"}
			}
			return nil
		},
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		Version: version,
	}
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetVersionTemplate("cloche {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage("%v", err) })
	f := root.PersistentFlags()
	f.StringVar(&a.url, "url", "", "the daemon's URL (default $CLOCHE_URL, else "+client.DefaultURL+")")
	f.StringVar(&a.key, "key", "", "API key (default $CLOCHE_API_KEY, else the admin key in the state directory)")
	f.StringVar(&a.stateDir, "state-dir", envOr("CLOCHE_STATE_DIR", "/var/lib/cloche"), "the daemon's state directory, when it is on this host")
	f.BoolVar(&a.json, "json", false, "print JSON: one document, or one object a line for streams")
	f.BoolVarP(&a.quiet, "quiet", "q", false, "show no progress")
	groups := []struct {
		id, title string
		cmds      []*cobra.Command
	}{
		{"life", "Sandboxes:", []*cobra.Command{
			newRun(a), newCreate(a), newList(a), newInspect(a), newExec(a), newAttach(a), newLogs(a), newCopy(a),
			newForward(a), newUpdate(a), newRemove(a),
		}},
		{"time", "Sandboxes through time:", append(newVerbs(a), newFork(a), newSnapshot(a), newRollback(a))},
		{"egress", "What leaves sandboxes:", []*cobra.Command{newEgress(a), newSecret(a)}},
		{"more", "Templates, operations, events, keys, quotas:", []*cobra.Command{
			newTemplate(a), newOperation(a), newEvents(a), newKey(a), newUsage(a), newQuota(a),
		}},
		{"host", "The host:", []*cobra.Command{newServe(a), newService(a), newDrain(a), newBackup(a), newDoctor(a), newFirecracker(a), newKernel(a), newVersion(a)}},
	}
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
		for _, c := range g.cmds {
			c.GroupID = g.id
			root.AddCommand(c)
		}
	}
	root.SetHelpCommandGroupID("host")
	root.SetCompletionCommandGroupID("host")
	root.AddCommand(newKVMProbe(a), newEgressGateway(a))
	return root
}

// exitError ends the program with a code and says nothing more.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// usageError is a command line that means nothing.
type usageError struct{ text, hint string }

func (e *usageError) Error() string { return e.text }

func usage(format string, args ...any) error { return &usageError{text: fmt.Sprintf(format, args...)} }

// The exit codes, as docs/cli.md tells them.
const (
	exitUsage       = 1
	exitNotFound    = 2
	exitConflict    = 3
	exitDenied      = 4
	exitUnavailable = 5
	exitInternal    = 70
	exitOwn         = 125 // of run, exec and attach: Cloche's own failure
	exitPipe        = 128 + int(syscall.SIGPIPE)
	exitInterrupted = 128 + int(syscall.SIGINT)
)

// codeOf is the exit code of an error that is not of run, exec or attach.
func codeOf(err error) int {
	var e *client.Error
	if !errors.As(err, &e) {
		var u *usageError
		switch {
		case errors.As(err, &u):
			return exitUsage
		case errors.Is(err, os.ErrNotExist):
			return exitNotFound
		case errors.Is(err, os.ErrPermission):
			return exitDenied
		case errors.Is(err, context.DeadlineExceeded):
			return exitUnavailable
		}
		return exitInternal
	}
	switch e.Class {
	case api.ClassInvalid:
		return exitUsage
	case api.ClassNotFound:
		return exitNotFound
	case api.ClassConflict, api.ClassFailedPrecondition:
		return exitConflict
	case api.ClassDenied, api.ClassQuota:
		return exitDenied
	case api.ClassNoCapacity, api.ClassUnavailable:
		return exitUnavailable
	}
	return exitInternal
}

// finish says an error and returns the program's exit code.
func (a *app) finish(cmd *cobra.Command, err error) int {
	var code exitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	case errors.Is(err, syscall.EPIPE):
		return exitPipe
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	}
	message, hint := explain(cmd, err)
	fmt.Fprintf(a.err, "cloche: %s\n", message)
	if hint != "" {
		fmt.Fprintf(a.err, "hint: %s\n", hint)
	}
	if cmd != nil && cmd.Annotations["runs"] != "" {
		return exitOwn
	}
	return codeOf(err)
}

// explain splits an error into what happened and the next step, one line each.
func explain(cmd *cobra.Command, err error) (message, hint string) {
	message = err.Error()
	var e *client.Error
	var u *usageError
	switch {
	case errors.As(err, &e):
		message, hint = e.Message, e.Hint
		if prefix, ok := strings.CutSuffix(err.Error(), e.Error()); ok {
			message = prefix + message
		}
		if hint == "" && e.RequestID != "" && e.Class == api.ClassInternal {
			hint = "the daemon's log says more about request " + e.RequestID
		}
		if hint == "" && e.Status == 401 {
			hint = "set CLOCHE_API_KEY, or run this as root on the daemon's host"
		}
	case errors.As(err, &u):
		hint = u.hint
		if hint == "" && cmd != nil {
			hint = fmt.Sprintf("`%s --help` says how it is used", cmd.CommandPath())
		}
	}
	return line(message), line(hint)
}

// line makes one line of what may come from anywhere.
func line(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.TrimSpace(s))
}

func envOr(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

func newVersion(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the versions of this program and of the daemon", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			type versions struct {
				Client string `json:"client"`
				Go     string `json:"go,omitempty"`
				Daemon string `json:"daemon,omitempty"`
				Driver string `json:"driver,omitempty"`
			}
			v := versions{Client: version}
			if info, ok := debug.ReadBuildInfo(); ok {
				v.Go = info.GoVersion
			}
			if c, err := a.dial(-1); err == nil {
				if d, err := c.Version(cmd.Context()); err == nil {
					v.Daemon, v.Driver = d.Version, d.Driver
				}
			}
			if a.json {
				return a.printJSON(v)
			}
			_, err := fmt.Fprintf(a.out, "cloche %s\n", v.Client)
			if err == nil && v.Daemon != "" {
				_, err = fmt.Fprintf(a.out, "daemon %s (driver %s)\n", v.Daemon, v.Driver)
			}
			return err
		},
	}
}

// The checks of arguments: cobra's own, as errors of usage.
func noArgs(cmd *cobra.Command, args []string) error { return exactly(0)(cmd, args) }

func exactly(n int) cobra.PositionalArgs { return between(n, n) }

func between(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) >= least && (most < 0 || len(args) <= most) {
			return nil
		}
		return &usageError{
			text: fmt.Sprintf("%s got %d arguments", cmd.CommandPath(), len(args)),
			hint: "it is used like this: " + cmd.UseLine(),
		}
	}
}
