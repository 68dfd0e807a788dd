package sqlite

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"time"
)

// How values stand in columns: times as nanoseconds, everything composed as
// JSON, absent as NULL.

func nanos(t time.Time) int64 { return t.UnixNano() }

func nanosPtr(t *time.Time) any {
	if t == nil {
		return nil
	}
	return t.UnixNano()
}

func when(n int64) time.Time { return time.Unix(0, n).UTC() }

func whenPtr(n sql.NullInt64) *time.Time {
	if !n.Valid {
		return nil
	}
	t := when(n.Int64)
	return &t
}

// encode is for types of internal/sandbox, which all encode.
func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("sqlite: %T does not encode: %v", v, err))
	}
	return string(b)
}

// encodePtr is NULL for nil.
func encodePtr[T any](v *T) any {
	if v == nil {
		return nil
	}
	return encode(v)
}

func decodePtr[T any](s sql.NullString, into **T) error {
	if !s.Valid {
		*into = nil
		return nil
	}
	*into = new(T)
	return json.Unmarshal([]byte(s.String), *into)
}

func rawOrNil(m json.RawMessage) any {
	if len(m) == 0 {
		return nil
	}
	return string(m)
}
