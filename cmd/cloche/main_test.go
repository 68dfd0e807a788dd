package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// asProgram makes the test's binary be the program.
const asProgram = "CLOCHE_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	testscript.Main(m, map[string]func(){"cloche": main})
}

// The scripts drive the program against a fake daemon (fake_test.go).
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			f := newFake()
			env.Defer(f.close)
			env.Setenv("CLOCHE_URL", f.url())
			env.Setenv("CLOCHE_API_KEY", "clk_test")
			env.Setenv("CLOCHE_STATE_DIR", filepath.Join(env.WorkDir, "state"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"exits": exits},
	})
}

// exits runs the program and checks its exit code: exits CODE ARG…
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE cloche ARG…")
	}
	err := ts.Exec(args[1], args[2:]...)
	code := "0"
	var ended interface{ ExitCode() int }
	if errors.As(err, &ended) {
		code = fmt.Sprint(ended.ExitCode())
	}
	if code != args[0] {
		ts.Fatalf("exit code %s, want %s (%v)", code, args[0], err)
	}
}

func TestExitCodes(t *testing.T) {
	runs := &cobra.Command{Use: "run", Annotations: runs}
	plain := &cobra.Command{Use: "ls"}
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	a := &app{out: null, err: null}
	for class, want := range map[api.ErrorClass]int{
		api.ClassInvalid: 1, api.ClassNotFound: 2, api.ClassConflict: 3, api.ClassFailedPrecondition: 3, api.ClassDenied: 4,
		api.ClassQuota: 4, api.ClassNoCapacity: 5, api.ClassUnavailable: 5, api.ClassInternal: 70, "of a later daemon": 70,
	} {
		err := fmt.Errorf("somewhere: %w", &client.Error{Class: class, Message: "no"})
		if got := a.finish(plain, err); got != want {
			t.Errorf("%s: exit code %d, want %d", class, got, want)
		}
		if got := a.finish(runs, err); got != 125 {
			t.Errorf("%s of run: exit code %d, want 125", class, got)
		}
	}
	if got := a.finish(plain, usage("x")); got != 1 {
		t.Errorf("usage: exit code %d", got)
	}
	if got := a.finish(runs, exitError(7)); got != 7 {
		t.Errorf("a command's own: exit code %d", got)
	}
	if got := a.finish(plain, errors.New("x")); got != 70 {
		t.Errorf("anything else: exit code %d", got)
	}
}

var update = flag.Bool("update", false, "write the golden files")

// The help of every command, so that a change of it is seen in review.
func TestHelp(t *testing.T) {
	t.Setenv("CLOCHE_STATE_DIR", "")
	t.Setenv("CLOCHE_RUN_DIR", "")
	t.Setenv("CLOCHE_LISTEN", "")
	var b strings.Builder
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" || c.Name() == "completion" {
			return
		}
		fmt.Fprintf(&b, "=== %s\n", c.CommandPath())
		c.SetOut(&b)
		if err := c.Help(); err != nil {
			t.Fatal(err)
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(&app{}))
	golden := filepath.Join("testdata", "help.txt")
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("the help has changed; look at it and run `go test ./cmd/cloche -run TestHelp -update`")
	}
}

func TestMebibytes(t *testing.T) {
	for s, want := range map[string]int{"512": 512, "512M": 512, "512MiB": 512, "1.5GiB": 1536, "2g": 2048, "1TB": 1 << 20, "1024k": 1} {
		if got, err := mebibytes(s); err != nil || got != want {
			t.Errorf("mebibytes(%q) = %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "x", "-1", "1X", "M", "1e99", "1MMB", "1 2"} {
		if got, err := mebibytes(s); err == nil {
			t.Errorf("mebibytes(%q) = %d, want an error", s, got)
		}
	}
}
