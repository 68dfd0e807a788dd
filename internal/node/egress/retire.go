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

// retire ends the gateway of a daemon that ends, if it serves no sandbox, once
// its records are taken, and removes its files: whoever deletes every sandbox
// and stops Cloche keeps nothing of it. What can't be done now the gateway does
// by itself when it has been alone for a while.
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
	for ack := uint64(0); ; {
		a, err := c.Call(ctx, gatewayrpc.Request{Op: gatewayrpc.OpAudit, Ack: ack, Wait: 1})
		if err != nil {
			return
		}
		if a.Batch == nil {
			break
		}
		if m.audit.Append(a.Batch.Records...) != nil {
			return
		}
		ack = a.Batch.Seq
	}
	if err := m.kill(ctx, m.name); err != nil {
		m.o.Log.Warn("end the egress gateway, which serves no sandbox", "err", err)
		return
	}
	if others, err := filepath.Glob(m.path("*", socketSuffix)); err == nil && len(others) == 0 {
		_ = os.RemoveAll(m.dir())
	}
}
