package bench

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/node/guestlink"
)

const (
	lifeRounds = 30
	heldMiB    = 100 // memory that the snapshotted process holds
)

// lifecycle measures the verbs that save and bring back a machine, each beside
// the bare engine doing the same work: for a suspend its checkpoint, the sync
// and the hash; for a restore its restore until the agent has said hello.
func (f *fixture) lifecycle(t *testing.T) {
	id := f.sandboxes(t, 1)[0]
	x := f.bares(t, 1, func(ctx context.Context) (*box, error) { return f.b.create(ctx) })[0]
	f.hold(t, id)
	if _, err := x.start(context.Background(), "/bin/work", "hold", fmt.Sprint(heldMiB)); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second) // both hold their memory by now

	var suspends, restores, forks pairs
	var bareForks []float64
	for range lifeRounds {
		image := x.checkpoint(t, &suspends.floor)
		restored := x.restore(t, image, &restores.floor)
		bareForks = append(bareForks, suspends.floor[len(suspends.floor)-1]+restores.floor[len(restores.floor)-1])
		x.discardNow(t)
		x = restored
		if err := os.RemoveAll(image); err != nil {
			t.Fatal(err)
		}
		suspends.ours = append(suspends.ours, f.timed(t, func(ctx context.Context) (api.AcceptedSandbox, error) { return f.c.Suspend(ctx, id) }))
		restores.ours = append(restores.ours, f.timed(t, func(ctx context.Context) (api.AcceptedSandbox, error) { return f.c.Restore(ctx, id) }))
		forks.ours = append(forks.ours, f.forkOne(t, id))
	}
	forks.floor = bareForks
	x.discardNow(t)
	what := fmt.Sprintf(" (%d MiB held)", heldMiB)
	report(t, "suspend"+what, "ms", "ms, bare checkpoint, sync, hash", 1.2, suspends)
	report(t, "restore"+what, "ms", "ms, bare restore until hello", 1.2, restores)
	report(t, "fork into 1"+what, "ms", "ms, the two together", 1.2, forks)
	for name, v := range map[string][]float64{"suspend": suspends.ours, "restore": restores.ours, "fork": forks.ours} {
		t.Logf("%s: p50 %.0f p95 %.0f p99 %.0f ms over %d", name, percentile(v, 50), percentile(v, 95), percentile(v, 99), len(v))
	}
}

func percentile(v []float64, p int) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[min(len(s)-1, len(s)*p/100)]
}

// hold starts a process in a sandbox that keeps memory, without waiting for it.
func (f *fixture) hold(t *testing.T, id string) {
	t.Helper()
	ses, err := f.c.CreateSession(context.Background(), id, api.ProcessSpec{Args: []string{"/bin/work", "hold", fmt.Sprint(heldMiB)}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ses.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// timed asks for a verb and waits for its operation, in milliseconds.
func (f *fixture) timed(t *testing.T, ask func(context.Context) (api.AcceptedSandbox, error)) float64 {
	t.Helper()
	began := time.Now()
	a, err := ask(context.Background())
	if err == nil {
		_, err = f.c.Wait(context.Background(), a.Operation.Id, nil)
	}
	took := ms(began)
	if err != nil {
		t.Fatal(err)
	}
	return took
}

// forkOne forks into one child, waits until that runs, and deletes it.
func (f *fixture) forkOne(t *testing.T, id string) float64 {
	t.Helper()
	began := time.Now()
	r, err := f.c.Fork(context.Background(), id, api.ForkRequest{Count: 1})
	if err == nil {
		_, err = f.c.Wait(context.Background(), r.Children[0].Operation.Id, nil)
	}
	took := ms(began)
	if err != nil {
		t.Fatal(err)
	}
	f.remove(t, []string{r.Children[0].Sandbox.Id})
	return took
}

// pausing measures pause and resume together. Beside the engine's own they may
// take one commit of the store and 5 ms each.
func (f *fixture) pausing(t *testing.T) {
	id := f.sandboxes(t, 1)[0]
	x := f.bares(t, 1, func(ctx context.Context) (*box, error) { return f.b.create(ctx) })[0]
	defer x.discardNow(t)
	commit := f.commit(t)
	p := measure(lifeRounds,
		func() float64 {
			return f.timed(t, func(ctx context.Context) (api.AcceptedSandbox, error) { return f.c.Pause(ctx, id) }) +
				f.timed(t, func(ctx context.Context) (api.AcceptedSandbox, error) { return f.c.Resume(ctx, id) })
		},
		func() float64 {
			began := time.Now()
			for _, verb := range []string{"pause", "resume"} {
				if err := f.b.call(context.Background(), http.MethodPost, "/v1/"+verb+"/"+x.id, nil); err != nil {
					t.Fatal(err)
				}
			}
			return ms(began) + 2*(commit()+5)
		})
	report(t, "pause and resume", "ms", "ms, bare, and for each one commit and 5 ms", 1.0, p)
}

// commit returns a measure of what the smallest commit of a store costs here: a
// write of a page and its sync.
func (f *fixture) commit(t *testing.T) func() float64 {
	file, err := os.CreateTemp(f.d.State, "commit-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close(); _ = os.Remove(file.Name()) })
	page := make([]byte, 4096)
	return func() float64 {
		began := time.Now()
		if _, err := file.Write(page); err != nil {
			t.Fatal(err)
		}
		if err := file.Sync(); err != nil {
			t.Fatal(err)
		}
		return ms(began)
	}
}

// start starts a command in a bare machine and leaves it alone.
func (x *box) start(ctx context.Context, args ...string) (string, error) {
	session := "ses_bench"
	_, err := x.rpc.Start(ctx, request(&guestv1.StartRequest{Session: session, Args: args, User: "root"}))
	return session, err
}

// checkpoint saves a bare machine, syncs and hashes its files at once, and
// returns the directory; the machine goes on.
func (x *box) checkpoint(t *testing.T, took *[]float64) string {
	t.Helper()
	dir, err := os.MkdirTemp(x.b.dir, "image")
	if err != nil {
		t.Fatal(err)
	}
	x.link.Close()
	began := time.Now()
	err = x.b.call(context.Background(), http.MethodPost, "/v1/snapshot/"+x.id, enginerpc.SnapshotRequest{Dir: dir, Kind: enginerpc.Memory})
	if err == nil {
		err = syncAndHash(dir)
	}
	*took = append(*took, ms(began))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func syncAndHash(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	errs := make(chan error, 2*len(files))
	for _, sync := range []bool{true, false} {
		wg.Go(func() {
			for _, name := range files {
				errs <- oneFile(name, sync)
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func oneFile(name string, sync bool) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if sync {
		return f.Sync()
	}
	_, err = io.Copy(sha256.New(), f)
	return err
}

// restore makes a bare machine from an image and waits for its agent.
func (x *box) restore(t *testing.T, image string, took *[]float64) *box {
	t.Helper()
	began := time.Now()
	y, ns, err := x.b.prepare(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(y.dir, "host", "agent.sock"))
	if err != nil {
		t.Fatal(err)
	}
	y.key = x.key
	y.link = guestlink.Start(guestlink.Config{
		Listen: func() (net.Listener, error) { return l, nil }, Key: y.key, Welcomed: true, Epoch: 2,
		Setup: &guestv1.SetupRequest{Hostname: "bare", MaxProcsPerUser: maxProcs},
	})
	req := x.b.request(y, ns, []string{"/.cloche/guest", "supervisor"}, nil)
	req.Restore, req.RestoreKind = image, enginerpc.Memory
	if err = x.b.call(context.Background(), http.MethodPut, "/v1/machines/"+y.id, req); err == nil {
		y.rpc, err = y.link.Client(context.Background())
	}
	*took = append(*took, ms(began))
	if err != nil {
		t.Fatal(err)
	}
	return y
}

// discardNow removes a bare machine before the test's end.
func (x *box) discardNow(t *testing.T) {
	t.Helper()
	if !x.gone {
		x.gone = true
		x.discard()
	}
}
