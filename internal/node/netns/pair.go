package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/vishvananda/netlink"
	vishnetns "github.com/vishvananda/netns"

	"cloche.dev/cloche/internal/sandbox"
)

// What every machine's network looks like. Snapshots freeze it.
const (
	machineLink = "eth0"
	gatewayLink = "gw0"
	prefixLen   = 30
	mtu         = 1500
)

var (
	machineAddr = netip.MustParseAddr("169.254.77.2")
	gatewayAddr = netip.MustParseAddr("169.254.77.1")
	machineMAC  = net.HardwareAddr{0x02, 0xc1, 0x0c, 0xe0, 0x00, 0x02}
	gatewayMAC  = net.HardwareAddr{0x02, 0xc1, 0x0c, 0xe0, 0x00, 0x01}
)

// Resolver is the address that machines send their questions to. Any other
// would do as well: port 53 is the gateway's whatever the address.
func Resolver() netip.Addr { return gatewayAddr }

// pair is a machine's namespace and the gateway's beside it, alive as long as
// its descriptors are open or something else keeps them.
type pair struct{ machine, gateway vishnetns.NsHandle }

func (p *pair) close() {
	for _, ns := range []*vishnetns.NsHandle{&p.machine, &p.gateway} {
		if ns.IsOpen() {
			_ = ns.Close() // nothing was written to it
		}
	}
}

// makePair makes two namespaces and joins them. Nothing can pass between them
// before the rules are in force: the link comes up last.
func makePair() (_ *pair, err error) {
	p := &pair{machine: vishnetns.None(), gateway: vishnetns.None()}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	return p, apart(func() (err error) {
		if p.machine, err = vishnetns.New(); err != nil {
			return fmt.Errorf("make the machine's: %w", err)
		}
		if err := bare("default"); err != nil { // lo keeps its ::1, which is the machine's own affair
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		if p.gateway, err = vishnetns.New(); err != nil {
			return fmt.Errorf("make the gateway's: %w", err)
		}
		if err := errors.Join(bare("all", "default"), tune()); err != nil {
			return err
		}
		if err := addVeth(p.machine); err != nil {
			return fmt.Errorf("join them: %w", err)
		}
		if err := addRules(gatewayLink); err != nil {
			return err
		}
		if err := configure(gatewayLink, gatewayAddr, machineAddr, machineMAC); err != nil {
			return fmt.Errorf("set up the gateway's end: %w", err)
		}
		if err := vishnetns.Set(p.machine); err != nil {
			return err
		}
		if err := configure(machineLink, machineAddr, gatewayAddr, gatewayMAC); err != nil {
			return fmt.Errorf("set up the machine's end: %w", err)
		}
		if err := netlink.RouteAdd(&netlink.Route{Gw: gatewayAddr.AsSlice()}); err != nil {
			return fmt.Errorf("add the default route: %w", err)
		}
		return nil
	})
}

// apart does something on a thread that it may take to other namespaces. The
// thread is used again only if it is back in its own.
func apart(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		own, err := vishnetns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer own.Close() //nolint:errcheck // nothing was written to it
		err = do()
		if back := vishnetns.Set(own); back != nil {
			err = errors.Join(err, back) // the thread stays locked and ends with this goroutine
		} else {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// addVeth makes the link between this namespace, the gateway's, and the
// machine's.
func addVeth(machine vishnetns.NsHandle) error {
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU, a.HardwareAddr, a.NumTxQueues, a.NumRxQueues = gatewayLink, mtu, gatewayMAC, 1, 1
	err := netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: a, PeerName: machineLink, PeerMTU: mtu, PeerHardwareAddr: machineMAC, PeerNamespace: netlink.NsFd(machine),
		PeerNumTxQueues: 1, PeerNumRxQueues: 1,
	})
	if errors.Is(err, syscall.EOPNOTSUPP) {
		return sandbox.Errorf(sandbox.FailedPrecondition, "no_veth", "the kernel can't make a virtual Ethernet: %w", err).
			WithHint("load its module: modprobe veth")
	}
	return err
}

// configure gives a link of this namespace its address and brings it up. There
// is no ARP on it: each end knows the other.
func configure(name string, own, other netip.Addr, otherMAC net.HardwareAddr) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetARPOff(link); err != nil {
		return err
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: own.AsSlice(), Mask: net.CIDRMask(prefixLen, 32)}}
	if err := netlink.AddrAdd(link, addr); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	return netlink.NeighAdd(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: other.AsSlice(), HardwareAddr: otherMAC,
	})
}

// bare takes away from this namespace what a host may have set for all: that
// it forwards, and IPv6 of the named groups of links.
func bare(noIPv6 ...string) error {
	if err := sysctl("ipv4/ip_forward", "0"); err != nil {
		return err
	}
	for _, group := range noIPv6 {
		err := sysctl("ipv6/conf/"+group+"/disable_ipv6", "1")
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6
			return err
		}
	}
	return nil
}

// tune sets the gateway's namespace up, before it has a link.
func tune() error {
	for _, s := range [][2]string{
		{"ipv4/conf/all/rp_filter", "1"},
		{"ipv4/conf/all/route_localnet", "0"},
		{"ipv4/conf/default/route_localnet", "0"},
		{"ipv4/conf/all/accept_source_route", "0"},
		{"ipv4/conf/all/accept_redirects", "0"},
		{"ipv4/conf/all/send_redirects", "0"},
		{"ipv4/conf/default/send_redirects", "0"},
		// A connection is known from its first packet on, or it is none.
		{"netfilter/nf_conntrack_tcp_loose", "0"},
		// What a machine has begun and not gone on with counts against its limit
		// for a short time only. The gateway's keep-alives keep what lives.
		{"netfilter/nf_conntrack_tcp_timeout_syn_sent", "10"},
		{"netfilter/nf_conntrack_tcp_timeout_syn_recv", "10"},
		{"netfilter/nf_conntrack_tcp_timeout_established", "3600"},
		{"netfilter/nf_conntrack_tcp_timeout_close_wait", "600"},
		{"netfilter/nf_conntrack_tcp_timeout_fin_wait", "60"},
		{"netfilter/nf_conntrack_tcp_timeout_last_ack", "10"},
		{"netfilter/nf_conntrack_tcp_timeout_time_wait", "2"},
		{"netfilter/nf_conntrack_tcp_timeout_close", "2"},
		{"netfilter/nf_conntrack_udp_timeout", "15"},
		{"netfilter/nf_conntrack_udp_timeout_stream", "15"},
	} {
		if err := sysctl(s[0], s[1]); errors.Is(err, fs.ErrNotExist) {
			return noKernel("connection tracking", err)
		} else if err != nil {
			return err
		}
	}
	// What was not accepted yet when a gateway is relieved goes to the next one.
	if err := sysctl("ipv4/tcp_migrate_req", "1"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// sysctl sets what below /proc/sys/net is the calling thread's namespace's.
func sysctl(name, value string) error {
	f, err := os.OpenFile(filepath.Join("/proc/sys/net", name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(value); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
