package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"text/tabwriter"
)

// skip is one skipped test.
type skip struct {
	Package string `json:"package"`
	Test    string `json:"test"`
	Reason  string `json:"reason"`
}

// repeat is a package that was run again, and what had failed under it.
type repeat struct {
	Package string `json:"package"`
	Reason  string `json:"reason"`
}

// summary is what is kept of one suite.
type summary struct {
	Suite    string   `json:"suite"`
	Passed   int      `json:"passed"`
	Failed   int      `json:"failed"`
	Skipped  int      `json:"skipped"`
	Packages int      `json:"packages"`
	Seconds  float64  `json:"seconds"`
	Failures []string `json:"failures,omitempty"`
	Skips    []skip   `json:"skips,omitempty"`
	Repeats  []repeat `json:"repeats,omitempty"`
}

func (s *summary) write(file string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, append(data, '\n'), 0o600)
}

// totals adds up the summaries in files. A file that is missing counts as one
// failure: its suite did not get as far as a summary.
func totals(w io.Writer, files []string) error {
	var all summary
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "\nsuite\tpassed\tfailed\tskipped\tseconds")
	for _, file := range files {
		s, err := read(file)
		if err != nil {
			s = &summary{Suite: filepath.Base(file), Failed: 1, Failures: []string{err.Error()}}
		}
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d\t%.0f\n", s.Suite, s.Passed, s.Failed, s.Skipped, s.Seconds)
		all.Passed += s.Passed
		all.Failed += s.Failed
		all.Skipped += s.Skipped
		all.Failures = append(all.Failures, s.Failures...)
		all.Skips = append(all.Skips, s.Skips...)
		all.Repeats = append(all.Repeats, s.Repeats...)
	}
	if len(all.Skips) > 0 {
		fmt.Fprintln(tw, "\nskipped\tbecause")
		for _, s := range all.Skips {
			fmt.Fprintf(tw, "%s %s\t%s\n", s.Package, s.Test, s.Reason)
		}
	}
	if len(all.Repeats) > 0 {
		fmt.Fprintln(tw, "\nrun again\tbecause")
		for _, r := range all.Repeats {
			fmt.Fprintf(tw, "%s\t%s\n", r.Package, r.Reason)
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for i, f := range all.Failures {
		if i == 0 {
			fmt.Fprintln(w, "\nfailed")
		}
		fmt.Fprintln(w, f)
	}
	fmt.Fprintf(w, "\n%d passed, %d failed, %d skipped\n", all.Passed, all.Failed, all.Skipped)
	if all.Failed > 0 {
		return fmt.Errorf("%d failed", all.Failed)
	}
	return nil
}

func read(file string) (*summary, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var s summary
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return &s, nil
}
