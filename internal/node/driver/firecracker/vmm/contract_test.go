package vmm

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// step is one thing that is done with a client, and the number of recorded
// exchanges that it makes. How the last of them was answered says what it must
// return.
type step struct {
	exchanges int
	do        func(ctx context.Context, c *Client) error
}

// public is a step of one request.
func public(do func(ctx context.Context, c *Client) error) step { return step{1, do} }

// other asks something that the client has no method for, or a method wouldn't
// ask in this way: it goes through the same code below.
func other(method, path string, body any) step {
	return step{1, func(ctx context.Context, c *Client) error {
		if method == http.MethodGet {
			return c.call(ctx, method, path, body, &struct{}{})
		}
		return c.call(ctx, method, path, body, nil)
	}}
}

// is wants these words of a VMM about itself.
func is(id, state, version string) step {
	return public(func(ctx context.Context, c *Client) error {
		got, err := c.Info(ctx)
		if want := (Info{id, state, version}); err == nil && got != want {
			return errors.New("info is " + got.ID + ", " + got.State + ", " + got.Version)
		}
		return err
	})
}

func configure(exchanges int, cfg Config) step {
	return step{exchanges, func(ctx context.Context, c *Client) error { return c.Configure(ctx, cfg) }}
}

var (
	start  = public(func(ctx context.Context, c *Client) error { return c.Start(ctx) })
	pause  = public(func(ctx context.Context, c *Client) error { return c.Pause(ctx) })
	resume = public(func(ctx context.Context, c *Client) error { return c.Resume(ctx) })
)

func save(state, mem string) step {
	return public(func(ctx context.Context, c *Client) error { return c.Save(ctx, state, mem) })
}

func load(state, mem string) step {
	return public(func(ctx context.Context, c *Client) error { return c.Load(ctx, state, mem) })
}

// later is a load with a field that only later releases know.
func later(field string, value any) step {
	body := json.RawMessage(`{"snapshot_path":"/jail/state","mem_backend":{"backend_type":"File","backend_path":"/jail/mem"},"` + field + `":` + string(must(json.Marshal(value))) + `}`)
	return other("PUT", "/snapshot/load", body)
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// contract is how this client asks everything that is recorded, by the name of
// the recorded process.
var contract = map[string][]step{
	"1.13.0.txt p1": {
		is("p1", NotStarted, "1.13.0"),
		other("GET", "/version", nil),
		other("GET", "/machine-config", nil),
		start,
		pause,
		configure(1, Config{VCPUs: 0, MemoryMiB: 128}),
		configure(2, Config{VCPUs: 1, MemoryMiB: 128, Kernel: "/nope", Args: "x"}),
		other("PUT", "/drives/rootfs", driveBody{ID: "rootfs", Path: "/nope", Root: true}),
		other("PUT", "/drives/other", driveBody{ID: "rootfs", Path: "/l2/rootfs.ext4", Root: true}),
		other("PUT", "/network-interfaces/eth0", json.RawMessage(`{"iface_id":"eth0","host_dev_name":"tap9"}`)),
		other("PUT", "/nosuch", struct{}{}),
		other("PUT", "/vsock", vsockBody{2, "/tmp/pv.sock"}),
		other("PUT", "/vsock", vsockBody{3, "/tmp/pv.sock"}),
		load("/nope", "/nope"),
		other("PUT", "/boot-source", bootBody{Kernel: "/l2/vmlinux-krunfw-6.12.91", Args: "root=/dev/vda rw init=/init reboot=t panic=1 pci=off quiet"}),
		other("PUT", "/drives/rootfs", driveBody{ID: "rootfs", Path: "/l2/rootfs.ext4", Root: true}),
		start,
		is("p1", Running, "1.13.0"),
		start,
		save("/tmp/s", "/tmp/m"),
		pause,
		pause,
		is("p1", Paused, "1.13.0"),
		other("PUT", "/snapshot/create", saveBody{"Diff", "/tmp/s", "/tmp/m"}),
		save("/nodir/s", "/tmp/m"),
		load("/tmp/s", "/tmp/m"),
		resume,
		resume,
		other("GET", "/vm/config", nil),
	},
	"1.12.1.txt p1": {
		is("p1", NotStarted, "1.12.1"),
		other("PUT", "/hotplug/memory", struct{}{}),
		other("PUT", "/serial", struct{}{}),
		other("PUT", "/pmem/one", struct{}{}),
		configure(2, Config{VCPUs: 1, MemoryMiB: 128, Kernel: "/jail/vmlinux", Initrd: "/nope", Args: "panic=0"}),
		configure(6, Config{
			VCPUs: 1, MemoryMiB: 128, Kernel: "/jail/vmlinux", Initrd: "/jail/initrd", Args: "panic=0",
			Drives: []Drive{
				{ID: "template", Path: "/jail/template", ReadOnly: true},
				{ID: "disk", Path: "/jail/disk", Writeback: true},
			},
			VsockCID: 3, VsockPath: "v.sock", Entropy: true,
		}),
		other("PUT", "/balloon", json.RawMessage(`{"amount_mib":0,"deflate_on_oom":true,"stats_polling_interval_s":1}`)),
		other("GET", "/vm/config", nil),
		start,
		is("p1", Running, "1.12.1"),
		pause,
		is("p1", Paused, "1.12.1"),
		other("PUT", "/snapshot/create", saveBody{"Diff", "/jail/state", "/jail/mem"}),
		save("/jail/state", "/jail/mem"),
		is("p1", Paused, "1.12.1"),
	},
	"1.12.1.txt p2": {
		later("vsock_override", map[string]string{"uds_path": "w.sock"}),
		later("clock_realtime", true),
		is("p2", NotStarted, "1.12.1"),
		load("/jail/state", "/jail/mem"),
		is("p2", Paused, "1.12.1"),
		load("/jail/state", "/jail/mem"),
		resume,
		is("p2", Running, "1.12.1"),
	},
	"1.12.1.txt p3": {load("/nope", "/jail/mem")},
	"1.12.1.txt p4": {load("/jail/garbage", "/jail/mem")},
	"1.12.1.txt p5": {load("/jail/state", "/jail/garbage")},
}

// recorded are the files of exchanges, and how many each holds.
var recorded = map[string]int{"1.13.0.txt": 30, "1.12.1.txt": 32}

func TestContract(t *testing.T) {
	used := map[string]int{}
	for file := range recorded {
		for _, p := range readRecording(t, file) {
			t.Run(p.name(), func(t *testing.T) {
				f := serve(t, p, nil)
				follow(t, f, p)
				used[file] += f.used
			})
		}
	}
	// Every recorded exchange is asked for by this client: none is only kept.
	for file, want := range recorded {
		if used[file] != want {
			t.Errorf("%s: %d exchanges were used of %d", file, used[file], want)
		}
	}
}

// TestEveryRecordingIsUsed finds recordings that no test reads.
func TestEveryRecordingIsUsed(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if name := filepath.Base(f); recorded[name] == 0 && name != staleSocket {
			t.Errorf("%s is read by no test", f)
		}
	}
	data, err := os.ReadFile("testdata/1.13.0.txt")
	if err != nil {
		t.Fatal(err)
	}
	// Counted without the parser, so that it can't lose any.
	if n := strings.Count(string(data), "\n\n") - 1; n != recorded["1.13.0.txt"] {
		t.Errorf("1.13.0.txt has %d paragraphs of exchanges, not %d", n, recorded["1.13.0.txt"])
	}
}

// follow takes the contract's steps with a client of f, and holds what each
// returns to the recorded answer.
func follow(t *testing.T, f *fakeVMM, p process) {
	t.Helper()
	c := New(f.socket)
	defer c.Close()
	at := 0
	for _, s := range contract[p.name()] {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		err := s.do(ctx, c)
		cancel()
		at += s.exchanges
		if at > len(p.exchanges) || len(p.exchanges)-at != f.left() {
			t.Fatalf("%s: the client made another number of requests than %d", p.name(), s.exchanges)
		}
		e := p.exchanges[at-1]
		checkOutcome(t, e, err)
		if e.exits {
			if err := c.Pause(t.Context()); !errors.Is(err, ErrGone) {
				t.Errorf("%s: after the VMM's exit: %v", e.where, err)
			}
		}
	}
	if n := f.left(); n != 0 {
		t.Errorf("%s: %d recorded exchanges are left", p.name(), n)
	}
}

// checkOutcome holds what the client returned to what the VMM said.
func checkOutcome(t *testing.T, e exchange, err error) {
	t.Helper()
	if e.status < 400 {
		if err != nil {
			t.Errorf("%s: %s: %v", e.where, e.request(), err)
		}
		return
	}
	var said struct {
		Message string `json:"fault_message"`
	}
	if err := json.Unmarshal([]byte(e.answer), &said); err != nil {
		t.Fatal(err)
	}
	var fault *Fault
	if !errors.As(err, &fault) || fault.Status != e.status || fault.Message != said.Message {
		t.Errorf("%s: %s:\n  got %v\n want %s", e.where, e.request(), err, said.Message)
		return
	}
	want := "the VMM refused " + e.method + " " + e.path + ": " + said.Message
	if our := sandbox.AsError(err); our.Class != sandbox.Internal || our.Code != "vmm_fault" || our.Message != want {
		t.Errorf("%s: class %s, code %s: %s", e.where, our.Class, our.Code, our.Message)
	}
}
