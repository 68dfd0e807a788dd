package audit

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, dir string, bytes int64) *Store {
	t.Helper()
	s, err := Open(Options{Dir: dir, Bytes: bytes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func record(box string, v Verdict) Record {
	return Record{
		At: time.Date(2026, 11, 30, 9, 0, 0, 123456789, time.UTC), Sandbox: box, Project: "prj_a", Profile: "p", Version: 3,
		Kind: HTTP, Verdict: v, Rule: "r", Reason: "why", Host: "example.com", Dialled: netip.MustParseAddrPort("192.0.2.1:443"),
		Upstream: netip.MustParseAddrPort("198.51.100.7:443"), Scheme: "https", Method: "GET", Path: "/a", Status: 200,
		Injected: []string{"token"}, Sent: 10, Received: 20, Duration: 1500 * time.Microsecond,
	}
}

func TestALineSaysAllOfARecord(t *testing.T) {
	for _, r := range []Record{
		record("sbx_a", Allowed),
		{At: time.Unix(1, 0).UTC(), Sandbox: "sbx_a", Kind: DNS, Verdict: Denied, Host: "x.example", Method: "A", Reason: "dns_name"},
		{At: time.Unix(1, 0).UTC(), Sandbox: "sbx_a", Kind: Packet, Verdict: Denied, Reason: "packet:udp", Count: 7},
		{At: time.Unix(1, 0).UTC(), Kind: TCP, Verdict: Failed, Reason: "upstream_refused", Upstream: netip.MustParseAddrPort("[2001:db8::1]:1")},
		{At: time.Unix(1, 0).UTC(), Kind: TLS, Verdict: Allowed, WouldDeny: true, Host: "h"},
	} {
		line, err := Encode(Entry{ID: 9, Record: r})
		if err != nil {
			t.Fatal(err)
		}
		got, err := Decode(line)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, Entry{ID: 9, Record: r}) {
			t.Errorf("read back %+v\nof %s\nwant %+v", got, line, r)
		}
	}
}

func TestALineIsOCSF(t *testing.T) {
	type ocsf struct {
		Category int `json:"category_uid"`
		Class    int `json:"class_uid"`
		Activity int `json:"activity_id"`
		Type     int `json:"type_uid"`
		Action   int `json:"action_id"`
		Time     int64
	}
	for _, c := range []struct {
		kind    Kind
		verdict Verdict
		method  string
		want    ocsf
	}{
		{HTTP, Allowed, "GET", ocsf{4, 4002, 3, 400203, 1, 1000}},
		{HTTP, Denied, "BREW", ocsf{4, 4002, 99, 400299, 2, 1000}},
		{DNS, Denied, "TXT", ocsf{4, 4003, 1, 400301, 2, 1000}},
		{TCP, Allowed, "", ocsf{4, 4001, 1, 400101, 1, 1000}},
		{TLS, Denied, "", ocsf{4, 4001, 5, 400105, 2, 1000}},
		{TCP, Failed, "", ocsf{4, 4001, 4, 400104, 1, 1000}},
		{Packet, Denied, "", ocsf{4, 4001, 6, 400106, 2, 1000}},
	} {
		line, err := Encode(Entry{ID: 1, Record: Record{At: time.Unix(1, 0), Kind: c.kind, Verdict: c.verdict, Method: c.method}})
		if err != nil {
			t.Fatal(err)
		}
		var got ocsf
		if err := json.Unmarshal(line, &got); err != nil || got != c.want {
			t.Errorf("%s %s: %+v (%v), want %+v", c.kind, c.verdict, got, err, c.want)
		}
	}
}

// What comes from a sandbox can't make a second line, or end the document.
func TestALineIsOneLine(t *testing.T) {
	s := open(t, t.TempDir(), 0)
	evil := "\r\n{\"x\":1}\u2028\x00\x1b[2J\xff" + strings.Repeat("é", MaxText)
	r := record("sbx_a", Denied)
	r.Host, r.Path, r.Method, r.Reason, r.Rule = evil, evil, evil, evil, evil
	r.At = time.Date(123456, 1, 1, 0, 0, 0, 0, time.UTC)
	for range 40 {
		r.Injected = append(r.Injected, evil)
	}
	r.Dialled = netip.AddrPortFrom(netip.MustParseAddr("fe80::1").WithZone(evil), 1)
	if err := s.Append(r); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(s.path(1))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(data), "\n"); n != 1 || strings.ContainsAny(string(data), "\r\x00\x1b\u2028") || len(data) > maxLine {
		t.Errorf("%d lines, %d bytes", n, len(data))
	}
	found, err := s.EgressRecords(context.Background(), sandbox.EgressAuditFilter{})
	if err != nil || len(found) != 1 || len(found[0].Host) > 3*MaxText || len(found[0].Injected) != maxInjected {
		t.Errorf("read back %d (%v)", len(found), err)
	}
}

func TestQueries(t *testing.T) {
	s := open(t, t.TempDir(), 0)
	ctx := context.Background()
	for i := range 10 {
		r := record([]string{"sbx_a", "sbx_b"}[i%2], []Verdict{Allowed, Allowed, Denied}[i%3])
		r.At = time.Unix(int64(i), 0)
		r.WouldDeny = i == 1
		if err := s.Append(r); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		f    sandbox.EgressAuditFilter
		want []int64
	}{
		"all":        {sandbox.EgressAuditFilter{}, []int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
		"newest":     {sandbox.EgressAuditFilter{Limit: 2}, []int64{9, 10}},
		"sandbox":    {sandbox.EgressAuditFilter{Sandbox: "sbx_b"}, []int64{2, 4, 6, 8, 10}},
		"project":    {sandbox.EgressAuditFilter{Project: "prj_b"}, nil},
		"denied":     {sandbox.EgressAuditFilter{Verdict: "denied"}, []int64{3, 6, 9}},
		"would deny": {sandbox.EgressAuditFilter{Verdict: "denied", WouldDeny: true}, []int64{2, 3, 6, 9}},
		"since":      {sandbox.EgressAuditFilter{Since: time.Unix(8, 0)}, []int64{9, 10}},
		"after":      {sandbox.EgressAuditFilter{After: 7, Sandbox: "sbx_a"}, []int64{9}},
		"kind":       {sandbox.EgressAuditFilter{Kind: "dns"}, nil},
	} {
		found, err := s.EgressRecords(ctx, c.f)
		if err != nil {
			t.Fatal(err)
		}
		if got := seqs(found); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	if n := s.Totals()[Total{HTTP, Denied}]; n != 3 || s.LastEgress() != 10 {
		t.Errorf("%d denied of %d", n, s.LastEgress())
	}
}

func seqs(all []sandbox.EgressRecord) (ids []int64) {
	for _, r := range all {
		ids = append(ids, r.Seq)
	}
	return ids
}

func TestFilesAreRotatedAndTakenUpAgain(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, 1) // the least: eight files of 64 KiB
	ctx := context.Background()
	const all = 2500
	batch := make([]Record, 50)
	for i := range batch {
		batch[i] = record("sbx_a", Allowed)
	}
	for range all / len(batch) {
		if err := s.Append(batch...); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != segments {
		t.Fatalf("%d files (%v)", len(files), err)
	}
	var size int64
	for _, f := range files {
		st, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		size += st.Size()
	}
	if size > 2*segments*minSegment {
		t.Errorf("%d bytes are kept", size)
	}
	check := func(s *Store) {
		t.Helper()
		found, err := s.EgressRecords(ctx, sandbox.EgressAuditFilter{Limit: MaxLimit})
		if err != nil || len(found) == 0 || found[len(found)-1].Seq != all {
			t.Fatalf("%d found (%v)", len(found), err)
		}
		for i, r := range found {
			if r.Seq != found[0].Seq+int64(i) {
				t.Fatalf("after %d comes %d", found[0].Seq+int64(i)-1, r.Seq)
			}
		}
		found, err = s.EgressRecords(ctx, sandbox.EgressAuditFilter{After: all - 3})
		if err != nil || !reflect.DeepEqual(seqs(found), []int64{all - 2, all - 1, all}) {
			t.Errorf("the last: %v (%v)", seqs(found), err)
		}
	}
	check(s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	// A crash in the middle of a line.
	last := s.path(s.files[len(s.files)-1].first)
	f, err := os.OpenFile(last, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"metadata":{"uid":"9`); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	s = open(t, dir, 1)
	check(s)
	if err := s.Append(record("sbx_b", Denied)); err != nil {
		t.Fatal(err)
	}
	found, err := s.EgressRecords(ctx, sandbox.EgressAuditFilter{Sandbox: "sbx_b"})
	if err != nil || !reflect.DeepEqual(seqs(found), []int64{all + 1}) {
		t.Errorf("the one after the crash: %v (%v)", seqs(found), err)
	}
}

func TestFollowing(t *testing.T) {
	s := open(t, t.TempDir(), 1)
	const all = 1500
	got := make(chan int64)
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		done <- s.FollowEgress(ctx, sandbox.EgressAuditFilter{After: 2, Sandbox: "sbx_a"}, func(r sandbox.EgressRecord) error {
			select {
			case got <- r.Seq:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	for id := int64(1); id <= all; id++ {
		box := "sbx_a"
		if id%3 == 0 {
			box = "sbx_b"
		}
		if err := s.Append(record(box, Denied)); err != nil {
			t.Fatal(err)
		}
		if id > 2 && id%3 != 0 {
			if seq := <-got; seq != id {
				t.Fatalf("told of %d, want %d", seq, id)
			}
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	go func() { done <- s.FollowEgress(context.Background(), sandbox.EgressAuditFilter{After: all}, nil) }()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("a follower of a closed store: %v", err)
	}
	if err := s.Append(record("x", Denied)); err == nil {
		t.Error("a closed store took a record")
	}
}

func FuzzDecode(f *testing.F) {
	line, _ := Encode(Entry{ID: 1, Record: record("sbx_a", Allowed)})
	f.Add(line)
	f.Add([]byte(`{"metadata":{"uid":"1","product":{"name":"Cloche"}},"dst_endpoint":{"ip":"x"}}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		e, err := Decode(line)
		if err != nil {
			return
		}
		e.Record = e.clip()
		again, err := Encode(e)
		if err != nil {
			t.Fatalf("%+v can't be encoded: %v", e, err)
		}
		if strings.Contains(string(again), "\n") {
			t.Fatalf("two lines: %q", again)
		}
	})
}
