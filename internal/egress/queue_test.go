package egress

import (
	"context"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/gatewayrpc"
)

func TestABatchIsToldUntilItIsAcknowledged(t *testing.T) {
	q := newQueue(time.Now)
	ctx := context.Background()
	for range gatewayrpc.MaxBatch + 3 {
		q.add(audit.Record{Sandbox: "a"})
	}
	first := q.take(ctx, 0, 0)
	if len(first.Records) != gatewayrpc.MaxBatch || first.Seq != 1 {
		t.Fatalf("batch %d of %d", first.Seq, len(first.Records))
	}
	if again := q.take(ctx, 0, 0); again != first {
		t.Error("a batch that was not acknowledged was dropped")
	}
	second := q.take(ctx, 1, 0)
	if len(second.Records) != 3 || second.Seq != 2 || q.empty() {
		t.Errorf("batch %d of %d", second.Seq, len(second.Records))
	}
	if b := q.take(ctx, 2, 0); len(b.Records) != 0 || b.Seq != 0 || !q.empty() {
		t.Errorf("an empty queue told of %+v", b)
	}
	got := make(chan *gatewayrpc.Batch)
	go func() { got <- q.take(ctx, 2, time.Minute) }()
	q.add(audit.Record{Sandbox: "b"})
	if b := <-got; len(b.Records) != 1 {
		t.Errorf("who waits was told of %d", len(b.Records))
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if b := q.take(ended, 3, time.Minute); len(b.Records) != 0 {
		t.Error("there was something after all")
	}
}

func TestOneSandboxDrownsNoOther(t *testing.T) {
	now := time.Unix(1000, 0)
	q := newQueue(func() time.Time { return now })
	for range 10 * maxQueued { // as fast as time stands still
		q.add(audit.Record{Sandbox: "noisy", Project: "p"})
	}
	q.add(audit.Record{Sandbox: "quiet"})
	told := map[string]int{}
	lost := uint64(0)
	ack := uint64(0)
	drain := func() {
		for {
			b := q.take(context.Background(), ack, 0)
			if len(b.Records) == 0 {
				return
			}
			ack = b.Seq
			for _, r := range b.Records {
				told[r.Sandbox]++
				if r.Reason == reasonLost {
					lost += r.Count
					if r.Sandbox != "noisy" || r.Project != "p" {
						t.Errorf("a loss of %+v", r)
					}
				}
			}
		}
	}
	drain()
	if told["quiet"] != 1 || told["noisy"] > maxOfSandbox {
		t.Errorf("told %v", told)
	}
	q.tell()
	drain()
	if want := uint64(10*maxQueued - told["noisy"] + 1); lost != want || q.losses() != want {
		t.Errorf("%d and %d are said to be lost, %d are", lost, q.losses(), want)
	}
	now = now.Add(time.Hour)
	q.tell()
	if len(q.sources) != 0 {
		t.Errorf("%d sandboxes are remembered", len(q.sources))
	}
}

func TestABatchIsBoundedInSize(t *testing.T) {
	q := newQueue(time.Now)
	for range 100 {
		q.add(audit.Record{Sandbox: "a", Path: strings.Repeat("x", 100<<10)})
	}
	if b := q.take(context.Background(), 0, 0); len(b.Records) > 20 {
		t.Errorf("%d records", len(b.Records))
	}
}
