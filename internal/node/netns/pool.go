package netns

import (
	"context"
	"time"
)

// retry is how long Run waits after a pair could not be made. It says so once:
// Create says it to whoever asks.
const retry = 5 * time.Second

// Run keeps pairs ready until ctx ends, and then removes those that nobody
// took.
func (m *Manager) Run(ctx context.Context) error {
	defer m.drain()
	if m.o.Pool <= 0 {
		<-ctx.Done()
		return nil
	}
	for failed := false; ctx.Err() == nil; {
		p, err := makePair()
		if err != nil {
			if !failed {
				m.o.Log.Warn("no network namespaces can be made ahead", "err", err)
			}
			failed = true
			select {
			case <-ctx.Done():
			case <-time.After(retry):
			}
			continue
		}
		failed = false
		select {
		case m.ready <- p:
		case <-ctx.Done():
			p.close()
		}
	}
	return nil
}

func (m *Manager) drain() {
	for {
		select {
		case p := <-m.ready:
			p.close()
		default:
			return
		}
	}
}
