package httpapi

import (
	"context"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// ListEgressRecords answers what the gateway decided, as a list or as a stream.
func (a *API) ListEgressRecords(w http.ResponseWriter, r *http.Request, params api.ListEgressRecordsParams) {
	// A list is what there is, so that it is the form for who asks for none.
	form, err := rest.Negotiate(r, "application/json", eventStream)
	f := sandbox.EgressAuditFilter{
		Sandbox: params.Sandbox, Kind: string(params.Kind), Verdict: string(params.Verdict), WouldDeny: params.WouldDeny,
		Since: params.Since, Limit: params.Limit,
	}
	named := params.After != nil
	if named {
		f.After = *params.After
	}
	if err == nil && params.LastEventID != "" {
		named = true
		if f.After, err = strconv.ParseInt(params.LastEventID, 10, 64); err != nil {
			err = sandbox.Errorf(sandbox.Invalid, "invalid_parameter", "Last-Event-ID is no sequence of a record")
		}
	}
	switch {
	case err != nil:
		rest.Fail(w, r, err)
	case form == eventStream:
		a.streamRecords(w, r, f, named)
	default:
		a.listRecords(w, r, f)
	}
}

func (a *API) listRecords(w http.ResponseWriter, r *http.Request, f sandbox.EgressAuditFilter) {
	if f.Limit == 0 {
		f.Limit = defaultLimit
	}
	rows, last, err := a.o.Control.EgressRecords(r.Context(), callerOf(r), f)
	answer(w, r, http.StatusOK, rows, err, func(rows []sandbox.EgressRecord) api.EgressRecordList {
		list := api.EgressRecordList{Items: make([]api.EgressRecord, 0, len(rows)), NextAfter: max(last, f.After)}
		for _, rec := range rows {
			list.Items = append(list.Items, showRecord(rec))
		}
		return list
	})
}

func showRecord(r sandbox.EgressRecord) api.EgressRecord {
	return api.EgressRecord{
		Seq: r.Seq, At: r.At.UTC(), Sandbox: r.Sandbox, Project: r.Project, Profile: r.Profile, Version: r.Version,
		Kind: api.EgressKind(r.Kind), Verdict: api.EgressVerdict(r.Verdict), WouldDeny: r.WouldDeny, Rule: r.Rule, Reason: r.Reason,
		Host: r.Host, Dialled: showAddr(r.Dialled), Upstream: showAddr(r.Upstream), Scheme: r.Scheme, Method: r.Method, Path: r.Path,
		Status: r.Status, Injected: r.Injected, SentBytes: r.Sent, ReceivedBytes: r.Received, DurationSeconds: r.Duration.Seconds(),
		Count: int64(min(r.Count, 1<<52)),
	}
}

func showAddr(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

// recordBatch is how many records wait for the client before their source is
// held up, which for the audit means that old ones may be missed.
const recordBatch = 256

// streamRecords sends records until the client goes away, the key is revoked or
// the daemon stops.
func (a *API) streamRecords(w http.ResponseWriter, r *http.Request, f sandbox.EgressAuditFilter, named bool) {
	// Asking for what can't be there yet tells whether it may be asked for, and
	// where now is.
	probe := f
	probe.After, probe.Limit = beyond, 1
	_, last, err := a.o.Control.EgressRecords(r.Context(), callerOf(r), probe)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	if !named {
		f.After = last
	}
	w.Header().Set("Content-Type", eventStream)
	w.Header().Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	s := recordStream{a: a, token: rest.Bearer(r), out: eventWriter{w: w}, last: f.After}
	s.out.buf.WriteString("retry: 1000\n\n")
	if s.out.flush() != nil {
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	records, ended := make(chan sandbox.EgressRecord, recordBatch), make(chan error, 1)
	go func() {
		ended <- a.o.Control.FollowEgress(ctx, callerOf(r), f, func(rec sandbox.EgressRecord) error {
			select {
			case records <- rec:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	if err = s.run(ctx, records, ended); err == nil {
		return // the client is gone, which the access log says
	}
	if r.Context().Err() != nil {
		err = errStreamCut
	}
	if s.out.add("error", s.last, rest.Body(err)) == nil {
		_ = s.out.flush()
	}
}

// beyond lies behind every sequence.
const beyond = 1 << 52

// recordStream is one stream of records under way.
type recordStream struct {
	a     *API
	token string
	out   eventWriter
	last  int64
}

// run returns nil where the client went away, else why the stream ends.
func (s *recordStream) run(ctx context.Context, records <-chan sandbox.EgressRecord, ended <-chan error) error {
	look := time.NewTicker(s.a.pace.look)
	defer look.Stop()
	for {
		select {
		case rec := <-records:
			if err := s.add(rec, records); err != nil {
				return err
			}
		case <-look.C:
		case err := <-ended:
			if err == nil {
				err = errStreamCut
			}
			return err
		}
		// What happened after the key was revoked is not for its owner.
		if _, err := s.a.o.Keys.Verify(ctx, s.token); err != nil {
			s.out.buf.Reset()
			return err
		}
		if s.out.buf.Len() == 0 && time.Since(s.out.wrote) >= s.a.pace.comment {
			s.out.buf.WriteString(": nothing happened\n\n")
		}
		if s.out.buf.Len() > 0 && s.out.flush() != nil {
			return nil
		}
	}
}

// add adds a record and those that wait behind it.
func (s *recordStream) add(rec sandbox.EgressRecord, records <-chan sandbox.EgressRecord) error {
	for n := 1; ; n++ {
		s.last = rec.Seq
		if err := s.out.add("decision", rec.Seq, showRecord(rec)); err != nil || n == recordBatch {
			return err
		}
		select {
		case rec = <-records:
		default:
			return nil
		}
	}
}
