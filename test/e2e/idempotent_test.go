package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/test/harness"
)

// cutter is a TCP proxy that cuts each connection after a random number of
// bytes in a random direction, until it is told to be good.
type cutter struct {
	l      net.Listener
	to     string
	good   atomic.Bool
	cuts   atomic.Int64
	served sync.WaitGroup
}

func newCutter(t *testing.T, to string) *cutter {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{l: l, to: to}
	c.served.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			c.served.Go(func() { c.carry(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		c.served.Wait()
	})
	return c
}

// carry carries one connection until one of its ends closes it or its bytes are
// used up. A request has about 300 bytes, an answer about 1500.
func (c *cutter) carry(in net.Conn) {
	defer in.Close()
	out, err := net.Dial("tcp4", c.to)
	if err != nil {
		return
	}
	defer out.Close()
	there, back := int64(1<<40), int64(1<<40)
	if !c.good.Load() {
		switch rand.IntN(3) {
		case 0:
			there = rand.Int64N(500)
		case 1:
			back = rand.Int64N(2500)
		default:
			there, back = rand.Int64N(1000), rand.Int64N(4000)
		}
	}
	ends := make(chan bool, 2)
	pipe := func(to, from net.Conn, most int64) {
		n, _ := io.CopyN(to, from, most)
		ends <- n == most
	}
	go pipe(out, in, there)
	go pipe(in, out, back)
	if <-ends {
		c.cuts.Add(1)
	}
	_ = in.Close()
	_ = out.Close()
	<-ends
}

// TestCreateIsIdempotent lets 20 clients ask for the same sandbox with the
// same key, through a proxy that cuts their connections anywhere, while the
// daemon is killed and started again: there is one sandbox, and everybody gets
// the same answer.
func TestCreateIsIdempotent(t *testing.T) {
	const clients, kills = 20, 20
	begin := time.Now()
	d := harness.Start(t)
	proxy := newCutter(t, strings.TrimPrefix(d.URL, "http://"))
	url := "http://" + proxy.l.Addr().String()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	body, _ := json.Marshal(map[string]any{"template": "base", "resources": small, "labels": map[string]string{"once": "yes"}})

	// The connections are this test's own, so that none outlives it.
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	var tries atomic.Int64
	answers := make([][]api.AcceptedSandbox, clients)
	var stop atomic.Bool
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			// Each client asks again and again while the daemon is killed, as one
			// that never got its answer would, and must get one at the end.
			for !stop.Load() || len(answers[i]) == 0 {
				tries.Add(1)
				if a, ok := createOnce(ctx, client, url, d.Key, body); ok {
					answers[i] = append(answers[i], a)
				}
				if ctx.Err() != nil {
					return
				}
				time.Sleep(time.Duration(rand.IntN(30)) * time.Millisecond)
			}
		})
	}
	for range kills {
		time.Sleep(time.Duration(50+rand.IntN(300)) * time.Millisecond)
		d.Kill9()
		if err := d.TryServe(); err != nil {
			t.Fatal(err)
		}
	}
	proxy.good.Store(true)
	stop.Store(true)
	all.Wait()

	b := box{caller: caller{t: t, url: d.URL, key: d.Key}, d: d}
	var list api.SandboxList
	b.want(200, &list, "GET", "/v1/sandboxes?limit=1000", nil)
	if len(list.Items) != 1 {
		t.Errorf("%d sandboxes were made", len(list.Items))
	}
	got := 0
	var one api.AcceptedSandbox
	for i, of := range answers {
		if len(of) == 0 {
			t.Errorf("client %d never got an answer", i)
		}
		for _, a := range of {
			if got++; got == 1 {
				one = a
			}
			if a.Sandbox.Id != one.Sandbox.Id || a.Operation.Id != one.Operation.Id {
				t.Errorf("client %d was answered %s by %s, another %s by %s", i, a.Sandbox.Id, a.Operation.Id, one.Sandbox.Id, one.Operation.Id)
			}
		}
	}
	b.id = one.Sandbox.Id
	b.done(one.Operation.Id)
	if out := b.script("echo there"); out != "there" {
		t.Errorf("the sandbox says %q", out)
	}
	b.verb("delete")
	if left := d.WaitCensus(20 * time.Second); len(left) > 0 {
		t.Errorf("left on the host: %s", strings.Join(left, "\n"))
	}
	t.Logf("%d clients, %d calls, %d connections cut, %d kills, %d answers, in %.1f s (load %s)",
		clients, tries.Load(), proxy.cuts.Load(), kills, got, time.Since(begin).Seconds(), load())
	if took := time.Since(begin); took > time.Minute {
		t.Errorf("it took %v", took)
	}
}

// createOnce sends the create once over a connection of its own; false where no
// whole answer came. Answers but 202 and those of a daemon that starts or is
// busy are faults, which the caller sees as an answer without ids.
func createOnce(ctx context.Context, client *http.Client, url, key string, body []byte) (a api.AcceptedSandbox, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/sandboxes", bytes.NewReader(body))
	if err != nil {
		return a, false
	}
	req.Close = rand.IntN(2) == 0
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Idempotency-Key", "the-one")
	resp, err := client.Do(req)
	if err != nil {
		return a, false
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode == http.StatusServiceUnavailable {
		return a, false
	}
	if resp.StatusCode != http.StatusAccepted || json.Unmarshal(b, &a) != nil {
		return api.AcceptedSandbox{}, true
	}
	return a, true
}
