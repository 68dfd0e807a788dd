package resolve

import (
	"context"
	"errors"
	"hash/maphash"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/publicsuffix"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
)

// The reasons of records, beside the codes of Lookup.
const (
	ReasonName   = "dns_name"        // no rule could let anything go to it
	ReasonType   = "dns_type"        // a type that carries data, or another class
	ReasonLong   = "dns_long_name"   // longer than names of servers are
	ReasonTunnel = "dns_many_names"  // too many different names below one domain
	ReasonRate   = "dns_rate"        // too many questions
	ReasonBroken = "dns_malformed"   // not one plain question
	ReasonOpcode = "dns_not_a_query" // NOTIFY, UPDATE and their like
)

var noAddr netip.Addr

const (
	maxName      = 190 // bytes of a name that a pattern or the default lets through
	maxLabels    = 12
	newNames     = 100 // different ones below one domain in a minute
	window       = time.Minute
	answerTTL    = 30 // seconds, at most; what is asked for late is resolved again anyway
	plainUDP     = 512
	maxUDPAnswer = 1232
)

// handle answers one packet; nil is no answer.
func (s *Server) handle(ctx context.Context, packet []byte, udp bool) []byte {
	began := s.now()
	q := new(dns.Msg)
	if len(packet) < 12 || packet[2]&0x80 != 0 {
		return nil // not even a header, or an answer: to answer those makes loops
	}
	if !s.limit.AllowN(began, 1) {
		s.overLimit()
		return nil
	}
	if err := q.Unpack(packet); err != nil || len(q.Question) != 1 || len(q.Answer)+len(q.Ns) > 0 {
		reason, code := ReasonBroken, dns.RcodeFormatError
		if q.Opcode != dns.OpcodeQuery {
			reason, code = ReasonOpcode, dns.RcodeNotImplemented
		}
		s.told(began, audit.Denied, policy.Decision{Reason: reason}, "", "", noAddr)
		return pack(bare(q, code), plainUDP)
	}
	size := dns.MaxMsgSize - 1
	reply := new(dns.Msg).SetReply(q)
	reply.RecursionAvailable, reply.CheckingDisabled = true, false
	if opt := q.IsEdns0(); opt != nil {
		reply.SetEdns0(maxUDPAnswer, false)
		if udp {
			size = min(max(int(opt.UDPSize()), plainUDP), maxUDPAnswer)
		}
	} else if udp {
		size = plainUDP
	}
	if q.Opcode != dns.OpcodeQuery {
		s.told(began, audit.Denied, policy.Decision{Reason: ReasonOpcode}, "", "", noAddr)
		return pack(bare(q, dns.RcodeNotImplemented), plainUDP)
	}
	s.answer(ctx, q.Question[0], reply, began)
	return pack(reply, size)
}

// bare answers what is not a question that could be repeated.
func bare(q *dns.Msg, code int) *dns.Msg {
	m := new(dns.Msg)
	m.Id, m.Response, m.Opcode, m.RecursionDesired, m.Rcode = q.Id, true, q.Opcode, q.RecursionDesired, code
	return m
}

func pack(m *dns.Msg, size int) []byte {
	m.Truncate(size)
	out, err := m.Pack()
	if err != nil {
		return nil // a name that can be read and not be written: the sandbox gets nothing
	}
	return out
}

// answer fills in the reply to one question and records it.
func (s *Server) answer(ctx context.Context, q dns.Question, reply *dns.Msg, began time.Time) {
	qtype := dns.Type(q.Qtype).String()
	name, err := policy.CanonicalHost(q.Name)
	refuse := func(d policy.Decision, reason string) {
		reply.Rcode = dns.RcodeRefused
		d.Reason, d.WouldDeny = reason, false
		host := name
		if err != nil {
			host = q.Name // printable: the package escapes the rest
		}
		s.told(began, audit.Denied, d, host, qtype, noAddr)
	}
	switch q.Qtype {
	case dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB:
	default:
		refuse(policy.Decision{}, ReasonType)
		return
	}
	if q.Qclass != dns.ClassINET {
		refuse(policy.Decision{}, ReasonType)
		return
	}
	p := s.o.Policy()
	if err != nil || p == nil {
		refuse(policy.Decision{}, ReasonName)
		return
	}
	d := p.Name(name)
	if !d.Allow {
		refuse(d, ReasonName)
		return
	}
	if q.Qtype != dns.TypeA {
		return // sandboxes have no IPv6 and no ECH; nobody is asked, and A follows
	}
	if reason := s.news.tunnel(name, began); reason != "" {
		refuse(d, reason)
		return
	}
	s.resolve(ctx, name, q, reply, d, began)
}

func (s *Server) resolve(ctx context.Context, name string, q dns.Question, reply *dns.Msg, d policy.Decision, began time.Time) {
	a, err := s.o.Resolver.lookup(ctx, name)
	var why *sandbox.Error
	if err == nil && a.err != nil {
		err = a.err
	}
	if errors.As(err, &why) {
		verdict := audit.Failed
		switch d.Reason = why.Code; {
		case why.Code == CodeClosed:
			verdict, reply.Rcode, d.WouldDeny = audit.Denied, dns.RcodeRefused, false
		case why.Code == CodeNoName && a.exists:
		case why.Code == CodeNoName:
			reply.Rcode = dns.RcodeNameError
		default:
			reply.Rcode = dns.RcodeServerFailure
		}
		s.told(began, verdict, d, name, "A", noAddr)
		return
	}
	ttl := uint32(min(answerTTL, max(1, int(a.until.Sub(s.o.Resolver.now())/time.Second))))
	for _, addr := range a.addrs {
		reply.Answer = append(reply.Answer, &dns.A{
			Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl},
			A:   addr.AsSlice(),
		})
	}
	s.told(began, audit.Allowed, d, name, "A", a.addrs[0])
}

// novelty counts different names below each domain, which is what data that
// leaves in names looks like.
type novelty struct {
	mu    sync.Mutex
	since time.Time
	seed  maphash.Seed
	names map[string]map[uint64]struct{} // by domain; the server's rate bounds both
}

// tunnel gives the reason to refuse a name that hides data, or "".
func (n *novelty) tunnel(name string, now time.Time) string {
	if len(name) > maxName || strings.Count(name, ".") >= maxLabels {
		return ReasonLong
	}
	domain := registered(name)
	if domain == name {
		return ""
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.names == nil || now.Sub(n.since) >= window {
		n.since, n.seed, n.names = now, maphash.MakeSeed(), map[string]map[uint64]struct{}{}
	}
	below := n.names[domain]
	if below == nil {
		below = map[uint64]struct{}{}
		n.names[domain] = below
	}
	key := maphash.String(n.seed, name)
	if _, known := below[key]; known {
		return ""
	}
	if len(below) >= newNames {
		return ReasonTunnel
	}
	below[key] = struct{}{}
	return ""
}

// registered returns the domain below a registry's suffix that a name belongs
// to. Suffixes that companies have listed for their customers don't count:
// whoever has one of those may well run the name server of all of it.
func registered(name string) string {
	suffix, icann := publicsuffix.PublicSuffix(name)
	for !icann {
		_, parent, below := strings.Cut(suffix, ".")
		if !below {
			break
		}
		suffix, icann = publicsuffix.PublicSuffix(parent)
	}
	rest, ok := strings.CutSuffix(name, "."+suffix)
	if !ok {
		return name
	}
	return rest[strings.LastIndexByte(rest, '.')+1:] + "." + suffix
}
