package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

// newer builds another cloche of this tree: its engine has another patch level
// and its guest agent another hash. An overlay of the build puts them in the place
// of what the tree embeds, which stays as it is.
func newer(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	build := func(name, pkg string, flags ...string) string {
		out := filepath.Join(dir, name)
		args := append([]string{"build", "-trimpath", "-buildvcs=false", "-o", out}, flags...)
		cmd := exec.Command("go", append(args, pkg)...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOTOOLCHAIN=local")
		if msg, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", pkg, err, msg)
		}
		return out
	}
	embedded := filepath.Join(root, "internal/node/artifact/embedded")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{
		filepath.Join(embedded, "cloche-gvisor"): build("engine", "./cmd/cloche-gvisor", "-ldflags", "-s -w -X cloche.dev/cloche/internal/engine.patchLevel=upgraded"),
		filepath.Join(embedded, "cloche-guest"):  build("guest", "./cmd/cloche-guest", "-ldflags", "-s"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	overlay := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlay, replace, 0o600); err != nil {
		t.Fatal(err)
	}
	return build("cloche", "./cmd/cloche", "-overlay", overlay, "-ldflags", "-s -w -X main.version=upgraded")
}

// TestUpgrade swaps the daemon under 50 streams for a build with another engine
// and another agent: no byte is lost; afterwards the old machine is paused,
// snapshotted and runs commands, and an old snapshot is restored.
func TestUpgrade(t *testing.T) {
	const streams, total = 50, 400_000
	begin := time.Now()
	bin := newer(t)
	t.Logf("another build took %.1f s", time.Since(begin).Seconds())
	d := harness.Start(t)
	c := newClient(t, d, d.Key)
	b := newBox(t, d, map[string]any{"resources": map[string]int{"memory_mib": 3072, "disk_mib": 512}})
	other := newBox(t, d, nil)
	other.hold(10<<20, "/etc/ssl")
	hash := other.script(askHolder)
	snap := other.snapshot("old", "memory")
	other.verb("suspend")

	sessions := make([]*client.Session, streams)
	for i := range sessions {
		s, err := c.CreateSession(t.Context(), b.id, api.ProcessSpec{User: "root", Args: []string{
			"python3", "-c", generator, strconv.Itoa(i), strconv.Itoa(total), "20e3", fmt.Sprintf("/srv/sum-%d", i),
		}})
		if err != nil {
			t.Fatal(err)
		}
		sessions[i] = s
	}
	got := make([]string, streams)
	flowing := make([]chan struct{}, streams)
	var all sync.WaitGroup
	for i, s := range sessions {
		flowing[i] = make(chan struct{})
		all.Go(func() { got[i] = attachedDigest(t, s, flowing[i]) })
	}
	for i := range flowing {
		select {
		case <-flowing[i]:
		case <-time.After(60 * time.Second):
			t.Fatalf("stream %d does not flow", i)
		}
	}
	old := d.ControlProcesses()
	d.Bin = bin
	begin = time.Now()
	d.Stop()
	d.Serve()
	swap := time.Since(begin)
	var v api.Version
	b.want(200, &v, "GET", "/v1/version", nil)
	if v.Version != "upgraded" {
		t.Fatalf("the daemon is %+v", v)
	}
	all.Wait()
	for i := range sessions {
		if want := b.script(fmt.Sprintf("cat /srv/sum-%d", i)); got[i] != want {
			t.Errorf("stream %d showed %s, the guest printed %s", i, got[i], want)
		}
	}
	t.Logf("%d streams over a swap of %v, %.1f MB together (load %s)", streams, swap.Round(time.Millisecond), streams*total/1e6, load())

	// The old machine under the new daemon.
	b.verb("pause")
	b.verb("resume")
	fresh := newBox(t, d, nil)
	mine, its := b.snapshot("of-the-old", "memory"), fresh.snapshot("of-the-new", "memory")
	tree := b.snapshots()
	oldNeeds, newNeeds := tree[mine].Needs, fresh.snapshots()[its].Needs
	if oldNeeds == nil || newNeeds == nil || oldNeeds.EngineHash == newNeeds.EngineHash || oldNeeds.Engine == newNeeds.Engine || oldNeeds.Guest == newNeeds.Guest ||
		!strings.Contains(newNeeds.Engine, "+cloche.upgraded") {
		t.Errorf("an old machine's snapshot needs %+v, a new one's %+v", oldNeeds, newNeeds)
	}
	if out := b.script("echo it runs"); out != "it runs" {
		t.Errorf("a command in the old machine: %q", out)
	}
	if now := d.ControlProcesses(); len(now) != len(old)+1 {
		t.Errorf("control processes: %v before, %v now", old, now)
	}
	// What is old is restored, in place and as new sandboxes.
	other.verb("restore")
	again := newBox(t, d, map[string]any{"snapshot": snap})
	for _, k := range []box{other, again} {
		if now := k.script(askHolder); now != hash {
			t.Errorf("an old snapshot holds %s and is restored as %s", hash, now)
		}
	}
	b.rollback(mine)
	if out := b.script("echo it runs"); out != "it runs" {
		t.Errorf("a command after a rollback: %q", out)
	}
}

// attachedDigest starts a session, follows it to its end over whatever happens,
// and returns its digest. flows is closed when output comes.
func attachedDigest(t *testing.T, s *client.Session, flows chan struct{}) string {
	r := &streamReader{t: t, st: s.Attach(client.StreamOptions{}), flows: sync.OnceFunc(func() { close(flows) })}
	defer r.st.Close()
	got, err := digest(r)
	if err != nil {
		t.Errorf("session %s: %v", s.ID, err)
	}
	return got
}

// streamReader reads a stream's output.
type streamReader struct {
	t     *testing.T
	st    *client.Stream
	rest  []byte
	flows func()
}

// Read implements io.Reader.
func (r *streamReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		e, err := r.st.Next(r.t.Context())
		if err != nil {
			return 0, err
		}
		switch e.Type {
		case api.EventStdout:
			r.rest = e.Data
			r.flows()
		case api.EventGap, api.EventLost:
			return 0, fmt.Errorf("%s at %d: %s", e.Type, e.Offset, e.Reason)
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}
