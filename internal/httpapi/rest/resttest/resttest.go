// Package resttest holds a server of the native API to its contract: every
// answer that its Client gets must have a documented status, a documented
// content type and the documented schema, or be one of the answers that belong
// to no operation (404 and 405 of unknown paths), which are problems too.
//
// Tests of internal/httpapi, internal/dataplane and test/e2e call it.
package resttest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"cloche.dev/cloche/api"
)

var load = sync.OnceValues(func() (*openapi3.T, error) {
	return openapi3.NewLoader().LoadFromData(api.Spec)
})

// Operation is one operation of the contract.
type Operation struct {
	ID     string
	Method string
	Path   string // with {parameters}
	op     *openapi3.Operation
}

// Operations lists every operation of the contract.
func Operations(t testing.TB) []Operation {
	t.Helper()
	doc, err := load()
	if err != nil {
		t.Fatal(err)
	}
	var list []Operation
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			list = append(list, Operation{op.OperationID, method, path, op})
		}
	}
	return list
}

// Answer is a checked answer.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Problem decodes the body as a problem.
func (a Answer) Problem(t testing.TB) api.Problem {
	t.Helper()
	var p api.Problem
	if err := json.Unmarshal(a.Body, &p); err != nil {
		t.Fatalf("not a problem: %v: %s", err, a.Body)
	}
	return p
}

// Do sends r and checks the answer, whose body it reads to the end.
func Do(t testing.TB, client *http.Client, r *http.Request) Answer {
	t.Helper()
	resp, err := client.Do(r)
	if err != nil {
		t.Fatalf("%s %s: %v", r.Method, r.URL.Path, err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", r.Method, r.URL.Path, err)
	}
	_ = resp.Body.Close()
	if err := Check(t, r.Method, r.URL.EscapedPath(), resp.StatusCode, resp.Header, body); err != nil {
		t.Errorf("%s %s answered %d: %v\n%.500s", r.Method, r.URL.Path, resp.StatusCode, err, body)
	}
	return Answer{resp.StatusCode, resp.Header, body}
}

// Check tells what about an answer is not in the contract.
func Check(t testing.TB, method, path string, status int, header http.Header, body []byte) error {
	t.Helper()
	if header.Get("X-Request-Id") == "" {
		return fmt.Errorf("it has no X-Request-Id")
	}
	op, ok := find(t, method, path)
	if !ok {
		if status != http.StatusNotFound && status != http.StatusMethodNotAllowed {
			return fmt.Errorf("it belongs to no operation")
		}
		return problem(header, body)
	}
	ref := op.op.Responses.Value(fmt.Sprint(status))
	if ref == nil {
		return fmt.Errorf("the status is not documented for %s", op.ID)
	}
	if len(ref.Value.Content) == 0 {
		if len(body) > 0 {
			return fmt.Errorf("it has a body")
		}
		return nil
	}
	kind, _, err := mime.ParseMediaType(header.Get("Content-Type"))
	if err != nil {
		return err
	}
	media := ref.Value.Content[kind]
	if media == nil {
		return fmt.Errorf("%s is not documented for it", kind)
	}
	if !strings.HasSuffix(kind, "json") {
		return nil
	}
	return schema(media.Schema.Value, body)
}

func problem(header http.Header, body []byte) error {
	if got := header.Get("Content-Type"); got != "application/problem+json" {
		return fmt.Errorf("it is no problem but %s", got)
	}
	doc, err := load()
	if err != nil {
		return err
	}
	return schema(doc.Components.Schemas["Problem"].Value, body)
}

func schema(s *openapi3.Schema, body []byte) error {
	var v any
	dec := json.NewDecoder(bytes.NewReader(body))
	if err := dec.Decode(&v); err != nil {
		return err
	}
	return s.VisitJSON(v, openapi3.VisitAsResponse(), openapi3.EnableFormatValidation())
}

// find is the operation of a concrete path.
func find(t testing.TB, method, path string) (Operation, bool) {
	t.Helper()
	have := strings.Split(path, "/")
	for _, op := range Operations(t) {
		want := strings.Split(op.Path, "/")
		ok := op.Method == method && len(want) == len(have)
		for i := range want {
			ok = ok && (want[i] == have[i] || strings.HasPrefix(want[i], "{") && have[i] != "")
		}
		if ok {
			return op, true
		}
	}
	return Operation{}, false
}
