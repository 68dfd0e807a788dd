package rest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/sandbox"
)

func testRouter(t *testing.T, guard Guard) (*Router, *Half, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	rt, err := NewRouter(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err != nil {
		t.Fatal(err)
	}
	if guard == nil {
		guard = func(r *http.Request, _, token string) (*http.Request, string, error) {
			if token != "good" {
				return nil, "", sandbox.Errorf(sandbox.Denied, "unauthenticated", "no")
			}
			return r, "key_x", nil
		}
	}
	return rt, rt.Half(guard), &log
}

func do(t *testing.T, rt http.Handler, method, target, contentType, body string) (int, http.Header, api.Problem) {
	t.Helper()
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer good")
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	w := httptest.NewRecorder()
	rt.ServeHTTP(w, r)
	var p api.Problem
	if strings.Contains(w.Header().Get("Content-Type"), "problem") {
		if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil {
			t.Fatalf("%s %s: %v", method, target, err)
		}
		if p.Status != w.Code {
			t.Errorf("%s %s: status %d in a problem of %d", method, target, p.Status, w.Code)
		}
	}
	return w.Code, w.Header(), p
}

// TestRefusals: what the router refuses before any handler runs.
func TestRefusals(t *testing.T) {
	rt, half, _ := testRouter(t, nil)
	half.HandleFunc("POST /v1/sandboxes", func(w http.ResponseWriter, r *http.Request) {
		var body api.CreateSandboxRequest
		if _, err := Decode(w, r, &body); err != nil {
			Fail(w, r, err)
			return
		}
		NoContent(w)
	})
	half.HandleFunc("GET /v1/sandboxes", func(w http.ResponseWriter, _ *http.Request) { NoContent(w) })
	half.HandleFunc("GET /v1/sandboxes/{sandbox}", func(w http.ResponseWriter, _ *http.Request) { NoContent(w) })
	half.HandleFunc("PUT /v1/sandboxes/{sandbox}/files", func(w http.ResponseWriter, _ *http.Request) { NoContent(w) })
	const sbx, js = "/v1/sandboxes/sbx_aaaaaaaaaaaaaaaaaaaa", "application/json"
	big := `{"template":"base","labels":{"a":"` + strings.Repeat("x", MaxJSON) + `"}}`
	for _, c := range []struct {
		name, method, target, contentType, body string
		status                                  int
		code                                    string
	}{
		{"fine", "POST", "/v1/sandboxes", js, `{"template":"base"}`, 204, ""},
		{"fine with a charset", "POST", "/v1/sandboxes", js + "; charset=utf-8", `{"template":"base"}`, 204, ""},
		{"unknown path", "GET", "/v2", "", "", 404, "no_such_path"},
		{"root", "GET", "/", "", "", 404, "no_such_path"},
		{"doubled slash", "GET", "/v1//sandboxes", "", "", 404, "no_such_path"},
		{"dots", "GET", "/v1/x/../sandboxes", "", "", 404, "no_such_path"},
		{"trailing slash", "GET", "/v1/sandboxes/", "", "", 404, "no_such_path"},
		{"method", "PUT", "/v1/sandboxes", js, "{}", 405, "method_not_allowed"},
		{"odd method", "BREW", "/v1/sandboxes", "", "", 405, "method_not_allowed"},
		{"bad id", "GET", "/v1/sandboxes/nope", "", "", 400, "invalid_parameter"},
		{"encoded id", "GET", "/v1/sandboxes/%2e%2e", "", "", 400, "invalid_parameter"},
		{"unknown parameter", "GET", "/v1/sandboxes?limits=1", "", "", 400, "unknown_parameter"},
		{"malformed query", "GET", "/v1/sandboxes?limit=%zz", "", "", 400, "malformed_query"},
		{"limit below", "GET", "/v1/sandboxes?limit=0", "", "", 400, "invalid_parameter"},
		{"limit above", "GET", "/v1/sandboxes?limit=1001", "", "", 400, "invalid_parameter"},
		{"limit twice", "GET", "/v1/sandboxes?limit=1&limit=2", "", "", 400, "invalid_parameter"},
		{"limit no number", "GET", "/v1/sandboxes?limit=a", "", "", 400, "invalid_parameter"},
		{"limit overflows", "GET", "/v1/sandboxes?limit=99999999999999999999", "", "", 400, "invalid_parameter"},
		{"state unknown", "GET", "/v1/sandboxes?state=odd", "", "", 400, "invalid_parameter"},
		{"states", "GET", "/v1/sandboxes?state=running&state=failed&label=a=b", "", "", 204, ""},
		{"label without value", "GET", "/v1/sandboxes?label=a", "", "", 400, "invalid_parameter"},
		{"body on GET", "GET", "/v1/sandboxes", js, "{}", 400, "unexpected_body"},
		{"missing path", "PUT", sbx + "/files", "application/octet-stream", "x", 400, "invalid_parameter"},
		{"relative path", "PUT", sbx + "/files?path=a", "application/octet-stream", "x", 400, "invalid_parameter"},
		{"NUL in path", "PUT", sbx + "/files?path=/a%00", "application/octet-stream", "x", 400, "invalid_parameter"},
		{"bad mode", "PUT", sbx + "/files?path=/a&mode=999", "application/octet-stream", "x", 400, "invalid_parameter"},
		{"fine file", "PUT", sbx + "/files?path=/a&mode=0644", "application/octet-stream", "x", 204, ""},
		{"empty file without type", "PUT", sbx + "/files?path=/a", "", "", 204, ""},
		{"file of another type", "PUT", sbx + "/files?path=/a", js, "x", 415, "unsupported_media_type"},
		{"no body", "POST", "/v1/sandboxes", "", "", 400, "missing_body"},
		{"no type", "POST", "/v1/sandboxes", "", "{}", 415, "unsupported_media_type"},
		{"form", "POST", "/v1/sandboxes", "application/x-www-form-urlencoded", "template=base", 415, "unsupported_media_type"},
		{"charset", "POST", "/v1/sandboxes", js + "; charset=latin1", `{"template":"base"}`, 415, "unsupported_media_type"},
		{"too large", "POST", "/v1/sandboxes", js, big, 413, "body_too_large"},
		{"not JSON", "POST", "/v1/sandboxes", js, "{", 400, "malformed_json"},
		{"trailing", "POST", "/v1/sandboxes", js, `{"template":"base"}{}`, 400, "malformed_json"},
		{"duplicate", "POST", "/v1/sandboxes", js, `{"template":"base","template":"x"}`, 400, "malformed_json"},
		{"unknown field", "POST", "/v1/sandboxes", js, `{"template":"base","color":1}`, 400, "invalid_body"},
		{"field of another case", "POST", "/v1/sandboxes", js, `{"Template":"base"}`, 400, "invalid_body"},
		{"nested unknown field", "POST", "/v1/sandboxes", js, `{"template":"base","resources":{"gpu":1}}`, 400, "invalid_body"},
		{"missing field", "POST", "/v1/sandboxes", js, `{}`, 400, "invalid_body"},
		{"wrong type", "POST", "/v1/sandboxes", js, `{"template":5}`, 400, "invalid_body"},
		{"null", "POST", "/v1/sandboxes", js, `null`, 400, "invalid_body"},
		{"out of range", "POST", "/v1/sandboxes", js, `{"template":"base","resources":{"memory_mib":1}}`, 400, "invalid_body"},
		{"fraction", "POST", "/v1/sandboxes", js, `{"template":"base","ttl_seconds":1.5}`, 400, "invalid_body"},
		{"huge number", "POST", "/v1/sandboxes", js, `{"template":"base","ttl_seconds":1e300}`, 400, "invalid_body"},
		{"bad template", "POST", "/v1/sandboxes", js, `{"template":"UPPER"}`, 400, "invalid_body"},
	} {
		status, header, p := do(t, rt, c.method, c.target, c.contentType, c.body)
		if status != c.status || p.Code != c.code {
			t.Errorf("%s: %d %q (%s), want %d %q", c.name, status, p.Code, p.Detail, c.status, c.code)
		}
		if status == http.StatusMethodNotAllowed && !strings.Contains(header.Get("Allow"), "POST") {
			t.Errorf("%s: Allow is %q", c.name, header.Get("Allow"))
		}
	}
}

func TestGuardComesFirst(t *testing.T) {
	rt, half, _ := testRouter(t, nil)
	half.HandleFunc("GET /v1/sandboxes/{sandbox}", func(w http.ResponseWriter, _ *http.Request) { NoContent(w) })
	half.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { NoContent(w) })
	for _, c := range []struct {
		target, header string
		status         int
	}{
		{"/v1/sandboxes/nope", "", 401},
		{"/v1/sandboxes/nope", "Bearer bad", 401},
		{"/v1/sandboxes/nope", "Basic good", 401},
		{"/v1/sandboxes/nope", "bearer good", 400},
		{"/healthz", "", 204},
	} {
		r := httptest.NewRequest("GET", c.target, nil)
		if c.header != "" {
			r.Header.Set("Authorization", c.header)
		}
		w := httptest.NewRecorder()
		rt.ServeHTTP(w, r)
		if w.Code != c.status {
			t.Errorf("%s %q: %d, want %d", c.target, c.header, w.Code, c.status)
		}
		if (w.Header().Get("WWW-Authenticate") != "") != (c.status == 401) {
			t.Errorf("%s %q: WWW-Authenticate %q", c.target, c.header, w.Header().Get("WWW-Authenticate"))
		}
	}
}

func TestStatusOfEachClass(t *testing.T) {
	want := map[sandbox.Class]int{
		sandbox.NotFound: 404, sandbox.Conflict: 409, sandbox.FailedPrecondition: 409, sandbox.Invalid: 400, sandbox.Denied: 403,
		sandbox.Quota: 429, sandbox.NoCapacity: 503, sandbox.Unavailable: 503, sandbox.Internal: 500,
	}
	for class, status := range want {
		rt, half, _ := testRouter(t, nil)
		half.HandleFunc("GET /v1/version", func(w http.ResponseWriter, r *http.Request) {
			Fail(w, r, sandbox.Errorf(class, "some_code", "secret path /x").WithHint("do this"))
		})
		got, header, p := do(t, rt, "GET", "/v1/version", "", "")
		if got != status || p.Class != api.ErrorClass(class) || p.Code != "some_code" || p.Hint != "do this" {
			t.Errorf("%s: %d %+v", class, got, p)
		}
		if class == sandbox.Internal && strings.Contains(p.Detail, "secret") {
			t.Error("an internal error told its cause")
		}
		if (header.Get("Retry-After") != "") != (status == 503) {
			t.Errorf("%s: Retry-After %q", class, header.Get("Retry-After"))
		}
	}
}

func TestPanicIsA500AndLogged(t *testing.T) {
	rt, half, log := testRouter(t, nil)
	half.HandleFunc("GET /v1/version", func(http.ResponseWriter, *http.Request) { panic("boom") })
	status, _, p := do(t, rt, "GET", "/v1/version", "", "")
	if status != 500 || p.Class != "internal" || !strings.Contains(log.String(), "boom") || strings.Contains(p.Detail, "boom") {
		t.Errorf("%d %+v\n%s", status, p, log)
	}
}

func TestLogHasNoSecrets(t *testing.T) {
	rt, half, log := testRouter(t, nil)
	half.HandleFunc("POST /v1/sandboxes", func(w http.ResponseWriter, r *http.Request) {
		var body api.CreateSandboxRequest
		_, err := Decode(w, r, &body)
		Fail(w, r, errors.Join(err, sandbox.Errorf(sandbox.Invalid, "x", "y")))
	})
	do(t, rt, "POST", "/v1/sandboxes?token=hunter2", "application/json", `{}`)
	do(t, rt, "POST", "/v1/sandboxes", "application/json", `{"template":"hunter2 HUNTER"}`)
	_, _, p := do(t, rt, "POST", "/v1/sandboxes", "application/json", `{"template":"hunter2 HUNTER"}`)
	if s := log.String(); strings.Contains(s, "hunter2") || strings.Contains(s, "good") || strings.Contains(p.Detail, "hunter2") {
		t.Errorf("a secret was repeated: %s\n%s", p.Detail, s)
	}
	if !strings.Contains(log.String(), "key=key_x") {
		t.Errorf("the log does not say who:\n%s", log)
	}
}

func TestRegisteringUnknownPanics(t *testing.T) {
	_, half, _ := testRouter(t, nil)
	defer func() {
		if recover() == nil {
			t.Error("a pattern outside the contract was registered")
		}
	}()
	half.HandleFunc("GET /v1/nothing", nil)
}

// TestFailAfterBegin: an answer that broke off is cut, so that it can't be
// taken for whole.
func TestFailAfterBegin(t *testing.T) {
	rt, half, _ := testRouter(t, nil)
	half.HandleFunc("GET /v1/version", func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte("part"))
		_ = http.NewResponseController(w).Flush()
		Fail(w, r, errors.New("broke"))
	})
	srv := httptest.NewServer(rt)
	defer srv.Close()
	req, _ := http.NewRequest("GET", srv.URL+"/v1/version", nil)
	req.Header.Set("Authorization", "Bearer good")
	resp, err := srv.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("the cut answer %q looks whole", b)
	}
}

// TestUploadThatStalls: a client that stops sending is let go, and the
// connection's context is not cancelled by the deadline of a finished body.
func TestUploadThatStalls(t *testing.T) {
	rt, half, _ := testRouter(t, nil)
	result := make(chan error, 1)
	half.HandleFunc("PUT /v1/sandboxes/{sandbox}/files", func(w http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(Upload(w, r, 1<<20, 100*time.Millisecond))
		if err == nil {
			select {
			case <-r.Context().Done():
				err = r.Context().Err()
			case <-time.After(300 * time.Millisecond):
			}
		}
		result <- err
		NoContent(w)
	})
	srv := httptest.NewServer(rt)
	defer srv.Close()
	head := "PUT /v1/sandboxes/sbx_aaaaaaaaaaaaaaaaaaaa/files?path=/a HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n" +
		"Content-Type: application/octet-stream\r\nContent-Length: 4\r\n\r\n"
	for _, c := range []struct {
		body string
		ok   bool
	}{{"ab", false}, {"abcd", true}} {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte(head + c.body))
		if err := <-result; (err == nil) != c.ok {
			t.Errorf("body %q: %v", c.body, err)
		}
		_ = conn.Close()
	}
}
