package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"cloche.dev/cloche/internal/sandbox"
)

// The counters of what the gateway's namespace drops, by reason.
const (
	Spoofed     = "spoofed"      // not from the machine's address and MAC
	UDP         = "udp"          // UDP other than questions to a resolver
	ICMP        = "icmp"         //
	Fragment    = "fragment"     // of an IPv4 packet; nothing that is allowed needs any
	IPv6        = "ipv6"         //
	ARP         = "arp"          // both ends know each other
	GatewayPort = "gateway_port" // to where the gateway listens, by itself
	TooMany     = "too_many"     // beyond what one machine may have open
	Invalid     = "invalid"      // of no connection that there is
	Other       = "other"        // other protocols, IPv4 options, wrong receivers
)

// maxTracked bounds what one machine may make the kernel remember: more than
// sandbox.MaxEgressConnections, since connections that have just ended count.
const maxTracked = 2048

// tableName is of both tables: in the first, of the netdev family, a packet is
// judged by itself, before the kernel has looked at it; the second, of the inet
// family, is about connections.
const tableName = "cloche"

func tables() []*nftables.Table {
	return []*nftables.Table{
		{Name: tableName, Family: nftables.TableFamilyNetdev},
		{Name: tableName, Family: nftables.TableFamilyINet},
	}
}

// addRules puts the rules into force in this namespace, all at once.
func addRules(device string) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	addPacketRules(c, device)
	conns := table{c: c, t: c.AddTable(tables()[1])}
	conns.counters(GatewayPort, TooMany, Invalid, Other)
	conns.prerouting()
	conns.input()
	conns.outAndOn()
	return flush(c)
}

// addPacketRules adds the table that is about the packets from one link.
func addPacketRules(c *nftables.Conn, device string) {
	packets := table{c: c, t: c.AddTable(tables()[0])}
	packets.counters(Spoofed, UDP, ICMP, Fragment, IPv6, ARP, GatewayPort, Other)
	packets.ingress(device)
}

func flush(c *nftables.Conn) error {
	if err := c.Flush(); err != nil {
		for _, missing := range []error{syscall.EOPNOTSUPP, syscall.ENOENT, syscall.EPROTONOSUPPORT, syscall.EAFNOSUPPORT} {
			if errors.Is(err, missing) {
				return noKernel("nftables", err)
			}
		}
		return fmt.Errorf("put the gateway's rules into force: %w", err)
	}
	return nil
}

// noKernel says that this host can't keep machines in.
func noKernel(what string, err error) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "no_nftables", "the kernel lacks %s, or a part of it: %w", what, err).
		WithHint("egress needs nf_tables (netdev and inet), nf_conntrack, nft_ct, nft_connlimit, nft_chain_nat, nft_redir, nft_reject_inet and, on older kernels, nft_objref: install or load these modules")
}

// ingress judges each packet as it comes from the machine.
func (t table) ingress(device string) {
	ch := t.chain("ingress", nftables.ChainTypeFilter, nftables.ChainHookIngress, nftables.ChainPriorityFilter, device)
	ether := func(kind uint16) []expr.Any { return link(12, be16(kind)) }
	t.drop(ch, ARP, ether(syscall.ETH_P_ARP))
	t.drop(ch, IPv6, ether(syscall.ETH_P_IPV6))
	t.drop(ch, Other, not(ether(syscall.ETH_P_IP)))
	t.drop(ch, Spoofed, not(link(6, machineMAC)))
	t.drop(ch, Spoofed, not(network(12, machineAddr.AsSlice())))
	t.drop(ch, Other, not(link(0, gatewayMAC)))
	t.drop(ch, Fragment, not(masked(network(6, be16(0)), be16(0x3fff)))) // more fragments, or an offset
	t.drop(ch, Other, not(network(0, []byte{0x45})))                     // options, so that ports are where they are looked for
	t.drop(ch, ICMP, protocol(syscall.IPPROTO_ICMP))
	for _, proto := range []byte{syscall.IPPROTO_TCP, syscall.IPPROTO_UDP} {
		for _, port := range []uint16{proxyPort, dnsPort} {
			t.drop(ch, GatewayPort, network(16, gatewayAddr.AsSlice()), protocol(proto), to(port))
		}
	}
	t.rule(ch, verdict(expr.VerdictAccept), protocol(syscall.IPPROTO_TCP))
	t.rule(ch, verdict(expr.VerdictAccept), protocol(syscall.IPPROTO_UDP), to(53))
	t.drop(ch, UDP, protocol(syscall.IPPROTO_UDP))
	t.drop(ch, Other)
}

// prerouting refuses what is no connection or too many, and sends the rest to
// the gateway, which learns from the kernel where each was to go.
func (t table) prerouting() {
	ch := t.chain("limit", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityMangle, "")
	// Like what a restored machine still holds for a connection: it gets a reset.
	t.rule(ch, []expr.Any{counted(Invalid), &expr.Reject{Type: rejectTCPReset}},
		tracked(expr.CtKeySTATE, expr.CtStateBitINVALID), protocolOf(syscall.IPPROTO_TCP))
	t.drop(ch, Invalid, tracked(expr.CtKeySTATE, expr.CtStateBitINVALID))
	t.drop(ch, TooMany, tracked(expr.CtKeySTATE, expr.CtStateBitNEW),
		[]expr.Any{&expr.Connlimit{Count: maxTracked, Flags: expr.NFT_CONNLIMIT_F_INV}})

	ch = t.chain("redirect", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest, "")
	for _, r := range []struct {
		match []expr.Any
		port  uint16
	}{
		{append(protocolOf(syscall.IPPROTO_TCP), to(53)...), dnsPort},
		{append(protocolOf(syscall.IPPROTO_UDP), to(53)...), dnsPort},
		{protocolOf(syscall.IPPROTO_TCP), proxyPort},
	} {
		t.rule(ch, []expr.Any{
			&expr.Immediate{Register: 1, Data: be16(r.port)},
			&expr.Redir{RegisterProtoMin: 1, RegisterProtoMax: 1, Flags: natProtoSpecified},
		}, r.match)
	}
}

// The kernel's NF_NAT_RANGE_PROTO_SPECIFIED, IPS_DST_NAT and NFT_REJECT_TCP_RST.
const (
	natProtoSpecified = 2
	ipsDstNAT         = 1 << 5
	rejectTCPReset    = 1
)

// input lets in what was redirected, at the ports that it was redirected to.
func (t table) input() {
	ch := t.chain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter, "")
	redirected := tracked(expr.CtKeySTATUS, ipsDstNAT)
	for _, r := range []struct {
		proto byte
		port  uint16
	}{{syscall.IPPROTO_TCP, proxyPort}, {syscall.IPPROTO_TCP, dnsPort}, {syscall.IPPROTO_UDP, dnsPort}} {
		t.rule(ch, verdict(expr.VerdictAccept), redirected, protocolOf(r.proto), to(r.port))
		t.drop(ch, GatewayPort, protocolOf(r.proto), to(r.port))
	}
	t.drop(ch, Other)
}

// outAndOn lets the gateway's sockets answer, and the kernel reset what is no
// connection, and no more, and nothing pass.
func (t table) outAndOn() {
	ch := t.chain("output", nftables.ChainTypeFilter, nftables.ChainHookOutput, nftables.ChainPriorityFilter, "")
	t.rule(ch, verdict(expr.VerdictAccept), tracked(expr.CtKeySTATE, expr.CtStateBitESTABLISHED), tracked(expr.CtKeySTATUS, ipsDstNAT))
	t.rule(ch, verdict(expr.VerdictAccept), tracked(expr.CtKeySTATE, expr.CtStateBitINVALID), protocolOf(syscall.IPPROTO_TCP),
		not(masked(payload(expr.PayloadBaseTransportHeader, 13, []byte{0}), []byte{4})))
	t.drop(ch, Other)
	ch = t.chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter, "")
	t.drop(ch, Other)
}

// Counters tells how many packets of a sandbox were dropped, by reason, since
// its namespaces were made.
func (m *Manager) Counters(_ context.Context, id string) (map[string]uint64, error) {
	all := map[string]uint64{}
	err := m.inGateway(id, func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		for _, t := range tables() {
			objects, err := c.GetNamedObjects(t)
			if err != nil {
				return fmt.Errorf("read the counters of %s: %w", id, err)
			}
			for _, o := range objects {
				n, ok := o.(*nftables.NamedObj)
				if !ok {
					continue
				}
				if counter, ok := n.Obj.(*expr.Counter); ok {
					all[n.Name] += counter.Packets
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

func be16(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }
