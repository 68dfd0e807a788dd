package egress

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/egress/gatewayrpc"
)

// retireTimeout bounds the end of a gateway that nobody needs.
const retireTimeout = 2 * time.Second

// retire ends the gateway of a daemon that ends, if it serves no sandbox, and
// removes its files: whoever deletes every sandbox and stops Cloche keeps nothing
// of it. A drained gateway goes when its records are taken, which the pump did as
// they came; one that is not gone within half the time is killed, since it would
// refuse the next daemon's sandboxes.
func (m *Manager) retire() {
	ctx, cancel := context.WithTimeout(context.Background(), retireTimeout)
	defer cancel()
	c, err := gatewayrpc.Dial(ctx, m.path(m.name, socketSuffix))
	if err != nil {
		return // there is none
	}
	defer c.Close()
	a, err := c.Call(ctx, gatewayrpc.Request{Op: gatewayrpc.OpList})
	if err != nil || len(a.Sandboxes) > 0 {
		return
	}
	if _, err := c.Call(ctx, gatewayrpc.Request{Op: gatewayrpc.OpDrain}); err != nil {
		return
	}
	if p, err := m.record(m.name); err == nil {
		half, cancel := context.WithTimeout(ctx, retireTimeout/2)
		_ = p.Wait(half) // whether it went by itself or not
		cancel()
	}
	if err := m.kill(ctx, m.name); err != nil {
		m.o.Log.Warn("end the egress gateway, which serves no sandbox", "err", err)
		return
	}
	if others, err := filepath.Glob(m.path("*", socketSuffix)); err == nil && len(others) == 0 {
		_ = os.RemoveAll(m.dir())
	}
}
