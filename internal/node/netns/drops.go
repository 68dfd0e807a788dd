package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	vishnetns "github.com/vishvananda/netns"

	"cloche.dev/cloche/internal/sandbox"
)

// The log of what is dropped. There is one in each gateway's namespace, so a
// sandbox has at most a dozen reasons' worth of lines a second (a reason that
// both tables have counts twice).
const (
	logGroup  = 1
	logRate   = 1 // lines a second, of each reason
	logBurst  = 20
	snapLen   = 64       // the longest IPv4 header and the ports
	logBuffer = 64 << 10 // of lines that nobody has read yet
	logWait   = 5 * time.Second
)

// The kernel's names of what is said to and by nfnetlink_log: messages
// (NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_…) and their attributes (NFULA_…).
const (
	msgPacket = 4 << 8
	msgConfig = 4<<8 | 1

	cfgCommand = 1
	cfgMode    = 2
	cmdBind    = 1
	copyPacket = 2

	attrHeader  = 1
	attrPayload = 9
	attrPrefix  = 10
)

// logging is nil where this kernel can log what both tables drop. Where it
// can't, there are counters alone.
var logging = sync.OnceValue(func() error {
	return apart(func() error {
		ns, err := vishnetns.New()
		if err != nil {
			return err
		}
		defer ns.Close() //nolint:errcheck // nothing was written to it
		c, err := nftables.New()
		if err != nil {
			return err
		}
		for _, t := range tables() {
			table{c: c, t: c.AddTable(t), log: true}.reasons(Other)
		}
		if err := c.Flush(); err != nil {
			return fmt.Errorf("nftables: %w", err)
		}
		l, err := openLog()
		if err != nil {
			return err
		}
		return l.Close()
	})
})

// Drops has tell called, by one goroutine, for packets of a sandbox's that the
// kernel drops from now on, right after each, until the function that it
// returns has returned. How many it tells of is bounded; Counters counts all.
// There is one reader at a time; it keeps the gateway's namespace alive.
func (m *Manager) Drops(_ context.Context, id string, tell func(sandbox.DroppedPacket)) (stop func(), err error) {
	if err := logging(); err != nil {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_nflog", "the kernel can't log dropped packets: %w", err).
			WithHint("they are counted; for the log load the modules nft_log, nft_limit and nfnetlink_log and start the daemon anew")
	}
	var l *netlink.Conn
	err = m.inGateway(id, func() (err error) {
		l, err = openLog()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read what is dropped of %s: %w", id, err)
	}
	closed, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		err := readLog(l, tell)
		select {
		case <-closed:
		default:
			m.o.Log.Error("the log of dropped packets has ended; they are counted", "sandbox", id, "err", err)
			l.Close() //nolint:errcheck // it failed already
		}
	}()
	return sync.OnceFunc(func() {
		close(closed)
		l.Close() //nolint:errcheck // it was read only
		<-done
	}), nil
}

// openLog makes this socket the reader of this namespace's log.
func openLog() (_ *netlink.Conn, err error) {
	l, err := netlink.Dial(syscall.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("open the packet log: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("bind to the packet log: %w", err), l.Close())
		}
	}()
	// What finds no room is not logged, and that is no error: it is counted.
	if err := errors.Join(l.SetOption(netlink.NoENOBUFS, true), l.SetReadBuffer(logBuffer), l.SetDeadline(time.Now().Add(logWait))); err != nil {
		return nil, err
	}
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: cfgCommand, Data: []byte{cmdBind}},
		{Type: cfgMode, Data: append(binary.BigEndian.AppendUint32(nil, snapLen), copyPacket, 0)},
	})
	if err != nil {
		return nil, err
	}
	sent, err := l.Send(netlink.Message{
		Header: netlink.Header{Type: msgConfig, Flags: netlink.Request | netlink.Acknowledge},
		Data:   append(append([]byte{syscall.AF_UNSPEC, 0}, be16(logGroup)...), attrs...),
	})
	if err != nil {
		return nil, err
	}
	for { // packets may come before the answer
		messages, err := l.Receive()
		if err != nil {
			return nil, err
		}
		for _, msg := range messages {
			if msg.Header.Type == netlink.Error && msg.Header.Sequence == sent.Header.Sequence {
				return l, l.SetDeadline(time.Time{})
			}
		}
	}
}

// readLog reads the log until that fails.
func readLog(l *netlink.Conn, tell func(sandbox.DroppedPacket)) error {
	for {
		messages, err := l.Receive()
		if err != nil {
			return err
		}
		for _, msg := range messages {
			if d, ok := decode(msg); ok {
				tell(d)
			}
		}
	}
}

// decode reads one line of the log.
func decode(msg netlink.Message) (d sandbox.DroppedPacket, ok bool) {
	const header = 4 // struct nfgenmsg
	if msg.Header.Type != msgPacket || len(msg.Data) < header {
		return d, false
	}
	attrs, err := netlink.NewAttributeDecoder(msg.Data[header:])
	if err != nil {
		return d, false
	}
	var kind uint16
	var reason string
	var payload []byte
	for attrs.Next() {
		switch attrs.Type() {
		case attrHeader:
			if b := attrs.Bytes(); len(b) >= 2 {
				kind = binary.BigEndian.Uint16(b)
			}
		case attrPayload:
			payload = attrs.Bytes()
		case attrPrefix:
			reason = attrs.String()
		}
	}
	if attrs.Err() != nil || reason == "" {
		return d, false
	}
	d = dropped(kind, payload)
	d.Reason = reason
	return d, true
}
