package netns

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	vishnetns "github.com/vishvananda/netns"
)

// tapLink is what a machine's tap is called while it is the VMM's. Snapshots of
// virtual machines have the name in them.
const tapLink = "tap0"

// Tap puts a tap in place of the veth in a sandbox's pair, where a VMM that runs
// as uid in the machine's namespace can attach to it by the name returned, and
// tells which hardware address the machine must have. It leads nowhere yet.
// Whatever link there was between the two goes.
func (m *Manager) Tap(_ context.Context, id string, uid int) (name, mac string, err error) {
	err = m.inPair(id, func(p *pair) error {
		if err := remove(gatewayLink); err != nil { // and with it the other end, where it is a veth
			return err
		}
		if err := vishnetns.Set(p.machine); err != nil {
			return err
		}
		if err := remove(tapLink); err != nil {
			return err
		}
		a := netlink.NewLinkAttrs()
		a.Name = tapLink
		return netlink.LinkAdd(&netlink.Tuntap{
			LinkAttrs: a, Mode: netlink.TUNTAP_MODE_TAP, Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_VNET_HDR,
			Owner: uint32(uid), Group: uint32(uid),
		})
	})
	if err != nil {
		return "", "", fmt.Errorf("make a tap for %s: %w", id, err)
	}
	return tapLink, machineMAC.String(), nil
}

// remove removes a link where there is one.
func remove(name string) error {
	l, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return err
	}
	return netlink.LinkDel(l)
}

// MoveTap takes a tap, once a VMM has attached to it, to the gateway's namespace,
// where it is what the gateway's end of a veth is elsewhere. A VMM can't attach to
// one that is there already; a machine that runs before it is there reaches nobody.
func (m *Manager) MoveTap(_ context.Context, id string) error {
	err := m.inPair(id, func(p *pair) error {
		if err := vishnetns.Set(p.machine); err != nil {
			return err
		}
		tap, err := netlink.LinkByName(tapLink)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetDown(tap); err != nil { // or it can't get another name
			return err
		}
		if err := netlink.LinkSetNsFd(tap, int(p.gateway)); err != nil {
			return err
		}
		if err := vishnetns.Set(p.gateway); err != nil {
			return err
		}
		return adopt()
	})
	if err != nil {
		return fmt.Errorf("move the tap of %s: %w", id, err)
	}
	return nil
}

// adopt makes the tap that has come to this namespace the gateway's link.
func adopt() error {
	tap, err := netlink.LinkByName(tapLink)
	if err != nil {
		return err
	}
	if err := errors.Join(netlink.LinkSetName(tap, gatewayLink), netlink.LinkSetHardwareAddr(tap, gatewayMAC), netlink.LinkSetMTU(tap, mtu)); err != nil {
		return err
	}
	// The rules about packets went with the link that they were for, or, on
	// younger kernels, wait for one of that name.
	c, err := nftables.New()
	if err != nil {
		return err
	}
	t := tables()[0]
	c.AddTable(t) // so that there is one to remove
	c.DelTable(t)
	addPacketRules(c, gatewayLink)
	if err := flush(c); err != nil {
		return err
	}
	return configure(gatewayLink, gatewayAddr, machineAddr, machineMAC)
}

// inPair does something on a thread of its own with both namespaces of a
// sandbox at hand.
func (m *Manager) inPair(id string, do func(*pair) error) error {
	return m.inGateway(id, func() (err error) {
		p := &pair{machine: vishnetns.None(), gateway: vishnetns.None()}
		defer p.close()
		if p.gateway, err = vishnetns.Get(); err != nil {
			return err
		}
		if p.machine, err = vishnetns.GetFromPath(m.path(id)); err != nil {
			return err
		}
		return do(p)
	})
}
