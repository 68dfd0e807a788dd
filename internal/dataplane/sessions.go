package dataplane

import (
	"math"
	"net/http"
	"strconv"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
)

// ListSessions lists a sandbox's sessions.
func (p *Plane) ListSessions(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.ListSessionsParams) {
	rows, next, err := p.o.Identities.Sessions(r.Context(), callerOf(r.Context()), sandboxID, rest.Page(params.Limit, params.PageToken))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	list := api.SessionList{Items: make([]api.Session, 0, len(rows)), NextPageToken: next}
	for _, row := range rows {
		s, err := p.show(r, row)
		if err != nil {
			rest.Fail(w, r, err)
			return
		}
		list.Items = append(list.Items, s)
	}
	rest.JSON(w, r, http.StatusOK, list)
}

// CreateSession makes a session and its token; it starts nothing.
func (p *Plane) CreateSession(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.CreateSessionParams) {
	var body api.ProcessSpec
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	proc := sandbox.Process{
		Args: body.Args, Env: body.Env, Cwd: body.Cwd, User: body.User, Stdin: body.Stdin,
		Timeout: time.Duration(body.TimeoutSeconds) * time.Second,
	}
	if body.Tty != nil {
		proc.TTY = &sandbox.WindowSize{Rows: body.Tty.Rows, Cols: body.Tty.Cols}
	}
	row, err := p.create(r, sandboxID, proc, rest.Idempotency(r, params.IdempotencyKey, body))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	s, err := p.show(r, row)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusCreated, api.CreatedSession{Session: s, Token: p.o.Tokens.Session(auth.Session{
		Project: row.Project, Session: row.ID, Generation: row.Generation,
	})})
}

// create makes the row and then the log. Where this process ends in between, a
// repetition of the request makes the log; the session can't start before.
func (p *Plane) create(r *http.Request, sandboxID string, proc sandbox.Process, idem sandbox.Idempotency) (sandbox.Session, error) {
	row, _, err := p.o.Identities.CreateSession(r.Context(), callerOf(r.Context()), sandboxID, proc, idem)
	if err != nil {
		return sandbox.Session{}, err
	}
	return row, p.o.Recorder.Register(r.Context(), row)
}

// GetSession answers one session.
func (p *Plane) GetSession(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, sessionID api.SessionParam) {
	row, err := p.o.Identities.Session(r.Context(), callerOf(r.Context()), sandboxID, sessionID)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	p.answer(w, r, row)
}

func (p *Plane) answer(w http.ResponseWriter, r *http.Request, row sandbox.Session) {
	s, err := p.show(r, row)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, s)
}

// show is a session's row and how far it is, as its caller may see it. A log
// that is past its keeping is shown as expired.
func (p *Plane) show(r *http.Request, row sandbox.Session) (api.Session, error) {
	proc := row.Process
	s := api.Session{
		Id: row.ID, Sandbox: row.Sandbox, Args: proc.Args, Cwd: proc.Cwd, User: proc.User, Stdin: proc.Stdin,
		TimeoutSeconds: int64(proc.Timeout / time.Second), Key: row.Key, CreatedAt: row.CreatedAt.UTC(), State: api.SessionExpired,
		Parent: row.Parent, ParentOffset: int64(min(row.ParentOffset, math.MaxInt64)),
	}
	if s.Args == nil {
		s.Args = []string{}
	}
	if proc.TTY != nil {
		s.Tty = &api.WindowSize{Rows: proc.TTY.Rows, Cols: proc.TTY.Cols}
	}
	if callerOf(r.Context()).May(sandbox.ActData) {
		s.Env = proc.Env
	}
	st, err := p.o.Recorder.State(session.Ref{Sandbox: row.Sandbox, Session: row.ID})
	if sandbox.IsClass(err, sandbox.NotFound) {
		return s, nil
	}
	if err != nil {
		return api.Session{}, err
	}
	if s.Held, err = p.held(r.Context(), st, row.Sandbox); err != nil {
		return api.Session{}, err
	}
	s.State, s.OffsetFirst, s.OffsetNext, s.Exit = stateOf(st.Status), int64(st.First), int64(st.End), exitOf(st.Exit)
	if st.Start != nil {
		s.StartedAt = st.Start.At.UTC()
	}
	if st.EndedAt != nil {
		s.EndedAt = st.EndedAt.UTC()
	}
	return s, nil
}

func stateOf(s session.Status) api.SessionState {
	switch s {
	case session.Created:
		return api.SessionCreated
	case session.Exited:
		return api.SessionExited
	case session.Lost:
		return api.SessionLost
	case session.Expired:
		return api.SessionExpired
	}
	return api.SessionRunning // starting: it may run
}

func exitOf(x *session.Exit) *api.Exit {
	if x == nil {
		return nil
	}
	return &api.Exit{Code: x.Code, Signal: x.Signal, Reason: x.Reason, Message: guestText(x.Message)}
}

// AttachSession starts a session's command, once, and streams its log or, where
// the client accepts only JSON, answers how far it is.
func (p *Plane) AttachSession(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, sessionID api.SessionParam, params api.AttachSessionParams) {
	form, err := rest.Negotiate(r, eventStream, octets, jsonForm)
	var row sandbox.Session
	if err == nil {
		row, err = p.o.Identities.Session(r.Context(), callerOf(r.Context()), sandboxID, sessionID)
	}
	ref := session.Ref{Sandbox: sandboxID, Session: sessionID}
	if err == nil {
		err = p.start(r, ref)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	if form == jsonForm {
		p.answer(w, r, row)
		return
	}
	if !p.over(ref) {
		defer p.o.Identities.Hold(sandboxID)()
	}
	p.follow(w, r, ref, position(params.Offset, params.LastEventID), form)
}

// start starts a session that was not started. One that was needs no sandbox
// that runs: its log can be had all the same, and goes on when the sandbox does.
// While the command has not ended the sandbox is woken for it, where its policy
// says so.
func (p *Plane) start(r *http.Request, ref session.Ref) error {
	st, err := p.o.Recorder.State(ref)
	if err != nil {
		return err
	}
	switch st.Status {
	case session.Created, session.Starting:
	case session.Running:
		_, err := p.access(r.Context(), ref.Sandbox)
		return err
	default:
		return alive(st)
	}
	if err := p.awake(r.Context(), ref.Sandbox); err != nil {
		return err
	}
	_, err = p.o.Recorder.Start(r.Context(), ref)
	return err
}

// alive refuses a session that expired, which has no log.
func alive(st session.State) error {
	if st.Status == session.Expired {
		return sandbox.Errorf(sandbox.FailedPrecondition, "session_expired", "the session expired before it was attached").
			WithHint("make a new session")
	}
	return nil
}

// FollowSession streams a session's log. It starts nothing.
func (p *Plane) FollowSession(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, sessionID api.SessionParam, params api.FollowSessionParams) {
	form, err := rest.Negotiate(r, eventStream, octets)
	var ref session.Ref
	if err == nil {
		ref, err = p.readable(r, sandboxID, sessionID)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	p.follow(w, r, ref, position(params.Offset, params.LastEventID), form)
}

// readable is known for a session that has, or will have, a log.
func (p *Plane) readable(r *http.Request, sandboxID, sessionID string) (session.Ref, error) {
	ref, err := p.known(r, sandboxID, sessionID)
	if err != nil {
		return ref, err
	}
	st, err := p.o.Recorder.State(ref)
	if err != nil {
		return ref, err
	}
	return ref, alive(st)
}

// position is where a stream begins: behind the last event seen, or at offset.
// The contract has checked both.
func position(offset int64, last string) uint64 {
	if n, err := strconv.ParseUint(last, 10, 63); err == nil && last != "" {
		return n
	}
	return uint64(offset)
}
