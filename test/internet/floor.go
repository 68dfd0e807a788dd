package internet

import (
	"net"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netns"
)

// Bare takes the rules out of a namespace, by its file, and listens in it at
// addr: what a sandbox gets from there crosses its link and nothing else, which
// is the floor of a benchmark.
func Bare(tb testing.TB, file, addr string) net.Listener {
	tb.Helper()
	ns, err := netns.GetFromPath(file)
	if err != nil {
		tb.Fatalf("open a namespace: %v", err)
	}
	defer ns.Close()
	var l net.Listener
	on(tb, &ns, func() error {
		rules := &nftables.Conn{}
		rules.FlushRuleset()
		if err := rules.Flush(); err != nil {
			return err
		}
		l, err = net.Listen("tcp4", addr)
		return err
	})
	tb.Cleanup(func() { _ = l.Close() })
	return l
}
