package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/sandbox"
)

func websocketServer(rw http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "websocket" || r.URL.Path != "/ws" {
		http.Error(rw, "no", http.StatusBadRequest)
		return
	}
	c, _, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		panic(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, lines("HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", "Upgrade: websocket"))
	_, _ = io.Copy(c, c)
}

var upgrade = lines("GET /ws HTTP/1.1", "Host: a.test", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")

func TestWebSocket(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
	w.server(tlsWeb, "a.test", true, websocketServer)
	w.server(web, "", false, websocketServer)
	for _, c := range []net.Conn{w.dial(away), w.tls(tlsAway, "a.test", "http/1.1")} {
		_, _ = io.WriteString(c, upgrade)
		r := bufio.NewReader(c)
		if resp := answerOf(t, r, "GET"); resp.StatusCode != 101 {
			t.Fatal(resp.Status)
		}
		for range 3 {
			_, _ = c.Write([]byte("ping"))
			if _, err := io.ReadFull(r, make([]byte, 4)); err != nil {
				t.Fatal(err)
			}
		}
		c.Close()
		if r := w.record(); r.Verdict != audit.Allowed || r.Status != 101 || r.Sent != 12 || r.Received != 12 {
			t.Errorf("the record is %+v", r)
		}
	}
	// What comes before the switch is not read as HTTP, and not at all.
	c := w.dial(away)
	_, _ = io.WriteString(c, upgrade+lines("GET / HTTP/1.1", "Host: evil.test"))
	_, _ = io.Copy(io.Discard, c)
	if r := w.record(); r.Verdict != audit.Denied || r.Reason != reasonEarlyData {
		t.Errorf("the record is %+v", r)
	}
	// A server that doesn't switch.
	c = w.dial(away)
	_, _ = io.WriteString(c, strings.Replace(upgrade, "/ws", "/no", 1))
	if resp := answerOf(t, bufio.NewReader(c), "GET"); resp.StatusCode != 400 || !resp.Close {
		t.Error(resp.Status, resp.Close)
	}
	w.record()
	// A change cuts a WebSocket.
	c = w.dial(away)
	_, _ = io.WriteString(c, upgrade)
	r := bufio.NewReader(c)
	answerOf(t, r, "GET")
	w.p.Update(Live{Policy: compile(t, rules(hosts(sandbox.EgressAllow, "b.test")))})
	gone(t, c)
	if r := w.record(); r.Verdict != audit.Denied || r.Reason != reasonPolicyChanged || r.Status != 101 {
		t.Errorf("the record is %+v", r)
	}
	w.none()
}

// TestStream: an answer comes as it is made, with its interim ones and its
// trailers, and ends when the policy does.
func TestStream(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprint("h2 ", h2), func(t *testing.T) {
			w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
			next := make(chan struct{})
			w.server(tlsWeb, "a.test", true, func(rw http.ResponseWriter, r *http.Request) {
				rw.Header().Set("Trailer", "X-Sum")
				rw.Header().Set("Alt-Svc", `h3=":443"`)
				for n := range 3 {
					fmt.Fprintf(rw, "part %d\n", n)
					_ = http.NewResponseController(rw).Flush()
					if r.URL.Path == "/endless" {
						<-r.Context().Done()
						return
					}
					<-next
				}
				rw.Header().Set("X-Sum", "3")
			})
			client := w.client(tlsAway, h2)
			resp, err := client.Get("https://a.test/")
			if err != nil {
				t.Fatal(err)
			}
			r := bufio.NewReader(resp.Body)
			for n := range 3 {
				if line, err := r.ReadString('\n'); err != nil || line != fmt.Sprintf("part %d\n", n) {
					t.Fatal(line, err)
				}
				next <- struct{}{}
			}
			if _, err := r.ReadByte(); err != io.EOF || resp.Trailer.Get("X-Sum") != "3" || resp.Header.Get("Alt-Svc") != "" {
				t.Error(err, resp.Trailer, resp.Header)
			}
			w.record()
			if resp, err = client.Get("https://a.test/endless"); err != nil {
				t.Fatal(err)
			}
			r = bufio.NewReader(resp.Body)
			_, _ = r.ReadString('\n')
			live := *w.p.live.Load()
			live.Policy = compile(t, rules(sandbox.EgressRule{Action: sandbox.EgressAllow, Hosts: []string{"a.test"}, Paths: []string{"/other"}}))
			w.p.Update(live)
			if _, err := r.ReadByte(); err == nil || err == io.EOF {
				t.Error("the answer ended well")
			}
			if r := w.record(); r.Verdict != audit.Denied || r.Reason != reasonPolicyChanged || r.Received != 7 {
				t.Errorf("the record is %+v", r)
			}
			w.none()
		})
	}
}

func TestReset(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
	began := make(chan struct{}, 1)
	w.server(tlsWeb, "a.test", true, func(_ http.ResponseWriter, r *http.Request) {
		began <- struct{}{}
		<-r.Context().Done()
	})
	failed := make(chan error, 1)
	go func() {
		_, err := w.client(tlsAway, true).Get("https://a.test/")
		failed <- err
	}()
	<-began
	w.p.Reset()
	if err := <-failed; err == nil {
		t.Error("there was an answer")
	}
	if r := w.record(); r.Verdict != audit.Failed || r.Reason != reasonReset {
		t.Errorf("the record is %+v", r)
	}
}

func TestUpload(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
	w.server(tlsWeb, "a.test", true, func(rw http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprint(rw, n, r.Trailer.Get("X-Sum"), r.Header.Get("Proxy-Authorization"), r.Header.Get("X-Forwarded-For"), r.Header.Get("Keep-Alive"))
	})
	for _, h2 := range []bool{false, true} {
		req, _ := http.NewRequestWithContext(context.Background(), "POST", "https://a.test/", io.LimitReader(zeros{}, 3<<20))
		req.Trailer = http.Header{"X-Sum": {"s"}}
		req.Header = http.Header{"Proxy-Authorization": {"no"}, "X-Forwarded-For": {"me"}, "Expect": {"100-continue"}}
		resp, err := w.client(tlsAway, h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(resp.Body); string(b) != "3145728sme" {
			t.Errorf("h2 %v: %s", h2, b)
		}
		if r := w.record(); r.Sent != 3<<20 {
			t.Errorf("the record is %+v", r)
		}
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

func TestSlowHead(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test")))
	w.p.times.head = 50 * time.Millisecond
	w.start()
	w.server(web, "a.test", false, helloHandler)
	c := w.dial(away)
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n")
	gone(t, c)
	if r := w.record(); r.Reason != reasonHeaderTimeout || r.Method != "GET" {
		t.Errorf("the record is %+v", r)
	}
	c = w.dial(away)
	_, _ = io.WriteString(c, lines("GET / HTTP/1.1", "Host: a.test")+"G")
	_, _ = io.Copy(io.Discard, c)
	// One is of the request before, which may have been cut by it.
	if a, b := w.record(), w.record(); a.Reason != reasonHeaderTimeout && b.Reason != reasonHeaderTimeout {
		t.Errorf("the records are %+v and %+v", a, b)
	}
	w.none()
}

// TestHeadAndTheServersDeadline: the server sets its deadline a moment before
// the head begins, and whichever ends the head, it was late.
func TestHeadAndTheServersDeadline(t *testing.T) {
	for what, before := range map[string]time.Duration{"in a moment": 5 * time.Second, "in the past": -time.Hour} {
		c, other := net.Pipe()
		g := &guest{p: &Proxy{times: times{head: 10 * time.Second}}}
		hc := &httpConn{Conn: c, g: g, guard: &guard1{scheme: "http"}}
		deadline := time.Now().Add(before)
		if err := hc.SetReadDeadline(deadline); err != nil {
			t.Fatal(err)
		}
		hc.guard.feed([]byte("GET"))
		hc.watchHead()
		if ends := hc.headEnd.Equal(deadline); ends != (before > 0) {
			t.Errorf("a deadline %s: the head ends %v from it", what, hc.headEnd.Sub(deadline))
		}
		_, _ = c.Close(), other.Close()
	}
}

func TestUpstreamCut(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
	w.server(tlsWeb, "a.test", true, func(rw http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(rw, "half")
		_ = http.NewResponseController(rw).Flush()
		panic(http.ErrAbortHandler)
	})
	for _, h2 := range []bool{false, true} {
		resp, err := w.client(tlsAway, h2).Get("https://a.test/")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(resp.Body); err == nil {
			t.Error("half an answer passed for a whole one")
		}
		if r := w.record(); r.Verdict != audit.Failed || r.Reason != reasonUpstreamCut {
			t.Errorf("the record is %+v", r)
		}
	}
}
