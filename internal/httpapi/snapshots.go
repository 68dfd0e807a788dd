package httpapi

import (
	"net/http"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// TakeSnapshot asks for a snapshot that is kept until it is deleted.
func (a *API) TakeSnapshot(w http.ResponseWriter, r *http.Request, id api.SandboxParam, params api.TakeSnapshotParams) {
	var body api.SnapshotRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	req := control.SnapshotRequest{
		Name: body.Name, Kind: sandbox.SnapshotKind(body.Kind), Wait: time.Duration(body.WaitSeconds) * time.Second,
	}
	if req.Kind == "" {
		req.Kind = sandbox.SnapshotMemory
	}
	snap, op, _, err := a.o.Control.TakeSnapshot(r.Context(), callerOf(r), id, req, rest.Idempotency(r, params.IdempotencyKey, body))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	accepted(w, r, op, api.AcceptedSnapshot{Snapshot: showSnapshot(snap), Operation: showOperation(op)})
}

// ListSnapshots answers one page of snapshots.
func (a *API) ListSnapshots(w http.ResponseWriter, r *http.Request, params api.ListSnapshotsParams) {
	filter := sandbox.SnapshotFilter{Sandbox: params.Sandbox}
	rows, next, err := a.o.Control.Snapshots(r.Context(), callerOf(r), filter, rest.Page(params.Limit, params.PageToken))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	list := api.SnapshotList{Items: make([]api.Snapshot, 0, len(rows)), NextPageToken: next}
	for _, s := range rows {
		list.Items = append(list.Items, showSnapshot(s))
	}
	rest.JSON(w, r, http.StatusOK, list)
}

// GetSnapshot answers one snapshot.
func (a *API) GetSnapshot(w http.ResponseWriter, r *http.Request, id api.SnapshotID) {
	s, err := a.o.Control.Snapshot(r.Context(), callerOf(r), id)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, showSnapshot(s))
}

// DeleteSnapshot gives a snapshot up; its files go soon after.
func (a *API) DeleteSnapshot(w http.ResponseWriter, r *http.Request, id api.SnapshotID) {
	s, err := a.o.Control.DeleteSnapshot(r.Context(), callerOf(r), id)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusAccepted, showSnapshot(s))
}

func showSnapshot(s sandbox.Snapshot) api.Snapshot {
	out := api.Snapshot{
		Id: s.ID, Project: s.Project, Sandbox: s.Sandbox, Name: s.Name, Kind: api.SnapshotKind(s.Kind), Purpose: string(s.Purpose),
		State: api.SnapshotState(s.State), Parent: s.Parent, Template: s.Template, Digest: s.Digest, Driver: s.Driver,
		Resources: showResources(s.Resources), SizeBytes: s.SizeBytes, Operation: s.Operation, CreatedAt: s.CreatedAt.UTC(), TakenAt: at(s.TakenAt),
	}
	if n := s.Needs; n.Driver != "" {
		out.Needs = &api.Needs{
			Format: n.Format, Driver: n.Driver, Engine: n.Engine, EngineHash: n.EngineHash, Guest: n.Guest, Cpu: n.CPU, Digest: n.Digest,
		}
	}
	return out
}
