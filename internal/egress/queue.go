package egress

import (
	"context"
	"sync"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/gatewayrpc"
)

// The bounds of what waits for the daemon. A sandbox may have a part of the
// queue, and a rate, so that one that makes noise drowns nobody else's records.
const (
	maxQueued    = 32 << 10
	maxOfSandbox = maxQueued / 4
	perSecond    = 1000
	burst        = 10000
	maxBatchSize = 1 << 20 // bytes of text, before JSON makes it longer
)

// reasonLost is the reason of a record that stands for those that were lost.
const reasonLost = "audit_lost"

// queue keeps audit records until the daemon says that it has them.
type queue struct {
	now func() time.Time

	mu      sync.Mutex
	waiting []audit.Record
	batch   *gatewayrpc.Batch // told and not acknowledged
	seq     uint64
	total   uint64 // lost since the process began
	sources map[string]*source
	wake    chan struct{} // closed and replaced when something was added
}

// source is what the queue knows of one sandbox.
type source struct {
	queued int
	tokens float64
	at     time.Time
	lost   uint64
	last   audit.Record // whose it was
}

func newQueue(now func() time.Time) *queue {
	return &queue{now: now, sources: map[string]*source{}, wake: make(chan struct{})}
}

// add queues a record, or counts it as lost.
func (q *queue) add(r audit.Record) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	s := q.sources[r.Sandbox]
	if s == nil {
		s = &source{tokens: burst, at: now}
		q.sources[r.Sandbox] = s
	}
	s.tokens = min(burst, s.tokens+perSecond*now.Sub(s.at).Seconds())
	s.at = now
	if s.tokens < 1 || s.queued >= maxOfSandbox || len(q.waiting) >= maxQueued {
		s.lost++
		s.last = audit.Record{Sandbox: r.Sandbox, Project: r.Project, Profile: r.Profile, Version: r.Version}
		q.total++
		return
	}
	s.tokens--
	q.push(s, r)
}

// push queues a record of a source. The lock is held.
func (q *queue) push(s *source, r audit.Record) {
	s.queued++
	q.waiting = append(q.waiting, r)
	close(q.wake)
	q.wake = make(chan struct{})
}

// tell queues a record for what each sandbox lost, where there is room again,
// and forgets those that have nothing here.
func (q *queue) tell() {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	for id, s := range q.sources {
		if s.lost > 0 && s.queued < maxOfSandbox && len(q.waiting) < maxQueued {
			r := s.last
			r.At, r.Kind, r.Verdict, r.Reason, r.Count = now, audit.TCP, audit.Failed, reasonLost, s.lost
			s.lost = 0
			q.push(s, r)
		}
		if s.queued == 0 && s.lost == 0 && now.Sub(s.at).Seconds()*perSecond > burst {
			delete(q.sources, id)
		}
	}
}

// take drops the batch that is acknowledged and returns the one before it or
// the next, waiting for records where there are none. An empty one has nothing
// to acknowledge.
func (q *queue) take(ctx context.Context, ack uint64, wait time.Duration) *gatewayrpc.Batch {
	t := time.NewTimer(wait)
	defer t.Stop()
	for {
		b, wake := q.next(ack)
		if b != nil {
			return b
		}
		select {
		case <-wake:
		case <-t.C:
			return &gatewayrpc.Batch{}
		case <-ctx.Done():
			return &gatewayrpc.Batch{}
		}
	}
}

func (q *queue) next(ack uint64) (*gatewayrpc.Batch, <-chan struct{}) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.batch != nil && q.batch.Seq == ack {
		q.batch = nil
	}
	if q.batch != nil {
		return q.batch, nil
	}
	n, size := 0, 0
	for n < len(q.waiting) && n < gatewayrpc.MaxBatch && size < maxBatchSize {
		size += sizeOf(&q.waiting[n])
		n++
	}
	if n == 0 {
		return nil, q.wake
	}
	q.seq++
	q.batch = &gatewayrpc.Batch{Seq: q.seq, Records: append([]audit.Record(nil), q.waiting[:n]...)}
	for i := range q.batch.Records {
		if s := q.sources[q.batch.Records[i].Sandbox]; s != nil {
			s.queued--
		}
	}
	rest := copy(q.waiting, q.waiting[n:])
	clear(q.waiting[rest:])
	q.waiting = q.waiting[:rest]
	return q.batch, nil
}

// sizeOf is about how long a record's text is.
func sizeOf(r *audit.Record) int {
	n := len(r.Sandbox) + len(r.Project) + len(r.Profile) + len(r.Rule) + len(r.Reason) + len(r.Host) + len(r.Scheme) + len(r.Method) + len(r.Path)
	for _, name := range r.Injected {
		n += len(name)
	}
	return n
}

// empty tells whether everything was taken and acknowledged.
func (q *queue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.batch == nil && len(q.waiting) == 0
}

// losses counts what was lost since the process began.
func (q *queue) losses() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.total
}
