package rest

import (
	"net/http"
	"testing"
)

func TestNegotiate(t *testing.T) {
	for _, c := range []struct{ accept, want string }{
		{"", "text/event-stream"},
		{"*/*", "text/event-stream"},
		{"text/*", "text/event-stream"},
		{"application/octet-stream", "application/octet-stream"},
		{"application/*", "application/octet-stream"},
		{"application/json", "application/json"},
		{"application/json, */*;q=0.1", "application/json"},
		{"text/event-stream;q=0.2, application/octet-stream", "application/octet-stream"},
		{"text/event-stream;q=0", ""},
		{"image/png", ""},
		{"*/*;q=0, application/json", "application/json"},
		{";;;", ""},
		{"application/octet-stream;q=x", ""},
		{"*/*, text/event-stream;q=0", "application/octet-stream"},
	} {
		r, _ := http.NewRequest("GET", "/", nil)
		if c.accept != "" {
			r.Header.Set("Accept", c.accept)
		}
		got, err := Negotiate(r, "text/event-stream", "application/octet-stream", "application/json")
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%q: %q %v, want %q", c.accept, got, err, c.want)
		}
	}
}
