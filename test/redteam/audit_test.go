package redteam

import (
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// audit reads what was decided for a sandbox since a time.
func (a *arena) audit(tb testing.TB, box string, since time.Time) []sandbox.EgressRecord {
	tb.Helper()
	q := url.Values{"sandbox": {box}, "since": {since.UTC().Format(time.RFC3339Nano)}, "limit": {"1000"}}
	req, err := http.NewRequestWithContext(tb.Context(), http.MethodGet, a.d.URL+"/v1/egress/audit?"+q.Encode(), nil)
	if err != nil {
		tb.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+a.d.Key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		tb.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		tb.Fatalf("read the audit: %d %v %.300s", resp.StatusCode, err, body)
	}
	var page struct {
		Items []sandbox.EgressRecord `json:"items"`
	}
	if err := json.Unmarshal(body, &page); err != nil {
		tb.Fatalf("read the audit: %v\n%.300s", err, body)
	}
	return page.Items
}
