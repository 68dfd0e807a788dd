package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// runs marks the commands whose exit code is that of what they run.
var runs = map[string]string{"runs": "yes"}

// createFlags are the flags by which a sandbox is made.
type createFlags struct {
	name, memory, disk string
	driver, egress     string
	labels, env        []string
	cpu                float64
	ttl                time.Duration
	policy             policyFlags
}

func (f *createFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.name, "name", "", "a name for it (the label `name`), by which other commands find it")
	fs.StringArrayVarP(&f.labels, "label", "l", nil, "a label `NAME=VALUE` (repeatable)")
	fs.StringArrayVarP(&f.env, "env", "e", nil, "environment `NAME=VALUE` of all that runs in it (repeatable); a bare NAME takes its value from here")
	fs.Float64Var(&f.cpu, "cpu", 0, "cores, e.g. 0.5 (default: the host's)")
	fs.StringVar(&f.memory, "memory", "", "memory, e.g. 512MiB (default: the host's)")
	fs.StringVar(&f.disk, "disk", "", "what it may write over its template, e.g. 4GiB (default: the host's)")
	fs.StringVar(&f.driver, "driver", "", "what its machines run on: firecracker or gvisor (default: the host's)")
	fs.StringVar(&f.egress, "egress", "", "its egress `PROFILE`: what it may reach; none, public, packages or one of the project's (default: none)")
	fs.DurationVar(&f.ttl, "ttl", 0, "end it so long after now, e.g. 30m: delete it, or what --on-expiry says")
	f.policy.add(cmd)
}

func (f *createFlags) request(template string) (r api.CreateSandboxRequest, err error) {
	r.Template, r.Driver, r.Egress = template, f.driver, f.egress
	if r.Labels, err = pairs(f.labels, "--label", false); err != nil {
		return r, err
	}
	if f.name != "" {
		r.Labels[nameLabel] = f.name
	}
	if r.Env, err = pairs(f.env, "--env", true); err != nil {
		return r, err
	}
	if f.cpu < 0 || f.ttl < 0 || f.ttl > 0 && f.ttl < time.Second {
		return r, usage("--cpu must be more than 0, --ttl at least 1s")
	}
	r.Resources.MilliCpu = int(f.cpu*1000 + 0.5)
	if f.memory != "" {
		if r.Resources.MemoryMib, err = mebibytes(f.memory); err != nil {
			return r, err
		}
	}
	if f.disk != "" {
		if r.Resources.DiskMib, err = mebibytes(f.disk); err != nil {
			return r, err
		}
	}
	r.TtlSeconds = int64(f.ttl.Seconds())
	r.Policy, err = f.policy.request()
	return r, err
}

// processFlags are the flags by which a command is run.
type processFlags struct {
	stdin, tty bool
	env        []string
	cwd, user  string
	timeout    time.Duration
}

func (f *processFlags) add(cmd *cobra.Command, withEnv bool) {
	fs := cmd.Flags()
	fs.BoolVarP(&f.stdin, "stdin", "i", false, "give the command this standard input (else it has none)")
	fs.BoolVarP(&f.tty, "tty", "t", false, "run the command on a terminal")
	fs.StringVarP(&f.cwd, "workdir", "w", "", "working directory (default: the template's)")
	fs.StringVarP(&f.user, "user", "u", "", "user, by name or UID[:GID] (default: the template's)")
	fs.DurationVar(&f.timeout, "timeout", 0, "end the command after so long, e.g. 10m")
	if withEnv {
		fs.StringArrayVarP(&f.env, "env", "e", nil, "environment `NAME=VALUE` (repeatable); a bare NAME takes its value from here")
	}
	fs.SetInterspersed(false) // what follows the first argument is the command's
}

func (f *processFlags) spec(a *app, args []string) (p api.ProcessSpec, err error) {
	p = api.ProcessSpec{Args: args, Cwd: f.cwd, User: f.user, Stdin: f.stdin, TimeoutSeconds: int64(f.timeout.Seconds())}
	if p.Env, err = pairs(f.env, "--env", true); err != nil {
		return p, err
	}
	if f.timeout < 0 || f.timeout > 0 && f.timeout < time.Second {
		return p, usage("--timeout must be at least 1s")
	}
	if f.tty {
		size := windowSize(a.out, a.in)
		p.Tty = &size
		if _, ok := p.Env["TERM"]; !ok {
			p.Env["TERM"] = envOr("TERM", "xterm")
		}
	}
	if f.tty && f.stdin && !term.IsTerminal(int(a.in.Fd())) {
		return p, &usageError{text: "-i with -t needs a terminal, and standard input is none", hint: "leave -t out to pipe input into the command"}
	}
	return p, nil
}

// commandLine splits "WHAT [--] COMMAND…".
func commandLine(cmd *cobra.Command, args []string) (what string, command []string, err error) {
	if len(args) == 0 {
		return "", nil, between(1, -1)(cmd, args)
	}
	what, command = args[0], args[1:]
	switch {
	case len(command) > 0 && command[0] == "--":
		command = command[1:]
	case len(command) > 0 && strings.HasPrefix(command[0], "-"):
		return "", nil, &usageError{
			text: fmt.Sprintf("%s stands after %s, where the command begins", command[0], what),
			hint: "put Cloche's own flags before it, and -- before a command that begins with a dash",
		}
	}
	return what, command, nil
}

func newRun(a *app) *cobra.Command {
	var cf createFlags
	var pf processFlags
	var rm bool
	cmd := &cobra.Command{
		Use:   "run [flags] TEMPLATE [--] [COMMAND…]",
		Short: "Create a sandbox and run a command in it",
		Long: `Create a sandbox from a template, run a command in it (the template's own where none is named) and
show its output as it comes. The exit code is the command's.

Ctrl-C goes to the command; a second one within two seconds kills it, a third one leaves it alone.`,
		Example:     "  cloche run --rm base -- python3 -c 'print(6*7)'\n  cloche run --rm -it base bash\n  tar c . | cloche run --rm -i base -- tar t",
		Annotations: runs,
		RunE: func(cmd *cobra.Command, args []string) error {
			template, command, err := commandLine(cmd, args)
			if err != nil {
				return err
			}
			req, err := cf.request(template)
			if err != nil {
				return err
			}
			spec, err := pf.spec(a, command)
			if err != nil {
				return err
			}
			return a.runOnce(cmd.Context(), req, spec, rm)
		},
	}
	cf.add(cmd)
	pf.add(cmd, false)
	cmd.Flags().BoolVar(&rm, "rm", false, "delete the sandbox when the command has ended")
	return cmd
}

// removeTime bounds the deletion at the end of `run --rm`, which Ctrl-C does
// not end.
const removeTime = time.Minute

// runOnce creates a sandbox, runs the command and, with rm, deletes the
// sandbox on every way out.
func (a *app) runOnce(ctx context.Context, req api.CreateSandboxRequest, spec api.ProcessSpec, rm bool) (err error) {
	c, err := a.client()
	if err != nil {
		return err
	}
	var made string
	stopped := func() {}
	defer func() { stopped() }()
	defer func() {
		if made == "" {
			return
		}
		if rm {
			deleting, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTime)
			defer cancel()
			if gone := a.remove(deleting, c, made); gone != nil {
				message, _ := explain(nil, gone)
				fmt.Fprintf(a.err, "cloche: sandbox %s could not be deleted: %s\n", made, message)
			}
			return
		}
		a.note("the sandbox lives on as %s: `cloche exec %s -- COMMAND` goes on in it, `cloche rm %s` deletes it", made, made, made)
	}()
	creating, release := interruptible(ctx)
	p := a.begin("creating a sandbox from " + req.Template)
	accepted, err := c.CreateSandbox(creating, req)
	if err == nil {
		made = accepted.Sandbox.Id
		_, err = c.Wait(creating, accepted.Operation.Id, p.operation("creating "+made))
	}
	if err == nil && len(spec.Args) == 0 {
		spec.Args, err = templateCommand(creating, c, accepted.Sandbox.Digest)
	}
	p.end()
	signals := catchSignals() // until the sandbox is deleted: the clean-up above runs before this is undone
	stopped = func() { signal.Stop(signals) }
	release()
	if err != nil {
		return err
	}
	return a.runIn(ctx, c, made, spec, signals)
}

func templateCommand(ctx context.Context, c *client.Client, digest string) ([]string, error) {
	t, err := c.Template(ctx, digest)
	if err == nil && len(t.Config.Command) == 0 {
		err = &usageError{text: "no command was named, and the template has none", hint: "cloche run TEMPLATE -- COMMAND"}
	}
	return t.Config.Command, err
}

// runIn makes a session, attaches to it and ends as its command does.
func (a *app) runIn(ctx context.Context, c *client.Client, sandbox string, spec api.ProcessSpec, signals chan os.Signal) error {
	s, err := c.CreateSession(ctx, sandbox, spec)
	if err != nil {
		return err
	}
	return a.attach(ctx, attachment{session: s, start: true, stdin: spec.Stdin, tty: spec.Tty != nil, signals: signals})
}

func newExec(a *app) *cobra.Command {
	var pf processFlags
	var detach bool
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX [--] COMMAND…",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox and show its output as it comes. The exit code is the command's.

The command does not depend on this program: when the daemon goes away and comes back its output goes on where
it was, and with --detach it is only started; ` + "`cloche attach SANDBOX SESSION`" + ` shows it from its beginning.

Ctrl-C goes to the command; a second one within two seconds kills it, a third one leaves it alone.`,
		Example:     "  cloche exec dev -- make test\n  cloche exec -it dev bash",
		Annotations: runs,
		RunE: func(cmd *cobra.Command, args []string) error {
			name, command, err := commandLine(cmd, args)
			if err != nil {
				return err
			}
			if len(command) == 0 {
				return usage("no command was named")
			}
			spec, err := pf.spec(a, command)
			if err != nil {
				return err
			}
			c, id, err := a.dialFor(cmd.Context(), name)
			if err != nil {
				return err
			}
			if detach {
				return a.startOnly(cmd.Context(), c, id, spec)
			}
			signals := catchSignals()
			defer signal.Stop(signals)
			return a.runIn(cmd.Context(), c, id, spec, signals)
		},
	}
	pf.add(cmd, true)
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "start the command, print its session's id and leave it alone")
	return cmd
}

func (a *app) startOnly(ctx context.Context, c *client.Client, sandbox string, spec api.ProcessSpec) error {
	s, err := c.CreateSession(ctx, sandbox, spec)
	if err != nil {
		return err
	}
	info, err := s.Start(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(info)
	}
	_, err = fmt.Fprintln(a.out, s.ID)
	return err
}

func newAttach(a *app) *cobra.Command {
	var offset int64
	var stdin bool
	cmd := &cobra.Command{
		Use:   "attach [flags] SANDBOX [SESSION]",
		Short: "Attach to a command that runs in a sandbox",
		Long: `Show a session's output from its beginning (or an offset) and, while it runs, pass Ctrl-C and with -i standard
input on to it. Without a session it is the newest one. The exit code is the command's.`,
		Args:        between(1, 2),
		Annotations: runs,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			c, id, err := a.dialFor(ctx, args[0])
			if err != nil {
				return err
			}
			info, err := a.session(ctx, c, id, args[1:])
			if err != nil {
				return err
			}
			if stdin && !info.Stdin {
				return &usageError{text: "the command was started without standard input", hint: "`cloche exec -i` gives it one"}
			}
			return a.attach(ctx, attachment{session: c.Session(id, info.Id), start: true, stdin: stdin, tty: info.Tty != nil, offset: offset})
		},
	}
	cmd.Flags().Int64Var(&offset, "since-offset", 0, "leave out so many bytes of output")
	cmd.Flags().BoolVarP(&stdin, "stdin", "i", false, "pass standard input on, where the command has one and nobody else has written to it")
	return cmd
}

// session finds the session that an argument means: an id, the beginning of
// one, or without an argument the newest.
func (a *app) session(ctx context.Context, c *client.Client, sandbox string, args []string) (api.Session, error) {
	all, err := c.Sessions(ctx, sandbox)
	if err != nil {
		return api.Session{}, err
	}
	var found []api.Session
	for _, s := range all {
		if len(args) == 0 || strings.HasPrefix(s.Id, args[0]) {
			found = append(found, s)
		}
	}
	switch {
	case len(found) == 0:
		return api.Session{}, &client.Error{Class: api.ClassNotFound, Code: "session_not_found", Message: "there is no such session", Hint: "`cloche inspect " + sandbox + "` lists them"}
	case len(args) > 0 && len(found) > 1:
		return api.Session{}, &client.Error{Class: api.ClassConflict, Code: "ambiguous", Message: fmt.Sprintf("%q means %d sessions", args[0], len(found))}
	}
	return found[0], nil
}

// windowSize is the size of the first file that is a terminal.
func windowSize(files ...*os.File) api.WindowSize {
	for _, f := range files {
		if cols, rows, err := term.GetSize(int(f.Fd())); err == nil && cols > 0 && rows > 0 {
			return api.WindowSize{Rows: min(rows, 10_000), Cols: min(cols, 10_000)}
		}
	}
	return api.WindowSize{Rows: 24, Cols: 80}
}
