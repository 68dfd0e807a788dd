package bench

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// row is one line of the table that is printed at the end.
type row struct {
	name, unit        string
	ours, floor, goal float64 // goal bounds the ratio; 0 is none
	ratio             float64
	n                 int
	beside, load      string
	missed            bool
}

var rows []row

// pairs are interleaved measurements: floor and ours in turn, the first of a
// pair alternating.
type pairs struct{ ours, floor []float64 }

func measure(n int, ours, floor func() float64) pairs {
	var p pairs
	for i := range n {
		if i%2 == 0 {
			p.floor = append(p.floor, floor())
			p.ours = append(p.ours, ours())
		} else {
			p.ours = append(p.ours, ours())
			p.floor = append(p.floor, floor())
		}
	}
	return p
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// report records a row. The ratio is the median of the pairs' ratios.
func report(t *testing.T, name, unit, beside string, goal float64, p pairs) {
	t.Helper()
	var ratios []float64
	for i := range p.ours {
		ratios = append(ratios, p.ours[i]/p.floor[i])
	}
	r := row{
		name: name, unit: unit, beside: beside, goal: goal, n: len(p.ours),
		ours: median(p.ours), floor: median(p.floor), ratio: median(ratios), load: loadavg(),
	}
	r.missed = goal > 0 && r.ratio > goal
	rows = append(rows, r)
	t.Logf("%s: %.2f %s, beside %s: %.2f; ratio %.2f; pairs (ours/floor) %s; load %s",
		name, r.ours, unit, beside, r.floor, r.ratio, p, r.load)
	if r.missed {
		t.Errorf("%s: ratio %.2f, and the goal is %.2f", name, r.ratio, goal)
	}
}

// String lists the pairs.
func (p pairs) String() string {
	var b strings.Builder
	for i := range p.ours {
		fmt.Fprintf(&b, " %.2f/%.2f", p.ours[i], p.floor[i])
	}
	return strings.TrimSpace(b.String())
}

func (r row) String() string {
	goal, verdict := "–", "–"
	if r.goal > 0 {
		goal, verdict = fmt.Sprintf("≤ %.1f ×", r.goal), "met"
		if r.missed {
			verdict = "missed"
		}
	}
	return fmt.Sprintf("| %s | %.2f %s | %.2f %s | %.2f × | %s | %s | %d | %s |",
		r.name, r.ours, r.unit, r.floor, r.beside, r.ratio, goal, verdict, r.n, r.load)
}

func printRows() {
	fmt.Print("\n| what | Cloche | floor | ratio | goal | verdict | n | load |\n|---|---|---|---|---|---|---|---|\n")
	for _, r := range rows {
		fmt.Println(r)
	}
	fmt.Println()
}

// loadavg is the host's load over the last minute and five minutes.
func loadavg() string {
	b, err := os.ReadFile("/proc/loadavg")
	f := strings.Fields(string(b))
	if err != nil || len(f) < 2 {
		return "unknown"
	}
	return f[0] + " " + f[1]
}
