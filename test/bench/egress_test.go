package bench

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"cloche.dev/cloche/test/harness"
	"cloche.dev/cloche/test/internet"
)

// TestBenchEgress measures what the gateway costs: the throughput of a spliced
// connection beside the same bytes over the machine's bare link, and a request
// of HTTPS that is terminated beside one that is spliced.
func TestBenchEgress(t *testing.T) {
	w := internet.New(t)
	w.Name("site.test", 60, w.Addr(10))
	w.Site(w.Addr(10), http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprintln(rw, "hello") }))
	go pour(w.Listen(w.Addr(12), 9000))
	d := harness.New(t)
	d.Flags = append(d.Flags, w.Flags()...)
	d.Seed()
	d.Serve()
	for name, text := range map[string]string{
		"spliced": fmt.Sprintf(`{"name": "spliced", "default": "deny", "rules": [{"action": "allow", "cidrs": [%q]}]}`, w.Open()),
		"byhost":  `{"name": "byhost", "default": "deny", "rules": [{"action": "allow", "hosts": ["site.test"]}]}`,
	} {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		d.Must("egress", "profile", "set", file)
	}
	spliced := d.Must("create", "--egress", "spliced", "base")
	byHost := d.Must("create", "--egress", "byhost", "base")
	bare := d.Must("create", "--egress", "none", "base")
	go pour(internet.Bare(t, filepath.Join(d.Run, "netns", bare+".gateway"), "169.254.77.1:9000"))

	const size = 256 << 20
	get := func(box, addr string) func() float64 {
		return func() float64 {
			return number(t, d.Must("exec", box, "--", "python3", "-c", pouring, addr, "9000", strconv.Itoa(size)))
		}
	}
	report(t, fmt.Sprintf("download %d MiB through a spliced connection", size>>20), "ms", "the machine's bare link", 1.25,
		measure(10, get(spliced, w.Addr(12).String()), get(bare, "169.254.77.1")))

	const requests = 300
	ask := func(box string) func() float64 {
		return func() float64 {
			return number(t, d.Must("exec", box, "--", "python3", "-c", asking, w.Addr(10).String(), strconv.Itoa(requests)))
		}
	}
	p := measure(10, ask(byHost), ask(spliced))
	report(t, "HTTPS request on an open connection, terminated (median of 300)", "ms", "the same, spliced", 0, p)
	if added := median(p.ours) - median(p.floor); added > 2 {
		t.Errorf("a terminated request takes %.2f ms more, of which 2 are allowed", added)
	}
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil {
		t.Fatalf("a measurement: %q", text)
	}
	return v
}

// pour sends zeroes to whoever connects, for as long as they are taken.
func pour(l net.Listener) {
	b := make([]byte, 1<<20)
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			for {
				if _, err := c.Write(b); err != nil {
					return
				}
			}
		}()
	}
}

// pouring prints how many milliseconds so many bytes took.
const pouring = `
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
n, want, buf, begin = 0, int(sys.argv[3]), bytearray(1 << 20), time.perf_counter()
while n < want:
    got = s.recv_into(buf)
    assert got
    n += got
print((time.perf_counter() - begin) * 1000)
`

// asking prints the median of the milliseconds that a request took, on one
// connection. The name goes to the address that is given, whoever answers.
const asking = `
import http.client, socket, ssl, sys, time
c = http.client.HTTPSConnection("site.test", context=ssl._create_unverified_context())
c._create_connection = lambda a, *r: socket.create_connection((sys.argv[1], 443))
took = []
for i in range(int(sys.argv[2])):
    begin = time.perf_counter()
    c.request("GET", "/")
    c.getresponse().read()
    took.append((time.perf_counter() - begin) * 1000)
print(sorted(took)[len(took) // 2])
`
