package httpapi

import (
	"net/http"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// GetUsage answers what the caller's project has and may have.
func (a *API) GetUsage(w http.ResponseWriter, r *http.Request) {
	usage, quotas, err := a.o.Control.Usage(r.Context(), callerOf(r))
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, api.ProjectUsage{Project: callerOf(r).Project, Usage: showUsage(usage), Quotas: showQuotas(quotas)})
}

// SetQuotas replaces a project's quotas.
func (a *API) SetQuotas(w http.ResponseWriter, r *http.Request, project api.ProjectID) {
	var body api.Quotas
	_, err := rest.Decode(w, r, &body)
	var p sandbox.Project
	if err == nil {
		p, err = a.o.Control.SetQuotas(r.Context(), callerOf(r), project, sandbox.Quotas{
			Running: body.Running, Suspended: body.Suspended, MilliCPU: body.MilliCpu, MemoryMiB: body.MemoryMib,
			DiskMiB: body.DiskMib, Snapshots: body.Snapshots,
		})
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.JSON(w, r, http.StatusOK, api.Project{Id: p.ID, Name: p.Name, Quotas: showQuotas(p.Quotas), CreatedAt: p.CreatedAt.UTC()})
}

func showQuotas(q sandbox.Quotas) api.Quotas {
	return api.Quotas{
		Running: q.Running, Suspended: q.Suspended, MilliCpu: q.MilliCPU, MemoryMib: q.MemoryMiB, DiskMib: q.DiskMiB, Snapshots: q.Snapshots,
	}
}

// DrainHost makes everything that has a machine safe, and tells what it could
// not.
func (a *API) DrainHost(w http.ResponseWriter, r *http.Request) {
	var body api.DrainRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	report, err := a.o.Control.Drain(r.Context(), callerOf(r), time.Duration(body.WithinSeconds)*time.Second)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	answer := api.DrainReport{Done: report.Done, Left: report.Left}
	if answer.Done == nil {
		answer.Done = []string{}
	}
	if answer.Left == nil {
		answer.Left = map[string]string{}
	}
	rest.JSON(w, r, http.StatusOK, answer)
}

func showUsage(u sandbox.Usage) api.Usage {
	return api.Usage{
		Running: u.Running, Suspended: u.Suspended, MilliCpu: u.MilliCPU, MemoryMib: u.MemoryMiB, DiskMib: u.DiskMiB, Snapshots: u.Snapshots,
	}
}
