package netns

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// table is a table of rules in the making.
type table struct {
	c *nftables.Conn
	t *nftables.Table
}

func (t table) counters(names ...string) {
	for _, name := range names {
		t.c.AddObj(&nftables.NamedObj{Table: t.t, Name: name, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
	}
}

// chain adds a chain that drops what none of its rules is about, except one
// that translates addresses: the kernel has none of those drop.
func (t table) chain(name string, kind nftables.ChainType, hook *nftables.ChainHook, prio *nftables.ChainPriority, device string) *nftables.Chain {
	policy := nftables.ChainPolicyAccept
	if name != "limit" && kind == nftables.ChainTypeFilter {
		policy = nftables.ChainPolicyDrop
	}
	return t.c.AddChain(&nftables.Chain{Name: name, Table: t.t, Type: kind, Hooknum: hook, Priority: prio, Policy: &policy, Device: device})
}

// rule adds a rule that does something to what matches all of matches.
func (t table) rule(ch *nftables.Chain, do []expr.Any, matches ...[]expr.Any) {
	t.c.AddRule(&nftables.Rule{Table: t.t, Chain: ch, Exprs: append(slices.Concat(matches...), do...)})
}

// drop adds a rule that counts and drops.
func (t table) drop(ch *nftables.Chain, counter string, matches ...[]expr.Any) {
	t.rule(ch, append([]expr.Any{counted(counter)}, verdict(expr.VerdictDrop)...), matches...)
}

// counted counts.
func counted(counter string) expr.Any {
	return &expr.Objref{Type: int(nftables.ObjTypeCounter), Name: counter}
}

func verdict(kind expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: kind}} }

func payload(base expr.PayloadBase, offset int, want []byte) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: base, Offset: uint32(offset), Len: uint32(len(want))},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: want},
	}
}

// link matches bytes of the Ethernet header.
func link(offset int, want []byte) []expr.Any {
	return payload(expr.PayloadBaseLLHeader, offset, want)
}

// network matches bytes of the IPv4 header.
func network(offset int, want []byte) []expr.Any {
	return payload(expr.PayloadBaseNetworkHeader, offset, want)
}

// protocol matches what an IPv4 header says that the packet holds.
func protocol(n byte) []expr.Any { return network(9, []byte{n}) }

// protocolOf matches the same by what the kernel has found.
func protocolOf(n byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{n}},
	}
}

// to matches the destination port of TCP and UDP.
func to(port uint16) []expr.Any { return payload(expr.PayloadBaseTransportHeader, 2, be16(port)) }

// tracked matches a bit of what the kernel knows of the packet's connection.
func tracked(key expr.CtKey, bit uint32) []expr.Any {
	zero := make([]byte, 4)
	return []expr.Any{
		&expr.Ct{Key: key, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, bit), Xor: zero},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: zero},
	}
}

// masked looks at some bits only of what match looks at.
func masked(match []expr.Any, mask []byte) []expr.Any {
	return slices.Insert(match, 1, expr.Any(&expr.Bitwise{
		SourceRegister: 1, DestRegister: 1, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask)),
	}))
}

// not matches what match doesn't.
func not(match []expr.Any) []expr.Any {
	last := *match[len(match)-1].(*expr.Cmp)
	last.Op = expr.CmpOpNeq
	return append(slices.Clone(match[:len(match)-1]), &last)
}
