// Package vmm is a thin client of the API socket of one Firecracker process:
// only the requests that the driver makes, and no state of its own. It starts
// and ends no process, and knows no jail: the driver, its only caller, does.
//
// What always holds: every request has its own connection, since a VMM may die
// between two of them; a VMM is as hostile as the machine in it, so its socket
// is never followed through a symbolic link, and what it answers is bounded in
// size by this package and in time by the caller's context; a request is sent
// at most once, never again by itself.
//
// Source of the protocol: Firecracker's API specification of release 1.12
// (src/firecracker/swagger/firecracker.yaml), and the answers of real VMMs in
// testdata.
package vmm

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"regexp"

	"cloche.dev/cloche/internal/sandbox"
)

// Client speaks to one VMM. Its methods may be called concurrently; the VMM
// takes one request after the other. Give each a context that ends: nothing
// else bounds how long a VMM may keep silent.
//
// What they return can be asked for with errors.As and errors.Is: *Fault where
// the VMM refused, ErrGone where none is there any more, the context's error
// where that ended first. Anything else is an answer that isn't Firecracker's.
type Client struct {
	socket string
	life   context.Context // ends with Close
	end    context.CancelFunc
}

// New returns a client of the VMM whose API socket has this path on the host,
// of any length. It connects to nothing yet.
func New(socket string) *Client {
	c := &Client{socket: socket}
	c.life, c.end = context.WithCancel(context.Background())
	return c
}

// Close ends the requests under way and lets no more be made: they fail with
// net.ErrClosed. The VMM notices nothing of it but an end of a connection.
func (c *Client) Close() { c.end() }

// The states that a VMM tells of its machine.
const (
	NotStarted = "Not started"
	Running    = "Running"
	Paused     = "Paused"
)

// Info is what a VMM says of itself.
type Info struct {
	ID      string // what --id named it, at most 64 letters, digits and "-"
	State   string // NotStarted, Running or Paused
	Version string // "1.12.1"
}

// Config is a machine that isn't started. Paths are as the VMM sees them.
type Config struct {
	VCPUs     int // 1 to 32; the threads of a core are never shared out (no SMT)
	MemoryMiB int
	Kernel    string // an uncompressed ELF kernel
	Initrd    string // "" for none
	Args      string // the kernel's command line
	Drives    []Drive
	VsockCID  uint32 // the guest's context id, 3 or more; 0 for no vsock device
	VsockPath string // of the unix socket that stands for the vsock device
	Entropy   bool   // whether there is an entropy device
	Tap       string // the host's link that the network device is the other end of; "" for no such device
	MAC       string // the network device's address
}

// Drive is one block device. None is ever the kernel's root: the initrd mounts
// what it wants.
type Drive struct {
	ID        string // letters, digits and "_"
	Path      string
	ReadOnly  bool
	Writeback bool // the guest's flushes reach the host's disk; without it they are lost
}

// The bodies of the requests. Fields that have the default's value are left
// out, so that a release that doesn't know one is only told of it where needed.
type (
	machineBody struct {
		VCPUs  int `json:"vcpu_count"`
		Memory int `json:"mem_size_mib"`
	}
	bootBody struct {
		Kernel string `json:"kernel_image_path"`
		Initrd string `json:"initrd_path,omitempty"`
		Args   string `json:"boot_args"`
	}
	driveBody struct {
		ID       string `json:"drive_id"`
		Path     string `json:"path_on_host"`
		Root     bool   `json:"is_root_device"`
		ReadOnly bool   `json:"is_read_only"`
		Cache    string `json:"cache_type,omitempty"`
	}
	vsockBody struct {
		CID  uint32 `json:"guest_cid"`
		Path string `json:"uds_path"`
	}
	entropyBody struct{}
	networkBody struct {
		ID  string `json:"iface_id"`
		Tap string `json:"host_dev_name"`
		MAC string `json:"guest_mac"`
	}
	actionBody struct {
		Action string `json:"action_type"`
	}
	stateBody struct {
		State string `json:"state"`
	}
	saveBody struct {
		Type  string `json:"snapshot_type"`
		State string `json:"snapshot_path"`
		Mem   string `json:"mem_file_path"`
	}
	loadBody struct {
		State   string      `json:"snapshot_path"`
		Backend backendBody `json:"mem_backend"`
	}
	backendBody struct {
		Type string `json:"backend_type"`
		Path string `json:"backend_path"`
	}
)

// infoBody is the answer to GET /.
type infoBody struct {
	ID      string `json:"id"`
	State   string `json:"state"`
	Version string `json:"vmm_version"`
}

var (
	validID      = regexp.MustCompile(`^[0-9A-Za-z-]{1,64}$`)
	validVersion = regexp.MustCompile(`^[0-9A-Za-z.+-]{1,64}$`)
)

// Info asks a VMM who it is and how its machine is.
func (c *Client) Info(ctx context.Context) (Info, error) {
	var b infoBody
	if err := c.call(ctx, http.MethodGet, "/", nil, &b); err != nil {
		return Info{}, err
	}
	if !validID.MatchString(b.ID) || !validVersion.MatchString(b.Version) {
		return Info{}, strange("GET /", fmt.Errorf("id %q, version %q", clean(b.ID), clean(b.Version)))
	}
	switch b.State {
	case NotStarted, Running, Paused:
	default:
		return Info{}, strange("GET /", fmt.Errorf("state %q", clean(b.State)))
	}
	return Info(b), nil
}

// Configure describes the machine to a VMM that has not started one. The VMM
// opens files and binds the vsock's socket at once, so what is missing is told
// here. It ends at the first *Fault; the VMM then stays half configured.
func (c *Client) Configure(ctx context.Context, cfg Config) error {
	if err := c.put(ctx, "/machine-config", machineBody{cfg.VCPUs, cfg.MemoryMiB}); err != nil {
		return err
	}
	if err := c.put(ctx, "/boot-source", bootBody{cfg.Kernel, cfg.Initrd, cfg.Args}); err != nil {
		return err
	}
	for _, d := range cfg.Drives {
		b := driveBody{ID: d.ID, Path: d.Path, ReadOnly: d.ReadOnly}
		if d.Writeback {
			b.Cache = "Writeback"
		}
		if err := c.put(ctx, "/drives/"+url.PathEscape(d.ID), b); err != nil {
			return err
		}
	}
	if cfg.VsockCID != 0 {
		if err := c.put(ctx, "/vsock", vsockBody{cfg.VsockCID, cfg.VsockPath}); err != nil {
			return err
		}
	}
	if cfg.Tap != "" {
		if err := c.put(ctx, "/network-interfaces/eth0", networkBody{"eth0", cfg.Tap, cfg.MAC}); err != nil {
			return err
		}
	}
	if cfg.Entropy {
		return c.put(ctx, "/entropy", entropyBody{})
	}
	return nil
}

// Start boots the configured machine. That it returns nil says that the VMM
// runs the machine, not that its kernel gets anywhere. After a *Fault (no KVM,
// for one) the VMM goes on living without a machine.
func (c *Client) Start(ctx context.Context) error {
	return c.put(ctx, "/actions", actionBody{"InstanceStart"})
}

// Pause makes the machine's processors stand still. Pausing again is fine.
func (c *Client) Pause(ctx context.Context) error { return c.setState(ctx, "Paused") }

// Resume makes them go on. Resuming a running machine is fine.
func (c *Client) Resume(ctx context.Context) error { return c.setState(ctx, "Resumed") }

func (c *Client) setState(ctx context.Context, state string) error {
	return c.call(ctx, http.MethodPatch, "/vm", stateBody{state}, nil)
}

// Save writes the whole state of a paused machine and its memory to two files,
// paths as the VMM sees them, and leaves it paused. It takes as long as the
// memory takes to write. The disk is the caller's to copy while it is paused.
func (c *Client) Save(ctx context.Context, state, mem string) error {
	return c.put(ctx, "/snapshot/create", saveBody{"Full", state, mem})
}

// Load makes the machine that Save wrote, in a VMM that has had no other
// request but Info, and leaves it paused. The memory file stays mapped, private
// to this VMM. After a *Fault the VMM process exits by itself, unless it was the
// request that it couldn't read: never use it again.
func (c *Client) Load(ctx context.Context, state, mem string) error {
	return c.put(ctx, "/snapshot/load", loadBody{state, backendBody{"File", mem}})
}

func (c *Client) put(ctx context.Context, path string, body any) error {
	return c.call(ctx, http.MethodPut, path, body, nil)
}

// Fault is a VMM's own refusal of a request. The message is its words, at most
// 1 KiB of printable text, and may differ between releases: show it, don't
// decide by it.
type Fault struct {
	Status  int // of HTTP, 400 and more
	Message string
}

// Error returns what the VMM said.
func (f *Fault) Error() string {
	if f.Message == "" {
		return fmt.Sprintf("status %d without a reason", f.Status)
	}
	return f.Message
}

// strange tells of an answer that no Firecracker gives.
func strange(request string, err error) error {
	return sandbox.Errorf(sandbox.Internal, "vmm_answer", "the VMM gave a strange answer to %s: %w", request, err)
}
