package sqlite

import (
	"context"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// The bounds of a page.
const (
	defaultPage = 50
	maxPage     = 500
)

// where builds the conditions of a list.
type where struct {
	conds []string
	args  []any
}

func (w *where) and(cond string, args ...any) {
	w.conds = append(w.conds, cond)
	w.args = append(w.args, args...)
}

// in adds "column IN (…)" where there are values.
func in[S ~string](w *where, column string, values []S) {
	if len(values) == 0 {
		return
	}
	marks := strings.TrimSuffix(strings.Repeat("?,", len(values)), ",")
	args := make([]any, len(values))
	for i, v := range values {
		args[i] = string(v)
	}
	w.and(column+" IN ("+marks+")", args...)
}

// project confines a list to a project; "" is any.
func (w *where) project(project string) {
	if project != "" {
		w.and("project = ?", project)
	}
}

// page adds the token's position and returns how many rows to answer.
func (w *where) page(p sandbox.Page, kind string) (limit int, err error) {
	if p.Token != "" {
		at, id, err := parseToken(p.Token, kind)
		if err != nil {
			return 0, err
		}
		w.and("(created_at, id) < (?, ?)", at, id)
	}
	switch {
	case p.Limit <= 0:
		return defaultPage, nil
	case p.Limit > maxPage:
		return maxPage, nil
	}
	return p.Limit, nil
}

// sql returns the query's tail; one row more than limit tells whether there is
// a next page.
func (w *where) sql(limit int) (string, []any) {
	tail := ""
	if len(w.conds) > 0 {
		tail = " WHERE " + strings.Join(w.conds, " AND ")
	}
	return fmt.Sprintf("%s ORDER BY created_at DESC, id DESC LIMIT %d", tail, limit+1), w.args
}

// listing is a kind of row that is listed by age, newest first.
type listing[T any] struct {
	kind  string // of its ids
	query string // without conditions: SELECT … FROM …
	scan  func(scanner) (T, error)
	pos   func(T) (created time.Time, id string)
}

// page lists the rows that w lets through, as p asks.
func (l listing[T]) page(ctx context.Context, q queryer, w where, p sandbox.Page) (list []T, next string, err error) {
	limit, err := w.page(p, l.kind)
	if err != nil {
		return nil, "", err
	}
	tail, args := w.sql(limit)
	if list, err = collect(ctx, q, l.scan, l.query+tail, args...); err != nil {
		return nil, "", err
	}
	list, next = cut(list, limit, l.pos)
	return list, next, nil
}

// cut takes the surplus row away and makes the token of the next page.
func cut[T any](list []T, limit int, pos func(T) (time.Time, string)) ([]T, string) {
	if len(list) <= limit {
		return list, ""
	}
	list = list[:limit]
	at, id := pos(list[limit-1])
	return list, base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(nanos(at), 36) + "." + id))
}

// parseToken reads a token back: the position after which the page begins.
func parseToken(token, kind string) (at int64, id string, err error) {
	bad := sandbox.Errorf(sandbox.Invalid, "bad_page_token", "the page token is not one that a list has answered").
		WithHint("pass the token of the answer before unchanged, or none for the first page")
	if len(token) > 128 {
		return 0, "", bad
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(token)
	if err != nil {
		return 0, "", bad
	}
	num, id, ok := strings.Cut(string(raw), ".")
	at, err = strconv.ParseInt(num, 36, 64)
	if !ok || err != nil || !sandbox.ValidID(kind, id) {
		return 0, "", bad
	}
	return at, id, nil
}
