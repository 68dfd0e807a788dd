package linear_test

import (
	"context"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

type fromStore struct {
	sandbox.Store
	mu   sync.Mutex
	from map[string]sandbox.State
}

func (s *fromStore) BeginVerb(ctx context.Context, project, id string, verb sandbox.Verb, b sandbox.Begin, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, _ := s.Store.Sandbox(ctx, "", id)
	sb, op, again, err := s.Store.BeginVerb(ctx, project, id, verb, b, idem)
	if err == nil && !again {
		s.from[op.ID] = was.State
	}
	op.From = s.from[op.ID]
	return sb, op, again, err
}

func (s *fromStore) Operation(ctx context.Context, p, id string) (sandbox.Operation, error) {
	op, err := s.Store.Operation(ctx, p, id)
	s.mu.Lock()
	defer s.mu.Unlock()
	op.From = s.from[op.ID]
	return op, err
}
func (s *fromStore) FinishOperation(ctx context.Context, id string, o sandbox.Outcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Store.FinishOperation(ctx, id, o)
}
func (s *fromStore) Observed(ctx context.Context, id string, epoch int64, end sandbox.End) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Store.Observed(ctx, id, epoch, end)
}

var _ = time.Now

func init() {
	tmpWrap = func(s sandbox.Store) sandbox.Store { return &fromStore{Store: s, from: map[string]sandbox.State{}} }
}
