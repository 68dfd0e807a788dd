package bench

import (
	"context"
	"fmt"
	"strconv"
	"syscall"
	"testing"
	"time"
)

func TestCPU(t *testing.T) {
	f := newFixture(t)
	self := func() float64 {
		var r syscall.Rusage
		syscall.Getrusage(0, &r)
		return float64(r.Utime.Nano()+r.Stime.Nano()) / 1e9
	}
	xs := f.bares(t, 1, func(ctx context.Context) (*box, error) { return f.b.create(ctx) })
	x := xs[0]
	for _, n := range []int{200_000_000} {
		for range 4 {
			u0, _ := f.b.tree.Group(f.b.group(x.id)).Usage()
			s0, start := self(), time.Now()
			out := x.must(t, "/bin/work", "spew", strconv.Itoa(n))
			u1, _ := f.b.tree.Group(f.b.group(x.id)).Usage()
			fmt.Printf("bare spew %d: wall %.2f s inside %.2f s, machine cpu %.2f s, host reader cpu %.2f s load %s\n", n, time.Since(start).Seconds(), inside(t, out.stderr)/1e3, (u1.CPU - u0.CPU).Seconds(), self()-s0, loadavg())
		}
	}
}
