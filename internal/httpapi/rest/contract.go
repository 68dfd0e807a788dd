package rest

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"

	"cloche.dev/cloche/internal/sandbox"
)

// contract is api.Spec, loaded.
type contract struct {
	doc *openapi3.T
}

// operation is one operation of the contract.
type operation struct {
	id     string
	route  *routers.Route
	params []*openapi3.Parameter
	query  map[string]bool  // names of the query parameters
	open   bool             // needs no caller
	body   string           // content type of the body; "" when it has none
	needed bool             // the body is required
	json   *openapi3.Schema // of a JSON body
}

func loadContract(spec []byte) (*contract, error) {
	loader := openapi3.NewLoader()
	doc, err := loader.LoadFromData(spec)
	if err != nil {
		return nil, fmt.Errorf("the contract can't be read: %w", err)
	}
	if err := doc.Validate(loader.Context); err != nil {
		return nil, fmt.Errorf("the contract is not valid: %w", err)
	}
	return &contract{doc}, nil
}

// operation finds the operation of a pattern of http.ServeMux.
func (c *contract) operation(pattern string) (*operation, error) {
	method, path, _ := strings.Cut(pattern, " ")
	item := c.doc.Paths.Value(path)
	if item == nil || item.GetOperation(method) == nil {
		return nil, fmt.Errorf("%q is not in the contract", pattern)
	}
	op := item.GetOperation(method)
	o := &operation{
		id:    op.OperationID,
		route: &routers.Route{Spec: c.doc, Path: path, PathItem: item, Method: method, Operation: op},
		query: map[string]bool{},
		open:  op.Security != nil && len(*op.Security) == 0,
	}
	for _, list := range []openapi3.Parameters{item.Parameters, op.Parameters} {
		for _, ref := range list {
			o.params = append(o.params, ref.Value)
			if ref.Value.In == openapi3.ParameterInQuery {
				o.query[ref.Value.Name] = true
			}
		}
	}
	if op.RequestBody == nil {
		return o, nil
	}
	o.needed = op.RequestBody.Value.Required
	for contentType, media := range op.RequestBody.Value.Content {
		o.body = contentType
		if contentType == "application/json" {
			o.json = media.Schema.Value
		}
	}
	return o, nil
}

// check holds r, but for the content of its body, to the operation.
func (o *operation) check(r *http.Request) error {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return sandbox.Errorf(sandbox.Invalid, "malformed_query", "the query is malformed")
	}
	for name := range query {
		if !o.query[name] {
			return sandbox.Errorf(sandbox.Invalid, "unknown_parameter", "there is no query parameter %q", clip(name, 100))
		}
	}
	in := &openapi3filter.RequestValidationInput{
		Request: r, QueryParams: query, Route: o.route, PathParams: map[string]string{},
		Options: &openapi3filter.Options{SkipSettingDefaults: true},
	}
	for _, p := range o.params {
		if p.In == openapi3.ParameterInPath {
			in.PathParams[p.Name] = r.PathValue(p.Name)
		}
		if list := p.Schema != nil && p.Schema.Value.Type.Is("array"); p.In == openapi3.ParameterInQuery && !list && len(query[p.Name]) > 1 {
			return sandbox.Errorf(sandbox.Invalid, "invalid_parameter", "the query parameter %q stands twice", p.Name)
		}
		if err := openapi3filter.ValidateParameter(r.Context(), in, p); err != nil {
			return sandbox.Errorf(sandbox.Invalid, "invalid_parameter", "%s", paramMessage(p, err))
		}
	}
	return o.checkBody(r)
}

func (o *operation) checkBody(r *http.Request) error {
	switch {
	case r.ContentLength == 0 && o.body == "":
		return nil
	case o.body == "":
		return sandbox.Errorf(sandbox.Invalid, "unexpected_body", "this call takes no body")
	case r.ContentLength == 0 && !o.needed:
		return nil
	case r.ContentLength == 0 && r.Header.Get("Content-Type") == "":
		return sandbox.Errorf(sandbox.Invalid, "missing_body", "this call needs a body of the type %s", o.body)
	}
	return checkContentType(r, o.body)
}

func paramMessage(p *openapi3.Parameter, err error) string {
	what := fmt.Sprintf("the %s parameter %q", p.In, p.Name)
	var s *openapi3.SchemaError
	if errors.As(err, &s) {
		return schemaMessage(what, err)
	}
	var re *openapi3filter.RequestError
	if errors.As(err, &re) && errors.Is(re.Err, openapi3filter.ErrInvalidRequired) {
		return what + " is missing"
	}
	return what + " is malformed"
}
