package agent_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/guestlink"
)

func request[T any](m *T) *connect.Request[T] { return connect.NewRequest(m) }

func code(err error) string {
	if err == nil {
		return ""
	}
	return connect.CodeOf(err).String()
}

const hooks = "/etc/cloche/on_restore.d/"

// TestHooks: they run in order, with what they need to know, once for each
// generation, and their failures are told and harm nobody.
func TestHooks(t *testing.T) {
	g := newPrivateGuest(t, map[string]string{
		hooks + "10-first":  "#!/bin/sh\necho $CLOCHE_GENERATION $CLOCHE_SANDBOX $CLOCHE_SOURCE $SECRET $(id -u) $(cat /run/cloche/generation /etc/machine-id)\necho 10 >>/run/ran\n",
		hooks + "20-fails":  "#!/bin/sh\necho oops >&2\necho 20 >>/run/ran\nexit 3\n",
		hooks + "30-dies":   "#!/bin/sh\necho 30 >>/run/ran\nkill -9 $$\n",
		hooks + "40-talks":  "#!/bin/sh\necho 40 >>/run/ran\nhead -c 100000 /dev/zero | tr '\\0' '\\377'\n",
		hooks + "50-leaves": "#!/bin/sh\necho 50 >>/run/ran\nsleep 300 &\n",
		hooks + "60-odd":    "#!/nonexistent\n",
		hooks + "70 space":  "#!/bin/sh\necho 70 >>/run/ran\n",
		hooks + "80-not":    "not executable\n",
		hooks + "90/dir":    "#!/bin/sh\n",
	})
	key := guestapi.NewKey()
	if r := g.connect(guestlink.Config{Key: key, Epoch: 1, Setup: &guestv1.SetupRequest{Generation: 1, MachineId: idA}}); len(r.GetHooks()) != 0 {
		t.Fatalf("hooks of a fresh boot: %v", r)
	}
	setup := &guestv1.SetupRequest{
		Generation: 7, Restored: true, MachineId: idB, Hostname: "box", Source: "sbx_parent", Env: map[string]string{"SECRET": "s", "CLOCHE_SANDBOX": "lie"},
	}
	next := guestapi.NewKey()
	got := g.connect(guestlink.Config{Key: next, Former: key, Epoch: 7, Setup: setup})
	checkHooks(t, got)
	ran := "10\n20\n30\n40\n50\n"
	if r := g.run("cat /run/ran"); r.out.String() != ran {
		t.Errorf("ran %q", &r.out)
	}
	// The same generation again, also by another agent and with another hook: nothing runs.
	g.put(hooks+"55-late", "#!/bin/sh\necho 55 >>/run/ran\n", 0o755)
	checkHooks(t, g.connect(guestlink.Config{Key: next, Welcomed: true, Epoch: 7, Setup: setup}))
	g.killAgent()
	checkHooks(t, g.connect(guestlink.Config{Key: next, Welcomed: true, Epoch: 7, Setup: setup}))
	if r := g.run("cat /run/ran"); r.out.String() != ran {
		t.Errorf("ran again: %q", &r.out)
	}
	setup.Generation = 8
	if r := g.connect(guestlink.Config{Key: guestapi.NewKey(), Former: next, Epoch: 8, Setup: setup}); len(r.GetHooks()) != 7 {
		t.Errorf("of the next generation: %v", r)
	}
	// Nobody is left of them but who was meant to be.
	eventually(t, func() bool { return g.run("cat /proc/[0-9]*/stat | grep -c ' Z '").out.String() == "0\n" })
}

func checkHooks(t *testing.T, got *guestv1.SetupResponse) {
	t.Helper()
	want := []struct {
		name string
		code int32
		out  string
	}{
		{"10-first", 0, "7 box sbx_parent s 0 7 " + idB + "\n"},
		{"20-fails", 3, "oops\n"},
		{"30-dies", 137, ""},
		{"40-talks", 0, "?"},
		{"50-leaves", 0, ""},
		{"60-odd", 126, ""},
	}
	if len(got.GetHooks()) != len(want) {
		t.Fatalf("%v", got)
	}
	for i, w := range want {
		h := got.GetHooks()[i]
		exact := w.out != "?" && w.code != 126
		if h.GetName() != w.name || h.GetCode() != w.code || exact && h.GetOutput() != w.out || len(h.GetOutput()) > 4<<10 {
			t.Errorf("%+v, want %+v", h, w)
		}
	}
}

// TestSlowHooks: one that hangs is killed with all that it started, and an
// agent that dies among them neither repeats one nor leaves out the rest.
func TestSlowHooks(t *testing.T) {
	g := newPrivateGuest(t, map[string]string{
		hooks + "1-agent": "#!/bin/sh\necho 1 >>/run/ran\nkill -9 $PPID\nsleep 1\n",
		hooks + "2-hangs": "#!/bin/sh\necho 2 >>/run/ran\nsleep 77 & sleep 77\n",
		hooks + "3-last":  "#!/bin/sh\necho 3 >>/run/ran\n",
	})
	key := guestapi.NewKey()
	g.connect(guestlink.Config{Key: key, Epoch: 1, Setup: &guestv1.SetupRequest{Generation: 1}})
	began := time.Now()
	got := g.connect(guestlink.Config{Key: guestapi.NewKey(), Former: key, Epoch: 2, Setup: &guestv1.SetupRequest{Generation: 2, Restored: true}})
	if d := time.Since(began); d > 20*time.Second {
		t.Errorf("took %v", d)
	}
	codes := []int32{}
	for _, h := range got.GetHooks() {
		codes = append(codes, h.GetCode())
	}
	if len(codes) != 3 || codes[0] != 125 || codes[1] != 124 || codes[2] != 0 {
		t.Errorf("%v", got)
	}
	if r := g.run("cat /run/ran; ps ax | grep -c '[s]leep 77'"); r.out.String() != "1\n2\n3\n0\n" {
		t.Errorf("%q", &r.out)
	}
}

// TestOthers: what is neither ours nor a session's main process is counted.
func TestOthers(t *testing.T) {
	g := newPrivateGuest(t, nil)
	g.connect(guestlink.Config{Key: guestapi.NewKey(), Epoch: 1, Setup: &guestv1.SetupRequest{}})
	others := func() uint64 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		r, err := g.c.Sessions(ctx, request(&guestv1.SessionsRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg.GetOthers()
	}
	eventually(t, func() bool { return others() == 0 })
	main := g.sh("exec sleep 300")
	g.run("sleep 300 & sleep 300 & true")
	eventually(t, func() bool { return others() == 2 })
	if r := g.run("pkill sleep; cat /proc/1/comm"); strings.TrimSpace(r.out.String()) == "" {
		t.Errorf("%q", &r.err)
	}
	g.follow(main, nil)
	eventually(t, func() bool { return others() == 0 })
}
