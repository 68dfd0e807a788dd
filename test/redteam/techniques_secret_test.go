package redteam

import (
	"bytes"
	"encoding/base64"
	"net/url"
	"strings"
	"testing"
	"time"
)

// secretTechniques try to get at a secret that the gateway puts into requests.
var secretTechniques = []technique{
	{name: "reflect-raw", what: "a server that gives the secret back in its answer", own: reflected("raw")},
	{name: "reflect-base64", what: "the same in base64", own: reflected("base64")},
	{name: "reflect-base64-url", what: "the same in base64 of the other alphabet, shifted by a byte", own: reflected("base64-url")},
	{name: "reflect-percent", what: "the same percent-encoded", own: reflected("percent")},
	{name: "reflect-header", what: "the same in a header", own: reflected("header")},
	{name: "reflect-trailer", what: "the same in a trailer", own: reflected("trailer")},
	{name: "reflect-chunks", what: "the same a byte at a time", own: reflected("chunks")},
	{name: "secret-in-clear", what: "a request that gets the secret, without TLS", own: secretInClear},
	{name: "secret-elsewhere", what: "the place of the secret filled in a request to another server", own: secretElsewhere},
}

// reflected asks an allowed server for what it got.
func reflected(how string) func(*testing.T, *arena, string, string) []string {
	return func(t *testing.T, a *arena, _, token string) (places []string) {
		path := "/reflect/" + how + "/" + token
		got := a.doIn(t, a.inject, secure(allowed, "allowed.test", "GET "+path+" HTTP/1.1\r\nHost: allowed.test\r\nTE: trailers\r\nConnection: close, TE\r\n\r\n")(a, ""))[0].Got
		if !a.got("10:443", path, "Key "+a.secret) {
			t.Errorf("the control: the server didn't get the secret with %s", path)
		}
		if !bytes.HasPrefix(got, []byte("HTTP/1.1 200 OK")) {
			t.Errorf("there is no answer: %.300q", got)
		}
		return a.spells(got)
	}
}

// got tells whether one request at a place had a path and a header's value.
func (a *arena) got(place, path, value string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	b := a.seen[place]
	if b == nil {
		return false
	}
	_, after, found := strings.Cut(b.String(), path)
	return found && strings.Contains(after[:min(len(after), 4096)], value)
}

// spells names the ways in which a text has the secret, whole or nearly so.
func (a *arena) spells(got []byte) (ways []string) {
	texts := map[string]string{"as it is": string(got), "joined": string(joinChunks(got))}
	for _, line := range strings.FieldsFunc(string(joinChunks(got)), func(r rune) bool { return r == '\r' || r == '\n' || r == ' ' }) {
		if plain, err := url.PathUnescape(line); err == nil {
			texts["percent-encoded"] += plain + "\n"
		}
		for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.RawURLEncoding} {
			if plain, err := enc.DecodeString(line); err == nil {
				texts["in base64"] += string(plain) + "\n"
			}
		}
	}
	for way, text := range texts {
		// A form of it that misses an end is as good as all of it.
		if strings.Contains(text, a.secret[2:len(a.secret)-2]) {
			ways = append(ways, "the guest, "+way)
		}
	}
	return ways
}

// joinChunks takes the lines of chunks' sizes out of an answer.
func joinChunks(b []byte) (out []byte) {
	head, body, _ := bytes.Cut(b, []byte("\r\n\r\n"))
	out = append(out, head...)
	out = append(out, '\n')
	for {
		size, rest, ok := bytes.Cut(body, []byte("\r\n"))
		if !ok || len(size) > 4 {
			return append(out, body...)
		}
		chunk, after, _ := bytes.Cut(rest, []byte("\r\n"))
		out, body = append(out, chunk...), after
	}
}

func secretInClear(t *testing.T, a *arena, _, token string) []string {
	begin := time.Now()
	a.doIn(t, a.inject, plain(allowed, "GET /"+token+" HTTP/1.1\r\nHost: allowed.test\r\n\r\n")(a, ""))
	a.demandRecord(t, a.inject, begin, "secret_needs_tls")
	return a.arrived(token)
}

func secretElsewhere(t *testing.T, a *arena, _, token string) []string {
	path := "/" + token
	a.doIn(t, a.inject, secure(allowed, "front.test", "GET "+path+" HTTP/1.1\r\nHost: front.test\r\nX-Api-Key: mine\r\nConnection: close\r\n\r\n")(a, ""))
	if len(a.arrived(token)) == 0 {
		t.Error("the control: what another rule allows did not arrive")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if b := a.seen["host front.test"]; b != nil && bytes.Contains(b.Bytes(), []byte(a.secret)) {
		return []string{"front.test"}
	}
	return nil
}
