package rest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/getkin/kin-openapi/openapi3"

	"cloche.dev/cloche/internal/sandbox"
)

// The bounds of JSON bodies.
const (
	MaxJSON  = 1 << 20
	maxDepth = 32
)

// Decode reads r's JSON body into v: it has the contract's content type and
// schema, and no unknown or duplicate field, nothing after it, no invalid
// UTF-8. It returns the names of the fields at the top, by which a null can be
// told from nothing.
func Decode(w http.ResponseWriter, r *http.Request, v any) (present map[string]bool, err error) {
	op := recordOf(r).op
	if op == nil || op.json == nil {
		return nil, sandbox.Errorf(sandbox.Internal, "no_schema", "this operation has no JSON body in the contract")
	}
	data, err := io.ReadAll(Upload(w, r, MaxJSON, 30*time.Second))
	if err != nil {
		return nil, err
	}
	doc, err := parse(data)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Invalid, "malformed_json", "the body is not JSON that can be accepted: %w", err)
	}
	if err := op.json.VisitJSON(doc, openapi3.VisitAsRequest(), openapi3.DisableSchemaErrorDetails()); err != nil {
		return nil, sandbox.Errorf(sandbox.Invalid, "invalid_body", "%s", schemaMessage("the body", err))
	}
	if err := json.Unmarshal(data, v); err != nil {
		return nil, sandbox.Errorf(sandbox.Invalid, "invalid_body", "the body: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	present = map[string]bool{}
	if m, ok := doc.(map[string]any); ok {
		for k := range m {
			present[k] = true
		}
	}
	return present, nil
}

// schemaMessage says which part of what is wrong, and why, without repeating
// the value (it may be a secret).
func schemaMessage(what string, err error) string {
	var s *openapi3.SchemaError
	if !errors.As(err, &s) {
		return what + " does not fit the contract"
	}
	if at := strings.Join(s.JSONPointer(), "."); at != "" {
		what += ": " + clip(at, 100)
	}
	return what + ": " + clip(s.Reason, 300)
}

// clip bounds what an answer repeats of a request.
func clip(s string, n int) string {
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}

// parse reads exactly one JSON value, strictly.
func parse(data []byte) (any, error) {
	if !utf8.Valid(data) {
		return nil, errors.New("it is not UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	v, err := parseValue(dec, 0)
	if err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("something follows the value")
	}
	return v, nil
}

func parseValue(dec *json.Decoder, depth int) (any, error) {
	t, err := dec.Token()
	if errors.Is(err, io.EOF) {
		return nil, errors.New("it ends too early")
	}
	if err != nil {
		return nil, err
	}
	open, ok := t.(json.Delim)
	if !ok {
		return t, nil
	}
	if depth >= maxDepth {
		return nil, fmt.Errorf("it is more than %d levels deep", maxDepth)
	}
	if open == '[' {
		list := []any{}
		for dec.More() {
			v, err := parseValue(dec, depth+1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		_, err := dec.Token()
		return list, err
	}
	object := map[string]any{}
	for dec.More() {
		k, err := dec.Token()
		if err != nil {
			return nil, err
		}
		name, ok := k.(string)
		if !ok {
			return nil, errors.New("a field's name is not a string")
		}
		if _, ok := object[name]; ok {
			return nil, fmt.Errorf("the field %q stands twice", clip(name, 100))
		}
		if object[name], err = parseValue(dec, depth+1); err != nil {
			return nil, err
		}
	}
	_, err = dec.Token()
	return object, err
}

// checkContentType holds a request that has a body to the content type that
// the contract names.
func checkContentType(r *http.Request, want string) error {
	header := r.Header.Get("Content-Type")
	got, params, err := mime.ParseMediaType(header)
	ok := err == nil && got == want
	if charset := params["charset"]; want == "application/json" && charset != "" {
		ok = ok && strings.EqualFold(charset, "utf-8")
	}
	if ok && r.Header.Get("Content-Encoding") == "" {
		return nil
	}
	e := sandbox.Errorf(sandbox.Invalid, "unsupported_media_type", "the body must be %s, not %q", want, clip(header, 100))
	return WithStatus(http.StatusUnsupportedMediaType, e.WithHint("send Content-Type: %s and no Content-Encoding", want))
}
