package proxy

import (
	"io"
	"net"
	"net/http"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

// BenchmarkTerminated is one request on a kept connection; BenchmarkDirect is
// the same without a gateway.
func BenchmarkTerminated(b *testing.B) {
	for _, h2 := range []bool{false, true} {
		name := map[bool]string{false: "h1", true: "h2"}[h2]
		w := newWorld(b, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
		go drain(w)
		s := w.server(tlsWeb, "a.test", true, helloHandler)
		b.Run(name, func(b *testing.B) { requests(b, w.client(tlsAway, h2), "https://a.test/") })
		direct := w.client(tlsAway, h2)
		tr := direct.Transport.(*http.Transport)
		tr.DialContext = nil
		tr.TLSClientConfig.InsecureSkipVerify = true
		b.Run(name+" direct", func(b *testing.B) { requests(b, direct, s.URL) })
	}
}

// drain reads the records until the benchmark ends.
func drain(w *world) {
	for {
		select {
		case <-w.records:
		case <-w.p.ctx.Done():
			return
		}
	}
}

func requests(b *testing.B, c *http.Client, url string) {
	for b.Loop() {
		resp, err := c.Get(url)
		if err != nil {
			b.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}

func BenchmarkSplice(b *testing.B) {
	w := newWorld(b, rules(cidr(sandbox.EgressAllow, "203.0.113.0/24"))).start()
	w.listen(web, "", func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	c := w.dial(web)
	block := make([]byte, 1<<20)
	b.SetBytes(int64(len(block)))
	for b.Loop() {
		if _, err := c.Write(block); err != nil {
			b.Fatal(err)
		}
	}
	c.Close()
}
