package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// app is what every command shares: where it reads and writes, and the global
// flags.
type app struct {
	in, out, err *os.File

	url, key, stateDir string
	json, quiet        bool
}

// client makes the client of the daemon that the flags and the environment
// name.
func (a *app) client() (*client.Client, error) { return a.dial(3 * time.Second) }

func (a *app) dial(retry time.Duration) (*client.Client, error) {
	key := a.key
	if key == "" {
		key = os.Getenv(client.EnvKey)
	}
	if key == "" {
		// On the daemon's host its own key is at hand, for who may read it.
		if b, err := os.ReadFile(filepath.Join(a.stateDir, "admin.key")); err == nil {
			key = strings.TrimSpace(string(b))
		}
	}
	c, err := client.New(client.Options{URL: a.url, Key: key, UserAgent: "cloche-cli/" + version, Retry: retry})
	if err != nil {
		return nil, &usageError{text: err.Error()}
	}
	return c, nil
}

// printJSON prints one document.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.out)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// note says something to a person; not with --quiet or --json.
func (a *app) note(format string, args ...any) {
	if !a.quiet && !a.json {
		fmt.Fprintf(a.err, format+"\n", args...)
	}
}

// table prints rows below a head.
func (a *app) table(head []string, rows [][]string) error {
	w := tabwriter.NewWriter(a.out, 0, 0, 3, ' ', 0)
	for _, r := range append([][]string{head}, rows...) {
		for i := range r {
			r[i] = line(r[i])
		}
		if _, err := fmt.Fprintln(w, strings.Join(r, "\t")); err != nil {
			return err
		}
	}
	return w.Flush()
}

// age says how long ago something was.
func age(at time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return span(time.Since(at))
}

// span says a duration in its largest one or two units.
func span(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%02dh", int(d.Hours())/24, int(d.Hours())%24)
}

// amount says a number of bytes.
func amount(n int64) string {
	const units = "KMGTP"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[i])
}

// mebibytes reads an amount like "512", "512M", "1.5GiB"; a bare number is MiB.
func mebibytes(s string) (int, error) {
	number := strings.TrimRight(strings.ToLower(s), "ibkmgt")
	unit := strings.TrimSuffix(strings.TrimSuffix(strings.ToLower(s)[len(number):], "b"), "i")
	factor, ok := map[string]float64{"": 1, "m": 1, "g": 1 << 10, "t": 1 << 20, "k": 1. / 1024}[unit]
	v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if err != nil || !ok || v <= 0 || v*factor > 1<<30 {
		return 0, usage("%q is no amount like 512MiB or 2GiB", s)
	}
	return max(1, int(v*factor)), nil
}

// pairs reads NAME=VALUE arguments; a bare NAME takes its value from the
// environment where fromEnv.
func pairs(args []string, what string, fromEnv bool) (map[string]string, error) {
	m := map[string]string{}
	for _, s := range args {
		k, v, ok := strings.Cut(s, "=")
		if !ok && fromEnv {
			if v, ok = os.LookupEnv(k); !ok {
				continue
			}
		}
		if k == "" || !ok {
			return nil, usage("%s must be like NAME=VALUE, not %q", what, s)
		}
		m[k] = v
	}
	return m, nil
}

const idLength = len("sbx_") + 20

// nameLabel is the label that --name sets and by which sandboxes can be named.
const nameLabel = "name"

// sandbox finds the sandbox that an argument means: an id, the beginning of
// one, or the value of the label "name".
func (a *app) sandbox(ctx context.Context, c *client.Client, arg string) (string, error) {
	if strings.HasPrefix(arg, "sbx_") && len(arg) == idLength {
		return arg, nil
	}
	if arg == "" {
		return "", usage("a sandbox's name can't be empty")
	}
	var f client.SandboxFilter
	prefix := strings.HasPrefix(arg, "sbx_")
	if !prefix {
		f.Labels = map[string]string{nameLabel: arg}
	}
	all, err := c.Sandboxes(ctx, f)
	if err != nil {
		return "", err
	}
	var found []string
	for _, s := range all {
		if s.State != api.SandboxDeleted && (!prefix || strings.HasPrefix(s.Id, arg)) {
			found = append(found, s.Id)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return "", &client.Error{Class: api.ClassNotFound, Code: "sandbox_not_found", Message: fmt.Sprintf("there is no sandbox %q", arg), Hint: "`cloche ls` lists them"}
	}
	return "", &client.Error{
		Class: api.ClassConflict, Code: "ambiguous", Message: fmt.Sprintf("%q means %d sandboxes", arg, len(found)),
		Hint: "say one of: " + strings.Join(found[:min(len(found), 5)], ", "),
	}
}

// dialFor makes a client and finds a sandbox.
func (a *app) dialFor(ctx context.Context, arg string) (*client.Client, string, error) {
	c, err := a.client()
	if err != nil {
		return nil, "", err
	}
	id, err := a.sandbox(ctx, c, arg)
	return c, id, err
}

// each does something for every argument and tells every failure, so that one
// that fails does not keep the others from being done.
func (a *app) each(args []string, do func(string) error) error {
	var first error
	for _, arg := range args {
		err := do(arg)
		switch {
		case err == nil:
		case errors.Is(err, context.Canceled):
			return err
		case first == nil:
			first = fmt.Errorf("%s: %w", arg, err)
		default:
			message, _ := explain(nil, err)
			fmt.Fprintf(a.err, "cloche: %s: %s\n", arg, message)
		}
	}
	return first
}

// printLine prints one object of a stream.
func (a *app) printLine(v any) error { return json.NewEncoder(a.out).Encode(v) }
