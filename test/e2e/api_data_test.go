package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"cloche.dev/cloche/api"
)

func apiFiles(t *testing.T, l life) {
	data := bytes.Repeat([]byte("0123456789"), 500_000)
	var w api.FileWritten
	l.want(200, &w, "PUT", l.path("/files?path=/home/user/d/e/f&parents=true&user=user&mode=0600"), data)
	if w.Written != int64(len(data)) {
		t.Errorf("written: %d", w.Written)
	}
	if r := l.want(200, nil, "GET", l.path("/files?path=/home/user/d/e/f"), nil); !bytes.Equal(r.body, data) {
		t.Errorf("read back: %d bytes", len(r.body))
	}
	for rng, want := range map[string]string{"bytes=5-9": "56789", "bytes=4999995-": "56789", "bytes=-3": "789"} {
		r := l.want(206, nil, "GET", l.path("/files?path=/home/user/d/e/f"), nil, "Range", rng)
		if string(r.body) != want || !strings.HasSuffix(r.header.Get("Content-Range"), "/5000000") {
			t.Errorf("%s: %q, %q", rng, r.body, r.header.Get("Content-Range"))
		}
	}
	l.refused(416, api.ClassInvalid, "GET", l.path("/files?path=/home/user/d/e/f"), nil, "Range", "bytes=9000000-")
	l.want(200, nil, "PUT", l.path("/files?path=/home/user/d/e/f&offset=2"), []byte("XY"))
	var info api.FileInfo
	l.want(200, &info, "GET", l.path("/files/stat?path=/home/user/d/e/f"), nil)
	if info.Size != 5_000_000 || info.Mode != "0600" || info.Uid == 0 || info.Type != api.TypeFile {
		t.Errorf("stat: %+v", info)
	}
	l.want(204, nil, "POST", l.path("/files/mkdir"), map[string]any{"path": "/home/user/new/dir", "parents": true})
	l.want(204, nil, "POST", l.path("/files/move"), map[string]any{"from": "/home/user/d/e/f", "to": "/home/user/new/dir/g"})
	var list api.FileList
	if l.want(200, &list, "GET", l.path("/files/list?path=/home/user/new/dir"), nil); len(list.Items) != 1 || list.Items[0].Name != "g" {
		t.Errorf("list: %+v", list)
	}
	l.refused(404, api.ClassNotFound, "GET", l.path("/files?path=/home/user/d/e/f"), nil)
	l.want(204, nil, "DELETE", l.path("/files?path=/home/user/new&recursive=true"), nil)
	l.refused(404, api.ClassNotFound, "GET", l.path("/files/stat?path=/home/user/new"), nil)
}

func apiArchive(t *testing.T, l life) {
	var w api.ArchiveWritten
	l.want(204, nil, "POST", l.path("/files/mkdir"), map[string]any{"path": "/tmp/in"})
	l.want(200, &w, "PUT", l.path("/files/archive?path=/tmp/in"), smallRoot(t), "Content-Type", "application/x-tar")
	if w.Entries == 0 {
		t.Errorf("entries: %d", w.Entries)
	}
	r := l.want(200, nil, "GET", l.path("/files/archive?path=/tmp/in"), nil)
	seen := map[string]*tar.Header{}
	tr := tar.NewReader(bytes.NewReader(r.body))
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		seen[h.Name] = h
	}
	var mark, link *tar.Header
	for name, h := range seen {
		switch {
		case strings.HasSuffix(name, "etc/mark"):
			mark = h
		case strings.HasSuffix(name, "etc/link"):
			link = h
		}
	}
	if mark == nil || link == nil || link.Linkname != "mark" || mark.Uid != 1234 || mark.Mode&0o777 != 0o640 || mark.ModTime.Unix() != 1_700_000_000 {
		t.Errorf("the tree came back as %+v, %+v of %d entries", mark, link, len(seen))
	}
	var evil bytes.Buffer
	tw := tar.NewWriter(&evil)
	_ = tw.WriteHeader(&tar.Header{Name: "../../../home/user/escaped", Typeflag: tar.TypeReg, Size: 1, Mode: 0o644})
	_, _ = tw.Write([]byte("x"))
	_ = tw.Close()
	e := l.do("PUT", l.path("/files/archive?path=/tmp/in"), evil.Bytes(), "Content-Type", "application/x-tar")
	l.refused(404, api.ClassNotFound, "GET", l.path("/files/stat?path=/home/user/escaped"), nil)
	t.Logf("a tar that leads out of its directory: %d %s", e.status, e.body)
}

func apiTunnel(t *testing.T, l life) {
	echo := "import socket\ns=socket.create_server(('127.0.0.1',7777))\nwhile True:\n c,_=s.accept()\n while d:=c.recv(65536): c.sendall(d)\n c.close()"
	ses, _ := l.session(api.ProcessSpec{Args: []string{"python3", "-c", echo}})
	l.want(200, nil, "POST", l.path("/sessions/"+ses.Id+"/attach"), nil, "Accept", "application/json")
	c := newClient(t, l.d, l.d.Key)
	data := bytes.Repeat([]byte("tunnel\xff\x00"), 300_000)
	eventually(t, "the port answers", 30*time.Second, func() bool {
		conn, err := c.Tunnel(t.Context(), l.box, 7777)
		if err != nil {
			return false
		}
		defer conn.Close()
		go func() {
			_, _ = conn.Write(data)
			_ = conn.(interface{ CloseWrite() error }).CloseWrite()
		}()
		got, err := io.ReadAll(conn)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("through the tunnel: %d of %d bytes, %v", len(got), len(data), err)
		}
		return true
	})
	l.refused(426, api.ClassInvalid, "GET", l.path("/ports/7777/tunnel"), nil)
	if _, err := c.Tunnel(t.Context(), l.box, 7778); err == nil || !strings.Contains(err.Error(), "7778") {
		t.Errorf("a port on which nothing listens: %v", err)
	}
}

func apiPty(t *testing.T, l life) {
	ses, token := l.session(api.ProcessSpec{Args: []string{"bash", "--norc"}, Stdin: true, Tty: &api.WindowSize{Rows: 20, Cols: 70}})
	l.want(200, nil, "POST", l.path("/sessions/"+ses.Id+"/attach"), nil, "Accept", "application/json")
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(l.url, "http")+l.path("/sessions/"+ses.Id+"/pty"), &websocket.DialOptions{Subprotocols: []string{"cloche.v1", "bearer." + token}})
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	ws.SetReadLimit(4 << 20)
	seen, exit := &screen{}, make(chan api.StreamEvent, 1)
	go func() {
		for {
			kind, b, err := ws.Read(ctx)
			if err != nil {
				return
			}
			var e api.StreamEvent
			if kind == websocket.MessageBinary {
				_, _ = seen.Write(b)
			} else if json.Unmarshal(b, &e) == nil && e.Type == api.EventExit {
				exit <- e
			}
		}
	}()
	say := func(s string) { _ = ws.Write(ctx, websocket.MessageBinary, []byte(s)) }
	see := func(what string) {
		t.Helper()
		for begin := time.Now(); !strings.Contains(seen.String(), what); time.Sleep(30 * time.Millisecond) {
			if time.Since(begin) > 15*time.Second {
				t.Fatalf("%q is not on the terminal: %q", what, seen.String())
			}
		}
	}
	say("stty size\n")
	see("20 70")
	if err := ws.Write(ctx, websocket.MessageText, []byte(`{"type":"resize","rows":41,"cols":99}`)); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		say("stty size\n")
		time.Sleep(100 * time.Millisecond)
		if strings.Contains(seen.String(), "41 99") {
			break
		}
	}
	see("41 99")
	say("echo b''egin; sleep 100\n")
	see("begin")
	time.Sleep(300 * time.Millisecond) // until sleep has the terminal
	say("\x03")
	say("echo code-$?\n")
	see("code-130")
	say("exit 12\n")
	select {
	case e := <-exit:
		if e.Exit.Code != 12 {
			t.Errorf("exit: %+v", e)
		}
	case <-ctx.Done():
		t.Errorf("no exit was told: %q", seen.String())
	}
}
