package agent_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
)

// extra is a client on a connection of its own.
func (g *guest) extra() guestv1connect.GuestClient {
	g.t.Helper()
	c, closer, err := g.link.Extra(g.ctx(20 * time.Second))
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = closer.Close() })
	return c
}

func write(t *testing.T, c guestv1connect.GuestClient, open *guestv1.WriteOpen, pieces ...string) error {
	t.Helper()
	s := c.Write(t.Context())
	_ = s.Send(&guestv1.WriteRequest{Open: open}) // its failure is CloseAndReceive's
	for _, p := range pieces {
		_ = s.Send(&guestv1.WriteRequest{Data: []byte(p)})
	}
	r, err := s.CloseAndReceive()
	if err == nil && r.Msg.Written != uint64(len(strings.Join(pieces, ""))) {
		t.Errorf("written %d", r.Msg.Written)
	}
	return err
}

func TestFiles(t *testing.T) {
	g := newGuest(t, nil)
	c, dir := g.extra(), g.dir()
	ctx := t.Context()
	file := dir + "/a/b/file"
	if err := write(t, c, &guestv1.WriteOpen{Path: file, Mode: 0o4751, User: "nobody:daemon", Parents: true}, "hello ", "world"); err != nil {
		t.Fatal(err)
	}
	st, err := c.Stat(ctx, connect.NewRequest(&guestv1.StatRequest{Path: file}))
	if i := st.Msg.GetInfo(); err != nil || i.Type != "file" || i.Size != 11 || i.Mode != 0o4751 || i.Uid != 65534 || i.Gid != 1 || i.Name != "file" {
		t.Errorf("%v %v", i, err)
	}
	// A replaced file keeps mode and owner; a write at an offset stays in
	// place (and may lose the set-id bits, as with any write).
	if err := write(t, c, &guestv1.WriteOpen{Path: file}, "0123456789"); err != nil {
		t.Error(err)
	}
	if err := write(t, c, &guestv1.WriteOpen{Path: file, AtOffset: true, Offset: 4}, "xy"); err != nil {
		t.Error(err)
	}
	st, err = c.Stat(ctx, connect.NewRequest(&guestv1.StatRequest{Path: file}))
	if i := st.Msg.GetInfo(); err != nil || i.Mode&0o777 != 0o751 || i.Uid != 65534 {
		t.Errorf("replaced: %v %v", i, err)
	}
	for _, r := range []struct {
		m    *guestv1.ReadRequest
		want string
	}{
		{&guestv1.ReadRequest{Path: file, Whole: true}, "0123xy6789"},
		{&guestv1.ReadRequest{Path: file, Offset: 3, Length: 4}, "3xy6"},
		{&guestv1.ReadRequest{Path: file, Offset: 8, Whole: true}, "89"},
		{&guestv1.ReadRequest{Path: file, Offset: 50, Length: 5}, ""},
		{&guestv1.ReadRequest{Path: file}, ""},
	} {
		s, err := c.Read(ctx, connect.NewRequest(r.m))
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for s.Receive() {
			got += string(s.Msg().GetData())
		}
		if s.Err() != nil || got != r.want {
			t.Errorf("%v: %q %v", r.m, got, s.Err())
		}
		_ = s.Close()
	}
	if _, err := c.Mkdir(ctx, connect.NewRequest(&guestv1.MkdirRequest{Path: dir + "/d", Mode: 0o1777})); err != nil {
		t.Error(err)
	}
	if _, err := c.Move(ctx, connect.NewRequest(&guestv1.MoveRequest{From: file, To: dir + "/d/moved"})); err != nil {
		t.Error(err)
	}
	ls, err := c.List(ctx, connect.NewRequest(&guestv1.ListRequest{Path: dir}))
	names := map[string]string{}
	for err == nil && ls.Receive() {
		for _, e := range ls.Msg().GetEntries() {
			names[e.Name] = e.Type
		}
	}
	if err != nil || ls.Err() != nil || len(names) != 2 || names["d"] != "dir" {
		t.Errorf("%v %v", names, err)
	}
	_ = ls.Close()
	_, err = c.Remove(ctx, connect.NewRequest(&guestv1.RemoveRequest{Path: dir + "/d"}))
	if connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("removing a full directory: %v", err)
	}
	if _, err = c.Remove(ctx, connect.NewRequest(&guestv1.RemoveRequest{Path: dir + "/d", Recursive: true})); err != nil {
		t.Error(err)
	}
	for path, want := range map[string]connect.Code{
		dir + "/d": connect.CodeNotFound, "relative": connect.CodeInvalidArgument, "/a\x00b": connect.CodeInvalidArgument, "/etc/passwd/x": connect.CodeFailedPrecondition,
	} {
		if _, err := c.Stat(ctx, connect.NewRequest(&guestv1.StatRequest{Path: path})); connect.CodeOf(err) != want {
			t.Errorf("%q: %v", path, err)
		}
	}
	for _, path := range []string{"/dev/zero", "/proc"} {
		if err := write(t, c, &guestv1.WriteOpen{Path: path}, "x"); connect.CodeOf(err) != connect.CodeFailedPrecondition {
			t.Errorf("%q: %v", path, err)
		}
	}
}

// A transfer that breaks off leaves what was there.
func TestBrokenWrite(t *testing.T) {
	g := newGuest(t, nil)
	dir := g.dir()
	if err := write(t, g.c, &guestv1.WriteOpen{Path: dir + "/f"}, "old"); err != nil {
		t.Fatal(err)
	}
	c, closer, err := g.link.Extra(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := c.Write(t.Context())
	_ = s.Send(&guestv1.WriteRequest{Open: &guestv1.WriteOpen{Path: dir + "/f"}, Data: []byte("half of the ne")})
	time.Sleep(100 * time.Millisecond)
	_ = closer.Close()
	_, _ = s.CloseAndReceive()
	eventually(t, func() bool { return strings.TrimSpace(g.run("ls -A "+dir).out.String()) == "f" })
	if got := g.read(dir + "/f"); got != "old" {
		t.Errorf("%q", got)
	}
}

func tarIn(t *testing.T, c guestv1connect.GuestClient, dir, user string, data []byte) (uint64, error) {
	t.Helper()
	s := c.TarIn(t.Context())
	_ = s.Send(&guestv1.TarInRequest{Open: &guestv1.TarInOpen{Path: dir, User: user}})
	for len(data) > 0 {
		n := min(len(data), 64<<10)
		_ = s.Send(&guestv1.TarInRequest{Data: data[:n]})
		data = data[n:]
	}
	r, err := s.CloseAndReceive()
	if err != nil {
		return 0, err
	}
	return r.Msg.Entries, nil
}

func tarOut(t *testing.T, c guestv1connect.GuestClient, path string) []byte {
	t.Helper()
	s, err := c.TarOut(t.Context(), connect.NewRequest(&guestv1.TarOutRequest{Path: path}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var b bytes.Buffer
	for s.Receive() {
		b.Write(s.Msg().GetData())
	}
	if s.Err() != nil {
		t.Fatal(s.Err())
	}
	return b.Bytes()
}

func TestTarRoundTrip(t *testing.T) {
	g := newGuest(t, nil)
	c, dir := g.extra(), g.dir()
	r := g.run("cd " + dir + ` && mkdir -p src/sub && cd src && echo hi > sub/file && chown 65534:1 sub/file && chmod 4755 sub/file &&
		ln sub/file hard && ln -s ../sub/file sub/soft && touch -d '2001-02-03 04:05:06.5' sub/file && mkdir -m 1777 sticky && head -c 300000 /dev/urandom > big &&
		truncate -s 50M sparse && touch -d 2002-02-02 sub sticky`)
	if r.exit.Code != 0 {
		t.Fatalf("%v %s", r.exit, &r.err)
	}
	data := tarOut(t, c, dir+"/src")
	n, err := tarIn(t, c, dir+"/dst", "", data)
	if err != nil || n != 8 {
		t.Fatalf("%d entries: %v", n, err)
	}
	const show = `find . ! -name . -printf '%p %T@ %n\n'; find . ! -name . -printf '%p %y %m %U:%G %l ' \( -type f -exec sha256sum {} \; -o -printf '\n' \)`
	a, b := g.run("cd "+dir+"/src && ("+show+") | sort"), g.run("cd "+dir+"/dst && ("+show+") | sort")
	if a.out.String() != b.out.String() || a.out.Len() == 0 {
		t.Errorf("sent:\n%s\ngot:\n%s%s", &a.out, &b.out, &b.err)
	}
	if r := g.run("du -k " + dir + "/dst/sparse"); !strings.HasPrefix(r.out.String(), "0\t") {
		t.Logf("the sparse file takes %s", &r.out)
	}
	if _, err := tarIn(t, c, dir+"/owned", "nobody", data); err != nil {
		t.Error(err)
	}
	if r := g.run("find " + dir + "/owned/* ! -user nobody"); r.out.Len() != 0 {
		t.Errorf("not nobody's: %s", &r.out)
	}
	one := tarOut(t, c, dir+"/src/big")
	if h, err := tar.NewReader(bytes.NewReader(one)).Next(); err != nil || h.Name != "big" || h.Size != 300000 {
		t.Errorf("%v %v", h, err)
	}
}

func TestHostileTars(t *testing.T) {
	g := newGuest(t, nil)
	c := g.extra()
	reg := func(name string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: 1}
	}
	for _, k := range []struct {
		name string
		hs   []*tar.Header
		code connect.Code
	}{
		{"dot dot", []*tar.Header{reg("../evil")}, connect.CodeInvalidArgument},
		{"dot dot inside", []*tar.Header{reg("a/../../evil")}, connect.CodeInvalidArgument},
		{"absolute", []*tar.Header{reg("/evil")}, 0},
		{"link out", []*tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, reg("l/evil")}, connect.CodeInvalidArgument},
		{"absolute link", []*tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/tmp"}, reg("l/evil")}, connect.CodeInvalidArgument},
		{"link chain", []*tar.Header{{Name: "a", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "a/b", Typeflag: tar.TypeSymlink, Linkname: "../.."}, reg("a/b/evil")}, connect.CodeInvalidArgument},
		{"dir over link", []*tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/tmp"}, {Name: "l", Typeflag: tar.TypeDir, Mode: 0o755}, reg("l/evil")}, 0},
		{"file over link", []*tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../evil"}, reg("l")}, 0},
		{"hard link out", []*tar.Header{{Name: "h", Typeflag: tar.TypeLink, Linkname: "../../etc/passwd"}}, connect.CodeInvalidArgument},
		{"hard link through link", []*tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}, {Name: "h", Typeflag: tar.TypeLink, Linkname: "l/passwd"}}, connect.CodeInvalidArgument},
		{"device", []*tar.Header{{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}, connect.CodeInvalidArgument},
		{"duplicates", []*tar.Header{reg("x"), reg("x"), reg("x")}, 0},
		{"link loop", []*tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "l"}, reg("l/x")}, connect.CodeInvalidArgument},
	} {
		t.Run(k.name, func(t *testing.T) {
			g.t = t
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for _, h := range k.hs {
				if err := w.WriteHeader(h); err != nil {
					t.Fatal(err)
				}
				if h.Size > 0 {
					_, _ = w.Write([]byte("x"))
				}
			}
			_ = w.Close()
			dir := g.dir()
			_, err := tarIn(t, c, dir+"/root", "", b.Bytes())
			if k.code == 0 && err != nil || k.code != 0 && connect.CodeOf(err) != k.code {
				t.Errorf("%v", err)
			}
			if r := g.run("ls -A " + dir + "; ls /tmp/evil /evil 2>/dev/null"); r.out.String() != "root\n" {
				t.Errorf("it got out: %s", &r.out)
			}
		})
	}
	g.t = t
	if _, err := tarIn(t, c, g.dir(), "", bytes.Repeat([]byte("junk"), 1000)); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("junk: %v", err)
	}
	// 10 GB of nothing: a hole stays a hole.
	if testing.Short() {
		return
	}
	dir := g.dir()
	r := g.run("cd " + dir + " && truncate -s 10G hole && tar -cSf hole.tar hole && rm hole")
	if r.exit.Code != 0 {
		t.Fatalf("%v %s", r.exit, &r.err)
	}
	if _, err := tarIn(t, c, dir+"/x", "", []byte(g.read(dir+"/hole.tar"))); err != nil {
		t.Error(err)
	}
}

func TestTunnel(t *testing.T) {
	g := newGuest(t, nil)
	if g.cmd == nil {
		t.Skip("SKIP: the server of this test is on the host")
	}
	for _, network := range []string{"tcp", "unix"} {
		address := "127.0.0.1:0"
		if network == "unix" {
			address = t.TempDir() + "/s"
		}
		ln, err := net.Listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan struct{})
		go func() { // ends when the listener is closed
			defer close(served)
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				b, _ := io.ReadAll(c)
				_, _ = c.Write(bytes.ToUpper(b))
				_ = c.Close()
			}
		}()
		address = ln.Addr().String()
		if network == "unix" {
			address = "unix:" + address
		}
		s := g.extra().Tunnel(g.ctx(20 * time.Second))
		_ = s.Send(&guestv1.TunnelRequest{Address: address})
		_ = s.Send(&guestv1.TunnelRequest{Data: []byte("through ")})
		_ = s.Send(&guestv1.TunnelRequest{Data: []byte("it"), CloseWrite: true})
		got := ""
		for {
			m, err := s.Receive()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			got += string(m.GetData())
		}
		if got != "THROUGH IT" {
			t.Errorf("%s: %q", network, got)
		}
		_ = s.CloseRequest()
		_ = s.CloseResponse()
		_ = ln.Close()
		<-served
	}
	for address, want := range map[string]connect.Code{"127.0.0.1:1": connect.CodeFailedPrecondition, "nonsense": connect.CodeInvalidArgument} {
		s := g.c.Tunnel(t.Context())
		_ = s.Send(&guestv1.TunnelRequest{Address: address})
		if _, err := s.Receive(); connect.CodeOf(err) != want {
			t.Errorf("%s: %v", address, err)
		}
		_ = s.CloseRequest()
		_ = s.CloseResponse()
	}
}
