package bench

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/node/cgroup"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/node/guestlink"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
)

// What every machine of the benchmarks may use, ours and the floor's.
const (
	milliCPU  = 2000
	memoryMiB = 512
	diskMiB   = 1024
	maxProcs  = 1024
	mib       = 1 << 20
)

// bare is an engine's control process without anything of Cloche above it.
type bare struct {
	t                         *testing.T
	dir, image, engine, guest string
	http                      *http.Client
	nets                      *netns.Manager
	tree                      *cgroup.Tree
	slots                     chan struct{} // creations at once, as many as the node allows
}

// newBare starts the engine that a daemon has unpacked in state.
func newBare(t *testing.T, state, image string) *bare {
	t.Helper()
	dir, err := os.MkdirTemp("", "clb") // short: sockets lie below it
	if err != nil {
		t.Fatal(err)
	}
	b := &bare{
		t: t, dir: dir, image: image, engine: artifact(t, state, "cloche-gvisor"), guest: artifact(t, state, "cloche-guest"),
		nets: netns.New(netns.Options{Dir: filepath.Join(dir, "n")}), slots: make(chan struct{}, 2*runtime.NumCPU()),
	}
	if b.tree, err = cgroup.Host(); err != nil {
		t.Fatal(err)
	}
	b.http = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, "e", enginerpc.SocketName))
	}}}
	if out, err := exec.Command(b.engine, "start", filepath.Join(dir, "e")).CombinedOutput(); err != nil {
		t.Fatalf("start the engine: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if err := b.call(context.Background(), http.MethodPost, "/v1/quit", nil); err != nil {
			t.Error(err)
		}
		if err := b.tree.Group(b.group("")).Remove(context.Background()); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return b
}

func artifact(t *testing.T, state, name string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(state, "artifacts", "*", name))
	if err != nil || len(found) != 1 {
		t.Fatalf("the daemon's %s: %v, %v", name, found, err)
	}
	return found[0]
}

func (b *bare) call(ctx context.Context, method, path string, in any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://engine"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := b.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("the engine answers %s: %s", resp.Status, answer)
	}
	return err
}

func (b *bare) group(id string) string { return filepath.Join("/bench-"+filepath.Base(b.dir), id) }

// box is a bare machine, and the connection to its guest if it has one.
type box struct {
	b    *bare
	id   string
	dir  string
	key  []byte
	link *guestlink.Link
	rpc  guestv1connect.GuestClient
	gone bool // it was discarded
}

func request[T any](m *T) *connect.Request[T] { return connect.NewRequest(m) }

// request is what the driver asks of the engine.
func (b *bare) request(x *box, ns string, args []string, binds []enginerpc.Bind) enginerpc.CreateRequest {
	memory := int64(memoryMiB) * mib
	return enginerpc.CreateRequest{
		ID: x.id, Dir: filepath.Join(x.dir, "m"), Image: b.image, NetNS: ns, Hostname: "bare", Cgroup: b.group(x.id), Args: args,
		Env: []string{
			"CLOCHE_DIAL=unix:/.cloche/host/agent.sock", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		},
		Binds: append([]enginerpc.Bind{
			{Source: b.guest, Target: "/.cloche/guest"}, {Source: filepath.Join(x.dir, "host"), Target: "/.cloche/host"},
		}, binds...),
		Tmpfs: []enginerpc.Tmpfs{
			{Target: "/dev/shm", Bytes: memory / 2, Mode: "1777"}, {Target: "/run", Bytes: memory / 8, Mode: "755"},
		},
		MemoryBytes: memory, OverheadBytes: 64*mib + memory/8, DiskBytes: int64(diskMiB) * mib,
		MilliCPU: milliCPU, MaxProcs: maxProcs, MaxTasks: 8*maxProcs + 2048,
	}
}

// create makes a machine whose PID 1 is the guest, and waits for its agent.
func (b *bare) create(ctx context.Context, binds ...enginerpc.Bind) (*box, error) {
	b.slots <- struct{}{}
	defer func() { <-b.slots }()
	x, ns, err := b.prepare(ctx)
	if err != nil {
		return x, err
	}
	l, err := net.Listen("unix", filepath.Join(x.dir, "host", "agent.sock"))
	if err != nil {
		return x, err
	}
	x.key = make([]byte, 32)
	_, _ = rand.Read(x.key)
	x.link = guestlink.Start(guestlink.Config{
		Listen: func() (net.Listener, error) { return l, nil }, Key: x.key, Epoch: 1,
		Setup: &guestv1.SetupRequest{Hostname: "bare", MaxProcsPerUser: maxProcs}, Log: slog.New(slog.DiscardHandler),
	})
	if err := b.call(ctx, http.MethodPut, "/v1/machines/"+x.id, b.request(x, ns, []string{"/.cloche/guest", "supervisor"}, binds)); err != nil {
		return x, err
	}
	x.rpc, err = x.link.Client(ctx)
	return x, err
}

// createIdle makes a machine whose PID 1 only sleeps.
func (b *bare) createIdle(ctx context.Context) (*box, error) {
	x, ns, err := b.prepare(ctx)
	if err != nil {
		return x, err
	}
	return x, b.call(ctx, http.MethodPut, "/v1/machines/"+x.id, b.request(x, ns, []string{"/bin/work", "sleep"}, nil))
}

func (b *bare) prepare(ctx context.Context) (*box, string, error) {
	id := sandbox.NewID(sandbox.KindSandbox)
	x := &box{b: b, id: id, dir: filepath.Join(b.dir, id[len(id)-8:])}
	ns, err := b.nets.Create(ctx, id)
	for _, d := range []string{x.dir, filepath.Join(x.dir, "host"), filepath.Join(x.dir, "m"), filepath.Join(x.dir, "m", enginerpc.OverlayName)} {
		if err == nil {
			err = os.Mkdir(d, 0o700)
		}
	}
	return x, ns, err
}

func (x *box) discard() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if x.link != nil {
		x.link.Close()
	}
	for _, err := range []error{
		x.b.call(ctx, http.MethodDelete, "/v1/machines/"+x.id, nil), x.b.nets.Delete(ctx, x.id), os.RemoveAll(x.dir),
	} {
		if err != nil {
			x.b.t.Error(err)
		}
	}
}

// outcome is what came of a command.
type outcome struct {
	stdout int64
	stderr []byte
	code   int32
}

// run runs a command over the guest's connection, acknowledging its output as
// the recorder does, and throws the output away.
func (x *box) run(ctx context.Context, args ...string) (outcome, error) {
	var out outcome
	session := sandbox.NewID(sandbox.KindSession)
	if _, err := x.rpc.Start(ctx, connect.NewRequest(&guestv1.StartRequest{Session: session, Args: args, User: "root"})); err != nil {
		return out, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := x.rpc.Follow(ctx, connect.NewRequest(&guestv1.FollowRequest{Session: session}))
	if err != nil {
		return out, err
	}
	defer stream.Close()
	acks := make(chan uint64, 1)
	defer close(acks)
	go x.acknowledge(ctx, session, acks)
	for stream.Receive() {
		ev := stream.Msg()
		end := ev.GetOffset() + uint64(len(ev.GetStdout())+len(ev.GetStderr()))
		out.stdout += int64(len(ev.GetStdout()))
		out.stderr = append(out.stderr, ev.GetStderr()...)
		if exit := ev.GetExit(); exit != nil {
			out.code = exit.GetCode()
			_, err := x.rpc.Ack(ctx, connect.NewRequest(&guestv1.AckRequest{Session: session, Offset: end, Exit: true}))
			return out, err
		}
		select {
		case <-acks: // an older one that was not taken yet
		default:
		}
		acks <- end
	}
	return out, stream.Err()
}

func (x *box) acknowledge(ctx context.Context, session string, acks <-chan uint64) {
	var acked uint64
	for end := range acks {
		if end-acked < 128<<10 {
			continue
		}
		if _, err := x.rpc.Ack(ctx, connect.NewRequest(&guestv1.AckRequest{Session: session, Offset: end})); err != nil {
			return // the stream ends, too
		}
		acked = end
	}
}
