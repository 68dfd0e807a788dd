package dataplane

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"cloche.dev/cloche/api"
)

func TestFiles(t *testing.T) {
	b := newBench(t)
	content := bytes.Repeat([]byte("0123456789"), 50_000)
	var written api.FileWritten
	b.call(200, &written, "PUT", "/files?path=/a&mode=0600&parents=true&user=user", content)
	if written.Written != int64(len(content)) {
		t.Fatalf("%+v", written)
	}
	a := b.call(200, nil, "GET", "/files?path=/a", nil)
	if !bytes.Equal(a.Body, content) || a.Header.Get("Accept-Ranges") != "bytes" || a.Header.Get("Last-Modified") == "" {
		t.Fatalf("%d bytes, %v", len(a.Body), a.Header)
	}
	b.call(200, nil, "PUT", "/files?path=/empty", nil)
	if a := b.call(200, nil, "GET", "/files?path=/empty", nil); len(a.Body) != 0 {
		t.Fatalf("%q", a.Body)
	}
	b.call(200, nil, "PUT", "/files?path=/a&offset=4", []byte("XYZ"))
	if a := b.call(200, nil, "GET", "/files?path=/a", nil); string(a.Body) != "0123XYZ" {
		t.Fatalf("%q", a.Body)
	}
	if a := b.call(200, nil, "GET", "/files?path=/proc/x", nil); string(a.Body) != "from proc" {
		t.Fatalf("%q", a.Body)
	}
	var info api.FileInfo
	b.call(200, &info, "GET", "/files/stat?path=/a&follow=false", nil)
	if info.Name != "a" || info.Type != "file" || info.Size != 7 || info.Mode != "0644" {
		t.Fatalf("%+v", info)
	}
	b.call(200, &info, "GET", "/files/stat?path=/huge", nil) // a size that no file has
	var list api.FileList
	b.call(200, &list, "GET", "/files/list?path=/dir", nil)
	if len(list.Items) != 2 || list.Items[0].Name != "a" || list.Items[0].Target != "b" {
		t.Fatalf("%+v", list)
	}
	b.call(204, nil, "POST", "/files/mkdir", `{"path":"/d","mode":"0700","parents":true}`)
	b.call(204, nil, "POST", "/files/move", `{"from":"/a","to":"/b"}`)
	b.call(409, nil, "POST", "/files/move", `{"from":"/empty","to":"/b"}`)
	b.call(204, nil, "DELETE", "/files?path=/b&recursive=true", nil)
	p := b.call(404, nil, "GET", "/files?path=/b", nil).Problem(t)
	if p.Code != "guest_not_found" || strings.ContainsRune(p.Detail, '\x1b') {
		t.Fatalf("%+v", p)
	}
	if p := b.call(409, nil, "GET", "/files?path=/dir", nil).Problem(t); p.Code != "is_directory" {
		t.Fatalf("%+v", p)
	}
	b.call(409, nil, "GET", "/files?path=/dev/zero", nil)
	b.call(429, nil, "PUT", "/files?path=/full", content)
	if a := b.call(200, nil, "GET", "/files/archive?path=/dir", nil); string(a.Body) != "a tar" {
		t.Fatalf("%q", a.Body)
	}
	b.call(200, nil, "PUT", "/files/archive?path=/dir&user=user", []byte("x"), "Content-Type", "application/x-tar")
	b.call(415, nil, "PUT", "/files/archive?path=/dir", []byte("x"))
	if len(b.plane.places.taken) != 0 {
		t.Errorf("transfers were not given back: %v", b.plane.places.taken)
	}
}

func TestRanges(t *testing.T) {
	b := newBench(t)
	b.guest.files["/a"] = []byte("0123456789")
	for _, c := range []struct {
		header string
		status int
		body   string
		told   string
	}{
		{"bytes=0-3", 206, "0123", "bytes 0-3/10"},
		{"bytes=4-", 206, "456789", "bytes 4-9/10"},
		{"bytes=-2", 206, "89", "bytes 8-9/10"},
		{"bytes=5-500", 206, "56789", "bytes 5-9/10"},
		{"bytes=-500", 206, "0123456789", "bytes 0-9/10"},
		{"Bytes=9-9", 206, "9", "bytes 9-9/10"},
		{"bytes=10-", 416, "", "bytes */10"},
		{"bytes=-0", 416, "", "bytes */10"},
		{"bytes=99-100", 416, "", "bytes */10"},
		{"bytes=3-1", 200, "0123456789", ""},
		{"bytes=0-1,3-4", 200, "0123456789", ""},
		{"lines=0-1", 200, "0123456789", ""},
		{"bytes=a-b", 200, "0123456789", ""},
		{"bytes=", 200, "0123456789", ""},
		{"bytes=+1-2", 200, "0123456789", ""},
		{"bytes=99999999999999999999-", 200, "0123456789", ""},
		{"bytes=-", 200, "0123456789", ""},
	} {
		a := b.call(c.status, nil, "GET", "/files?path=/a", nil, "Range", c.header)
		if c.status != 416 && string(a.Body) != c.body || a.Header.Get("Content-Range") != c.told {
			t.Errorf("%s: %q %q", c.header, a.Body, a.Header.Get("Content-Range"))
		}
	}
}

// FuzzRange: whatever the header says, the range lies inside the file.
func FuzzRange(f *testing.F) {
	f.Add("bytes=0-3", int64(10))
	f.Add("bytes=-5", int64(3))
	f.Add("bytes=9223372036854775807-", int64(0))
	f.Fuzz(func(t *testing.T, header string, size int64) {
		if size < 0 {
			return
		}
		from, length, partial, err := fileRange(header, size)
		if err == nil && (from < 0 || length < 0 || from > size-length || !partial && length != size || partial && length == 0) {
			t.Errorf("%q of %d: %d+%d", header, size, from, length)
		}
	})
}

// TestLyingGuest: what an agent says is checked, and answered as its fault.
func TestLyingGuest(t *testing.T) {
	b := newBench(t)
	b.guest.files["/a"] = bytes.Repeat([]byte("x"), 5000)
	for _, lie := range []string{"short", "long"} {
		b.guest.lie = lie
		resp, err := b.client.Do(b.req("GET", "/files?path=/a", nil))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err == nil && resp.StatusCode == 200 {
			t.Errorf("%s: %d bytes look whole", lie, len(got))
		}
	}
	b.guest.lie = "no info"
	if p := b.call(503, nil, "GET", "/files/stat?path=/a", nil).Problem(t); p.Code != "guest_fault" || p.Retryable {
		t.Errorf("%+v", p)
	}
	b.guest.lie = "endless list"
	var list api.FileList
	b.call(200, &list, "GET", "/files/list?path=/dir", nil)
	if len(list.Items) != maxListed || !list.Truncated {
		t.Errorf("%d entries", len(list.Items))
	}
}

func TestTransfersAreBounded(t *testing.T) {
	b := newBench(t)
	for range bulkPerBox {
		if !b.plane.places.take(b.box) {
			t.Fatal("too few places")
		}
	}
	if p := b.call(429, nil, "GET", "/files/archive?path=/dir", nil).Problem(t); p.Code != "too_many_transfers" || !p.Retryable {
		t.Errorf("%+v", p)
	}
}

// TestBrokenUpload: an upload that breaks off leaves no file.
func TestBrokenUpload(t *testing.T) {
	b := newBench(t)
	r, w := io.Pipe()
	req := b.req("PUT", "/files?path=/half", []byte("x"))
	req.Body, req.ContentLength, req.GetBody = r, -1, nil
	go func() {
		_, _ = w.Write(make([]byte, 500_000))
		_ = w.CloseWithError(errors.New("the client broke"))
	}()
	if resp, err := b.client.Do(req); err == nil {
		resp.Body.Close()
	}
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		b.plane.places.mu.Lock()
		left := len(b.plane.places.taken)
		b.plane.places.mu.Unlock()
		if left == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the transfer goes on")
		}
	}
	b.guest.mu.Lock()
	defer b.guest.mu.Unlock()
	if _, ok := b.guest.files["/half"]; ok {
		t.Error("half a file was written")
	}
}

func (b *bench) dial(path string, header http.Header, protocols ...string) (*websocket.Conn, *http.Response, error) {
	return websocket.Dial(context.Background(), b.url+"/v1/sandboxes/"+b.box+path,
		&websocket.DialOptions{HTTPClient: b.client, HTTPHeader: header, Subprotocols: protocols})
}

func bearer(token string) http.Header { return http.Header{"Authorization": {"Bearer " + token}} }

func TestTunnel(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	b.call(426, nil, "GET", "/ports/7/tunnel", nil)
	b.call(400, nil, "GET", "/ports/0/tunnel", nil)
	if _, resp, err := b.dial("/ports/8/tunnel", bearer("project")); err == nil || resp.StatusCode != 409 {
		t.Fatalf("a closed port: %v", err)
	}
	if _, resp, err := b.dial("/ports/7/tunnel", http.Header{"Authorization": {"Bearer project"}, "Origin": {"https://evil.example"}}); err == nil || resp.StatusCode != 403 {
		t.Fatalf("another origin: %v", err)
	}
	conn, _, err := b.dial("/ports/7/tunnel", nil, "cloche.v1", "bearer.project") // as a browser
	if err != nil {
		t.Fatal(err)
	}
	if conn.Subprotocol() != "cloche.v1" {
		t.Errorf("subprotocol %q", conn.Subprotocol())
	}
	conn.SetReadLimit(1 << 21)
	want := bytes.Repeat([]byte{0, 1, 255}, 200_000)
	go func() {
		_ = conn.Write(ctx, websocket.MessageBinary, want)
		_ = conn.Write(ctx, websocket.MessageText, []byte(`{"type":"close_write"}`))
	}()
	var got []byte
	closed := false
	for {
		kind, data, err := conn.Read(ctx)
		if err != nil {
			if websocket.CloseStatus(err) != websocket.StatusNormalClosure {
				t.Errorf("it ended with %v", err)
			}
			break
		}
		if kind == websocket.MessageText {
			closed = string(data) == `{"type":"close_write"}`
			continue
		}
		got = append(got, data...)
	}
	if !bytes.Equal(got, want) || !closed {
		t.Errorf("%d of %d bytes, end told: %v", len(got), len(want), closed)
	}
}

func TestPty(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	s := b.session(true, "cat")
	path := "/sessions/" + s.Session.Id
	b.call(426, nil, "GET", path+"/pty", nil)
	conn, _, err := b.dial(path+"/pty", bearer(s.Token))
	if err != nil {
		t.Fatal(err)
	}
	var got api.Session
	if b.call(200, &got, "GET", path, nil); got.State != api.SessionCreated {
		t.Fatalf("the WebSocket started it: %s", got.State)
	}
	b.call(200, nil, "POST", path+"/attach", nil, "Accept", "application/json")
	want := func(kind websocket.MessageType, part string) {
		t.Helper()
		k, data, err := conn.Read(ctx)
		if err != nil || k != kind || !strings.Contains(string(data), part) {
			t.Fatalf("%v %q %v, want %q", k, data, err, part)
		}
	}
	want(websocket.MessageText, `"started"`)
	_ = conn.Write(ctx, websocket.MessageBinary, []byte("hi\xff"))
	want(websocket.MessageBinary, "hi\xff")
	_ = conn.Write(ctx, websocket.MessageText, []byte(`{"type":"resize","rows":40,"cols":120}`))
	want(websocket.MessageBinary, "40x120")
	_ = conn.Write(ctx, websocket.MessageText, []byte(`{"type":"close_stdin"}`))
	want(websocket.MessageText, `"exit"`)
	if _, _, err := conn.Read(ctx); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Errorf("it ended with %v", err)
	}
	conn, _, err = b.dial(path+"/pty?offset=3", bearer("project"))
	if err != nil {
		t.Fatal(err)
	}
	want(websocket.MessageBinary, "40x120")
	want(websocket.MessageText, `"exit"`)
}

func TestPtyRefusesNonsense(t *testing.T) {
	b := newBench(t)
	for _, message := range []string{`{"type":"resize","rows":0,"cols":1}`, `{"type":"fly"}`, `not JSON`, `{"type":"resize","rows":99999999,"cols":1}`} {
		s := b.session(true, "cat")
		b.call(200, nil, "POST", "/sessions/"+s.Session.Id+"/attach", nil, "Accept", "application/json")
		conn, _, err := b.dial("/sessions/"+s.Session.Id+"/pty", bearer("project"))
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.Write(t.Context(), websocket.MessageText, []byte(message))
		for err == nil {
			_, _, err = conn.Read(t.Context())
		}
		if websocket.CloseStatus(err) != websocket.StatusPolicyViolation {
			t.Errorf("%s: %v", message, err)
		}
	}
}

func TestGuestText(t *testing.T) {
	got := guestText(strings.Repeat("a\x1b[2J\n\xff", 1000))
	if len(got) > maxGuestText || strings.ContainsAny(got, "\x1b\n") {
		t.Errorf("%q", got)
	}
}
