// Command testreport runs `go test -json` and tells what happened in a form
// that people and CI logs can use: the lines of go test that close a package
// ("ok", "FAIL"), failures in full, each skipped test with its reason, and a
// sign of life while a suite is silent. It writes a summary of the suite to a
// file, and can add several of those up.
//
//	testreport -suite unit -out dist/test/unit.json -- go test -json ./...
//	testreport -total dist/test/unit.json dist/test/e2e.json
//
// The second form ends with a table of what was skipped and with the line
// "N passed, N failed, N skipped". Only leaves of the tree of tests are
// counted. With -lines every line of the tests' output is shown as it comes, as
// go test -v does. The command may also send an event with the action "again":
// what its package told so far is void, since a machine under it failed, and
// it is run once more. The Makefile calls it; nothing imports it.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

// quiet is how long a suite may print nothing before a sign of life is shown.
const quiet = 20 * time.Second

func main() {
	suite := flag.String("suite", "tests", "the suite's `name`")
	out := flag.String("out", "", "`file` to write the suite's summary to")
	verbose := flag.Bool("v", false, "also show each test that passed, as it ends")
	lines := flag.Bool("lines", false, "show every line that a test prints, as it is printed")
	total := flag.Bool("total", false, "add up the summaries named as arguments")
	flag.Parse()

	var err error
	if *total {
		err = totals(os.Stdout, flag.Args())
	} else {
		err = run(newReport(os.Stdout, *suite, *verbose, *lines), *out, flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		// A command may tell by its status what kind of failure it was.
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() > 0 {
			os.Exit(exit.ExitCode())
		}
		os.Exit(1)
	}
}

// run runs command, reports what it prints, and fails when the command or any
// test failed.
func run(r *report, out string, command []string) error {
	if len(command) == 0 {
		return errors.New("no command after --")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}

	suite := r.sum.Suite
	r.printf("=== suite %s: %v\n", suite, command)
	began := time.Now()
	watch(stdout, r)
	waitErr := cmd.Wait()
	s := r.finish(time.Since(began), waitErr)
	if out != "" {
		if err := s.write(out); err != nil {
			return err
		}
	}
	if waitErr != nil {
		return fmt.Errorf("suite %s: %w", suite, waitErr)
	}
	if s.Failed > 0 {
		return fmt.Errorf("suite %s: %d failed", suite, s.Failed)
	}
	return nil
}

// watch feeds r the lines of src until its end, and has r show a sign of life
// when nothing was printed for a while.
func watch(src io.Reader, r *report) {
	lines := make(chan []byte)
	go func() {
		defer close(lines)
		in := bufio.NewReader(src)
		for {
			line, err := in.ReadBytes('\n')
			if len(line) > 0 {
				lines <- line
			}
			if err != nil {
				return
			}
		}
	}()
	tick := time.NewTicker(quiet / 4)
	defer tick.Stop()
	for {
		select {
		case line, ok := <-lines:
			if !ok {
				return
			}
			r.line(line)
		case now := <-tick.C:
			r.alive(now)
		}
	}
}
