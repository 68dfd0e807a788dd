// Package soak lives sandboxes' whole lives for hours and looks for what a
// daemon does not give back: descriptors, goroutines, mounts, namespaces,
// cgroups, files, memory. It is not part of CI; `make soak` runs it.
//
// SOAK_CYCLES is how many lives (2000), SOAK_WORKERS how many at once (4).
package soak

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

// maxSlope is what a cycle may add to the daemon's resident memory, in bytes.
const maxSlope = 1024

func number(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return otherwise
}

// soak is one run.
type soak struct {
	t       *testing.T
	d       *harness.Daemon
	c       *client.Client
	metrics string
	done    atomic.Int64
}

func TestSoak(t *testing.T) {
	harness.Bin(t)
	cycles, workers := number("SOAK_CYCLES", 2000), number("SOAK_WORKERS", 4)
	d := harness.New(t)
	d.Seed()
	s := &soak{t: t, d: d, metrics: freeAddress(t)}
	d.Flags = []string{"--metrics", s.metrics}
	// What garbage happens to lie in the heap when memory is looked at is as much
	// as what lives there, and hides a slope of this size. A leak it can't hide.
	d.Extra = append(d.Extra, "GOGC=20")
	d.Serve()
	var err error
	if s.c, err = client.New(client.Options{URL: d.URL, Key: d.Key}); err != nil {
		t.Fatal(err)
	}
	warm := cycles / 4
	s.run(warm, workers)
	before := s.settled()
	var points []point
	for range 15 {
		s.run((cycles-warm)/15, workers)
		now := s.settled()
		points = append(points, point{float64(s.done.Load()), float64(now.rss)})
		t.Logf("after %d cycles: %s", s.done.Load(), now)
	}
	after := s.settled()
	for end := time.Now().Add(time.Minute); after.exceed(before.counts) && time.Now().Before(end); after = s.look() {
		time.Sleep(time.Second) // a connection that is kept for the next call, or a second look at a metric
	}
	t.Logf("before: %s\nafter:  %s", before, after)
	if after.exceed(before.counts) {
		t.Errorf("counts have grown: %+v before, %+v after", before.counts, after.counts)
	}
	if b := slope(points); b > maxSlope {
		t.Errorf("resident memory grows by %.0f bytes a cycle, and may by %d", b, maxSlope)
	} else {
		t.Logf("resident memory: %.0f bytes a cycle over the last %d", b, cycles-warm)
	}
}

func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// run lives n lives.
func (s *soak) run(n, workers int) {
	s.t.Helper()
	var wg sync.WaitGroup
	left := atomic.Int64{}
	left.Store(int64(n))
	for range workers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := s.life(); err != nil {
					s.t.Errorf("cycle %d: %v", s.done.Load(), err)
					return
				}
				s.done.Add(1)
			}
		})
	}
	wg.Wait()
	if s.t.Failed() {
		s.t.FailNow()
	}
}

// life creates a sandbox, runs a command, suspends it, restores it, runs
// another, and deletes it.
func (s *soak) life() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	sb, err := s.c.CreateAndWait(ctx, api.CreateSandboxRequest{Template: "base", Resources: api.ResourcesRequest{MemoryMib: 128, DiskMib: 128}}, nil)
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	if err := s.exec(ctx, sb.Id, "echo kept > /tmp/file"); err != nil {
		return err
	}
	for _, verb := range []func(context.Context, string) (api.AcceptedSandbox, error){s.c.Suspend, s.c.Restore} {
		a, err := verb(ctx, sb.Id)
		if err == nil {
			_, err = s.c.Wait(ctx, a.Operation.Id, nil)
		}
		if err != nil {
			return fmt.Errorf("suspend or restore %s: %w", sb.Id, err)
		}
	}
	if err := s.exec(ctx, sb.Id, "grep -q kept /tmp/file"); err != nil {
		return err
	}
	op, err := s.c.DeleteSandbox(ctx, sb.Id)
	if err == nil {
		_, err = s.c.Wait(ctx, op.Id, nil)
	}
	return err
}

func (s *soak) exec(ctx context.Context, id, script string) error {
	r, err := s.c.Exec(ctx, id, api.ExecRequest{Args: []string{"sh", "-c", script}})
	if err != nil {
		return fmt.Errorf("%s: %w", script, err)
	}
	if r.Exit == nil || r.Exit.Code != 0 {
		return fmt.Errorf("%s: %+v", script, r)
	}
	return nil
}

// counts are what must not grow at all. Of descriptors those of the store's pool
// are left out, which has a bound of its own.
type counts struct{ fds, goroutines, mounts, namespaces, cgroups, files int }

// exceed tells whether anything of c is more than it was.
func (c counts) exceed(was counts) bool {
	return c.fds > was.fds || c.goroutines > was.goroutines || c.mounts > was.mounts || c.namespaces > was.namespaces ||
		c.cgroups > was.cgroups || c.files > was.files
}

type state struct {
	counts
	rss int64
}

// String shows all of it.
func (s state) String() string {
	return fmt.Sprintf("%+v, %.1f MiB resident", s.counts, float64(s.rss)/(1<<20))
}

// settled waits until nothing is under way and looks. What takes a moment to go
// (idle connections, the last reaping) is given it.
func (s *soak) settled() state {
	s.t.Helper()
	if left := s.d.WaitCensus(time.Minute); len(left) > 0 {
		s.t.Errorf("left on the host: %s", strings.Join(left, ", "))
	}
	now := s.look()
	for range 30 {
		time.Sleep(time.Second)
		last := now
		if now = s.look(); now.counts == last.counts {
			break
		}
	}
	return now
}

func (s *soak) look() state {
	s.t.Helper()
	http.DefaultClient.CloseIdleConnections()
	pid := strconv.Itoa(s.d.Pid())
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		s.t.Fatal(err)
	}
	netns, _ := os.ReadDir(filepath.Join(s.d.Run, "netns"))
	sum := sha256.Sum256([]byte(s.d.State)) // what the drivers call their group
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/cloche-" + hex.EncodeToString(sum[:4]) + "/sbx_*")
	files := 0
	for _, dir := range []string{"machines", "snapshots", "sessions", "tmp"} {
		found, _ := filepath.Glob(filepath.Join(s.d.State, dir, "*"))
		files += len(found)
	}
	return state{
		counts: counts{
			fds: s.d.Usage().FDs, goroutines: s.goroutines(), mounts: bytes.Count(mounts, []byte(s.d.Run)), namespaces: len(netns),
			cgroups: len(groups), files: files,
		},
		rss: s.rss(pid),
	}
}

func (s *soak) rss(pid string) int64 {
	data, err := os.ReadFile("/proc/" + pid + "/statm")
	if err != nil {
		s.t.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(data))[1], 10, 64)
	if err != nil {
		s.t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

func (s *soak) goroutines() int {
	resp, err := http.Get("http://" + s.metrics + "/metrics")
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	for scan := bufio.NewScanner(resp.Body); scan.Scan(); {
		if n, ok := strings.CutPrefix(scan.Text(), "go_goroutines "); ok {
			v, err := strconv.Atoi(n)
			if err != nil {
				s.t.Fatal(err)
			}
			return v
		}
	}
	s.t.Fatal("the metrics tell no number of goroutines")
	return 0
}

type point struct{ x, y float64 }

// slope is that of the line of least squares through points.
func slope(points []point) float64 {
	var n, sx, sy, sxx, sxy float64
	for _, p := range points {
		n, sx, sy, sxx, sxy = n+1, sx+p.x, sy+p.y, sxx+p.x*p.x, sxy+p.x*p.y
	}
	return (n*sxy - sx*sy) / (n*sxx - sx*sx)
}
