package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"github.com/vishvananda/netlink"
)

// The network as every machine has it: internal/node/netns is the other end.
// Under gVisor the sentry takes it from there.
var (
	netLink    = "eth0"
	netAddr    = &net.IPNet{IP: net.IPv4(169, 254, 77, 2), Mask: net.CIDRMask(30, 32)}
	netGateway = net.IPv4(169, 254, 77, 1)
	netMAC     = net.HardwareAddr{0x02, 0xc1, 0x0c, 0xe0, 0x00, 0x01} // the gateway's, which answers no ARP
)

// network brings the machine's network up where it has one. IPv6 stays off:
// nothing answers it.
func network() error {
	link, err := netlink.LinkByName(netLink)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find %s: %w", netLink, err)
	}
	err = os.WriteFile("/proc/sys/net/ipv6/conf/"+netLink+"/disable_ipv6", []byte("1"), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("turn IPv6 off: %w", err)
	}
	if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: netAddr}); err != nil {
		return fmt.Errorf("give %s its address: %w", netLink, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring %s up: %w", netLink, err)
	}
	index := link.Attrs().Index
	if err := netlink.NeighAdd(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: netGateway, HardwareAddr: netMAC}); err != nil {
		return fmt.Errorf("tell %s of the gateway: %w", netLink, err)
	}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: index, Gw: netGateway}); err != nil {
		return fmt.Errorf("add the default route: %w", err)
	}
	return nil
}
