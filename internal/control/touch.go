package control

import (
	"context"
	"maps"
	"sync"
	"time"
)

// touches are the touches that the store has yet to hear of, and who holds a
// sandbox. A touch costs a lock and a map's entry; the rows hear of it each
// FlushEvery and before anyone asks them who is idle.
type touches struct {
	mu   sync.Mutex
	at   map[string]time.Time
	held map[string]int
}

// Touch notes that a sandbox was used now.
func (c *Control) Touch(sandbox string) {
	now := c.now().UTC()
	c.touches.mu.Lock()
	defer c.touches.mu.Unlock()
	c.touches.at[sandbox] = now
}

// Hold touches a sandbox for as long as release is not called, which may be
// called more than once.
func (c *Control) Hold(sandbox string) (release func()) {
	c.touches.mu.Lock()
	defer c.touches.mu.Unlock()
	c.touches.held[sandbox]++
	var once sync.Once
	return func() {
		once.Do(func() {
			now := c.now().UTC()
			c.touches.mu.Lock()
			defer c.touches.mu.Unlock()
			if c.touches.held[sandbox]--; c.touches.held[sandbox] == 0 {
				delete(c.touches.held, sandbox)
			}
			c.touches.at[sandbox] = now
		})
	}
}

// touched tells whether a sandbox was touched since the last flush, or is held.
func (c *Control) touched(sandbox string) bool {
	c.touches.mu.Lock()
	defer c.touches.mu.Unlock()
	_, ok := c.touches.at[sandbox]
	return ok || c.touches.held[sandbox] > 0
}

// flush tells the store. What it could not be told is told the next time.
func (c *Control) flush(ctx context.Context) {
	now := c.now().UTC()
	c.touches.mu.Lock()
	told := c.touches.at
	c.touches.at = map[string]time.Time{}
	for id := range c.touches.held {
		told[id] = now
	}
	c.touches.mu.Unlock()
	if len(told) == 0 {
		return
	}
	err := c.store.Touch(ctx, told)
	if err == nil {
		return
	}
	c.logErr(ctx, "can't note when sandboxes were touched", err)
	c.touches.mu.Lock()
	defer c.touches.mu.Unlock()
	maps.Copy(told, c.touches.at) // the later touches win
	c.touches.at = told
}

// flushTimeout bounds the last flush, when control stops.
const flushTimeout = 5 * time.Second
