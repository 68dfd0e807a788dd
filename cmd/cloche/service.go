package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// systemUnits is where an administrator's units lie.
const systemUnits = "/etc/systemd/system"

// service is what the commands below share.
type service struct {
	app           *app
	name, unitDir string
}

func newService(a *app) *cobra.Command {
	s := &service{app: a}
	cmd := group("service", "Run the daemon as a service of systemd")
	f := cmd.PersistentFlags()
	f.StringVar(&s.name, "name", "cloche", "the unit's name")
	f.StringVar(&s.unitDir, "unit-dir", systemUnits, "where the unit's file lies; systemd is told nothing about another directory")
	cmd.AddCommand(newServiceInstall(s), newServiceUninstall(s), newServiceStatus(s))
	return cmd
}

func (s *service) path() (string, error) {
	if s.name == "" || len(s.name) > 64 || strings.Trim(s.name, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
		return "", usage("--name must be of small letters, digits, - and _, not %q", s.name)
	}
	return filepath.Abs(filepath.Join(s.unitDir, s.name+".service"))
}

// systemd tells whether systemd reads the unit's directory.
func (s *service) systemd() bool { return filepath.Clean(s.unitDir) == systemUnits }

func needRoot(what string) error {
	if os.Geteuid() == 0 {
		return nil
	}
	return &client.Error{
		Class: api.ClassDenied, Code: "needs_root", Message: "only root may " + what,
		Hint: "run it with sudo; `cloche service install --dry-run` only prints the unit",
	}
}

func newServiceInstall(s *service) *cobra.Command {
	var f serveFlags
	serve := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	f.register(serve)
	var dry, start bool
	drain := drainWithin
	cmd := &cobra.Command{
		Use:   "install [flags]",
		Short: "Write and enable a systemd unit for the daemon",
		Long: `Write a systemd unit that runs this program's daemon with the flags given here, which are those of serve, and enable
it. Running it again writes what has changed, and says what that is. Stopping or restarting the unit ends no sandbox;
when the host goes down, sandboxes are suspended first (see ` + "`cloche drain --help`" + `). The drain speaks to the daemon by
--url, which is made from --listen where it is not given: with TLS give the name that the certificate has.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			u, err := s.unit(&f, serve, drain)
			if err != nil {
				return err
			}
			text, err := u.text(s.name)
			if err != nil {
				return err
			}
			if dry {
				_, err := fmt.Fprint(s.app.out, text)
				return err
			}
			if err := needRoot("install a service"); err != nil {
				return err
			}
			return s.install(cmd.Context(), text, start)
		},
	}
	cmd.Flags().AddFlagSet(serve)
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print the unit and do nothing")
	cmd.Flags().BoolVar(&start, "start", false, "start it too, where it does not run")
	cmd.Flags().DurationVar(&drain, "drain-within", drain, "how long sandboxes may take to be saved when the host goes down")
	return cmd
}

// unit gathers what the unit is made of. The places that the daemon uses stand
// in it even where they are the defaults, since those come from the environment
// that install runs in; of the other flags of serve those that were given.
func (s *service) unit(f *serveFlags, serve *pflag.FlagSet, drain time.Duration) (unit, error) {
	if _, err := s.path(); err != nil {
		return unit{}, err
	}
	if err := f.settle(s.app); err != nil {
		return unit{}, err
	}
	if drain < time.Second {
		return unit{}, usage("--drain-within must be at least a second, not %s", drain)
	}
	u := unit{stateDir: f.StateDir, runDir: f.RunDir, url: s.app.url, drain: drain}
	url, err := daemonURL(f.Listen, f.TLSCert != "")
	if err != nil {
		return u, err
	}
	if u.url == "" {
		u.url = url
	}
	self := executable()
	if self == nil {
		return u, &client.Error{
			Class: api.ClassFailedPrecondition, Code: "no_program", Message: "this program's file is gone, so that a unit can't name it",
			Hint: "run the cloche that is to be the service",
		}
	}
	u.exe = self[0]
	serve.SortFlags = false
	serve.VisitAll(func(flag *pflag.Flag) {
		if places := flag.Name == "listen" || flag.Name == "run-dir"; !places && !flag.Changed {
			return
		}
		values := []string{flag.Value.String()}
		if list, ok := flag.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		for _, v := range values {
			u.serve = append(u.serve, "--"+flag.Name+"="+v)
		}
	})
	for _, word := range append([]string{u.exe, u.stateDir, u.url}, u.serve...) {
		if strings.ContainsFunc(word, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return u, usage("%q can't stand in a unit", word)
		}
	}
	return u, nil
}

func (s *service) install(ctx context.Context, text string, start bool) error {
	path, err := s.path()
	if err != nil {
		return err
	}
	before, err := os.ReadFile(filepath.Clean(path))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	fresh, changed := err != nil, string(before) != text
	switch {
	case fresh:
		s.app.note("wrote %s", path)
	case changed:
		s.app.note("changed %s:\n  %s", path, strings.Join(changes(string(before), text), "\n  "))
	default:
		s.app.note("%s is as it should be", path)
	}
	if changed {
		if err := replaceFile(path, text); err != nil {
			return err
		}
	}
	if !s.systemd() {
		return nil
	}
	steps := [][]string{{"daemon-reload"}, {"--quiet", "enable", s.name + ".service"}}
	if start {
		steps = append(steps, []string{"start", s.name + ".service"})
	}
	for _, args := range steps {
		if err := s.systemctl(ctx, args...); err != nil {
			return err
		}
	}
	switch active, _ := systemctl(ctx, "is-active", s.name+".service"); {
	case active != "active":
		s.app.note("`systemctl start %s` starts it", s.name)
	case changed && !fresh:
		s.app.note("it still runs as before: `systemctl restart %s` changes that, and ends no sandbox", s.name)
	}
	return nil
}

// systemctlLong bounds what waits for the daemon to start or stop.
const systemctlLong = 10 * time.Minute

// systemctl does something and has no answer.
func (s *service) systemctl(ctx context.Context, args ...string) error {
	_, err := systemctlIn(ctx, systemctlLong, args...)
	return err
}

// replaceFile writes a file that others may read, whole or not at all.
func replaceFile(path, text string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name()) // the other error says why
		}
	}()
	_, err = f.WriteString(text)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func newServiceUninstall(s *service) *cobra.Command {
	return &cobra.Command{
		Use:   "uninstall",
		Short: "Stop the service and remove its unit",
		Long: `Stop the daemon, disable the unit and remove its file. Sandboxes are not touched: they live on, without a daemon that
could reach them, until one is started again with the same state directory. The state directory stays.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := s.path()
			if err != nil {
				return err
			}
			if err := needRoot("remove a service"); err != nil {
				return err
			}
			if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
				s.app.note("there is no %s", path)
				return nil
			}
			if s.systemd() {
				if err := s.systemctl(cmd.Context(), "--quiet", "disable", "--now", s.name+".service"); err != nil {
					return err
				}
			}
			if err := os.Remove(path); err != nil {
				return err
			}
			s.app.note("removed %s; the state directory and the sandboxes stay", path)
			if s.systemd() {
				return s.systemctl(cmd.Context(), "daemon-reload")
			}
			return nil
		},
	}
}

// serviceStatus is what `service status` prints.
type serviceStatus struct {
	Unit      string `json:"unit"` // path
	Installed bool   `json:"installed"`
	Enabled   string `json:"enabled,omitempty"` // systemd's words, as the next two
	Active    string `json:"active,omitempty"`
	State     string `json:"state,omitempty"`
	PID       string `json:"pid,omitempty"`
	Restarts  string `json:"restarts,omitempty"`
	Answers   string `json:"answers,omitempty"` // the version of the daemon that --url reaches
}

func newServiceStatus(s *service) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Say whether the service is installed, runs and answers; exit code 3 where it does not run", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := s.path()
			if err != nil {
				return err
			}
			st := serviceStatus{Unit: path}
			if _, err := os.Stat(path); err == nil {
				st.Installed = true
			}
			out, err := systemctl(cmd.Context(), "show", s.name+".service", "--property=UnitFileState,ActiveState,SubState,MainPID,NRestarts")
			if err != nil {
				return err
			}
			for _, l := range strings.Split(out, "\n") {
				key, value, _ := strings.Cut(l, "=")
				if to := map[string]*string{
					"UnitFileState": &st.Enabled, "ActiveState": &st.Active, "SubState": &st.State, "MainPID": &st.PID, "NRestarts": &st.Restarts,
				}[key]; to != nil {
					*to = value
				}
			}
			if v, err := s.app.daemonVersion(cmd.Context()); err == nil {
				st.Answers = v
			}
			if err := s.app.printService(st); err != nil {
				return err
			}
			if st.Active != "active" {
				return exitError(exitConflict)
			}
			return nil
		},
	}
}

func (a *app) printService(st serviceStatus) error {
	if a.json {
		return a.printJSON(st)
	}
	installed := "no unit"
	if st.Installed {
		installed = "installed"
	}
	rows := [][]string{{installed, st.Enabled, st.Active + " (" + st.State + ")", st.PID, st.Restarts, st.Answers}}
	return a.table([]string{"UNIT", "ENABLED", "STATE", "PID", "RESTARTS", "DAEMON"}, rows)
}
