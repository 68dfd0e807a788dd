package chaos

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// report is what a run has counted, and what it found wrong.
type report struct {
	t     *testing.T
	begin time.Time

	mu     sync.Mutex
	counts map[string]map[string]int
	wrongs []string
}

func newReport(t *testing.T) *report {
	return &report{t: t, begin: time.Now(), counts: map[string]map[string]int{}}
}

// count adds one to a line of a table.
func (r *report) count(table, what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.counts[table] == nil {
		r.counts[table] = map[string]int{}
	}
	r.counts[table][what]++
}

// wrong notes something that the model does not allow.
func (r *report) wrong(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := fmt.Sprintf("[%6.1f s] ", time.Since(r.begin).Seconds()) + fmt.Sprintf(format, args...)
	r.wrongs = append(r.wrongs, text)
	r.t.Error(text)
}

func (r *report) bad() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.wrongs)
}

// show prints the tables.
func (r *report) show() {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, table := range slices.Sorted(maps.Keys(r.counts)) {
		n := 0
		for _, v := range r.counts[table] {
			n += v
		}
		fmt.Fprintf(&b, "\n%s: %d\n", table, n)
		for _, what := range slices.Sorted(maps.Keys(r.counts[table])) {
			fmt.Fprintf(&b, "  %6d  %s\n", r.counts[table][what], what)
		}
	}
	fmt.Fprintf(&b, "\nwrong: %d, in %.0f s\n", len(r.wrongs), time.Since(r.begin).Seconds())
	for _, w := range r.wrongs {
		fmt.Fprintf(&b, "  %s\n", w)
	}
	r.t.Log(b.String())
}
