package sqlite

import (
	"context"
	"database/sql"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// noCapacityRetry is when a caller should ask a full host again.
const noCapacityRetry = 30 * time.Second

// take is what a transition adds to what its project and the host have.
type take struct {
	sandbox.Usage
	disk bool // it writes to the host's disk
}

// machines is n sandboxes more with a machine.
func machines(n int, r sandbox.Resources) take {
	return take{Usage: sandbox.Usage{Running: n, MilliCPU: n * r.MilliCPU, MemoryMiB: n * r.MemoryMiB}, disk: true}
}

// onDisk adds n sandboxes' disks.
func (t take) onDisk(n int, r sandbox.Resources) take {
	t.DiskMiB += int64(n) * int64(r.DiskMiB)
	return t
}

// takes is what the transition t of sb takes. A transition of a sandbox that
// has a machine takes no second one; suspend and stop are not bound by the
// host's disk, since its free floor is there for them.
func takes(sb sandbox.Sandbox, t sandbox.Transition, b sandbox.Begin) take {
	switch {
	case t.Verb == sandbox.VerbFork:
		n := len(b.Children)
		return machines(n, sb.Resources).onDisk(n, sb.Resources)
	case t.Verb == sandbox.VerbSnapshot:
		need := take{Usage: sandbox.Usage{DiskMiB: 1}, disk: true} // its size is not known yet
		if b.Snapshot.Purpose == sandbox.PurposeNamed {
			need.Snapshots = 1
		}
		return need
	case t.To == sandbox.StateSuspended || t.To == sandbox.StateStopped:
		return take{Usage: sandbox.Usage{Suspended: 1}}
	case t.To.HasMachine() && !t.From.HasMachine():
		return machines(1, sb.Resources)
	}
	return take{}
}

// byState is what the sandboxes in one state have.
type byState struct {
	state sandbox.State
	sandbox.Usage
}

// usageOf sums what a project has, or with "" all of them. leaving counts those
// of Running that are on their way to being suspended or stopped. A sandbox has a
// machine, or is on the way to or from one, where it is not known to have none.
func usageOf(ctx context.Context, q queryer, project string) (u sandbox.Usage, leaving int, err error) {
	scope, args := "", []any(nil)
	if project != "" {
		scope, args = " AND project = ?", []any{project}
	}
	sums, err := collect(ctx, q, func(r scanner) (g byState, err error) {
		err = r.Scan(&g.state, &g.Running, &g.MilliCPU, &g.MemoryMiB, &g.DiskMiB)
		return g, err
	}, `SELECT state, count(*), sum(milli_cpu), sum(memory_mib), sum(disk_mib)
		FROM sandboxes WHERE state <> 'deleted'`+scope+" GROUP BY project, state", args...)
	if err != nil {
		return u, 0, err
	}
	for _, g := range sums {
		u.DiskMiB += g.DiskMiB
		switch g.state {
		case sandbox.StateSuspended, sandbox.StateStopped, sandbox.StateFailed:
			u.Suspended += g.Running
			continue
		case sandbox.StateDeleting:
			continue
		case sandbox.StateSuspending, sandbox.StateStopping:
			leaving += g.Running
		}
		u.Running += g.Running
		u.MilliCPU += g.MilliCPU
		u.MemoryMiB += g.MemoryMiB
	}
	var bytes int64
	err = q.QueryRowContext(ctx, `SELECT coalesce(sum(purpose = 'named' AND state IN ('creating','ready')), 0), coalesce(sum(size_bytes), 0)
		FROM snapshots WHERE true`+scope, args...).Scan(&u.Snapshots, &bytes)
	u.DiskMiB += (bytes + 1<<20 - 1) >> 20
	return u, leaving, mapError(ctx, err)
}

// admit refuses what would exceed the project's quotas or the host's capacity.
func admit(ctx context.Context, tx *sql.Tx, project string, host sandbox.Capacity, need take) error {
	if need == (take{}) {
		return nil
	}
	p, err := projectByID(ctx, tx, project)
	if err != nil {
		return err
	}
	if p.Quotas != (sandbox.Quotas{}) {
		has, leaving, err := usageOf(ctx, tx, project)
		if err != nil {
			return err
		}
		has.Suspended += leaving
		if err := withinQuotas(p.Quotas, has, need.Usage); err != nil {
			return err
		}
	}
	return withinHost(ctx, tx, host, need)
}

func withinQuotas(q sandbox.Quotas, has, need sandbox.Usage) error {
	for _, b := range []struct {
		name, of, hint    string
		quota, have, more int64
	}{
		{"running", "sandboxes with a machine", "suspend, stop or delete one", int64(q.Running), int64(has.Running), int64(need.Running)},
		{"suspended", "sandboxes without a machine", "delete one that is suspended, stopped or failed", int64(q.Suspended), int64(has.Suspended), int64(need.Suspended)},
		{"milli_cpu", "thousandths of a core", "suspend, stop or delete a sandbox", int64(q.MilliCPU), int64(has.MilliCPU), int64(need.MilliCPU)},
		{"memory", "MiB of memory", "suspend, stop or delete a sandbox", int64(q.MemoryMiB), int64(has.MemoryMiB), int64(need.MemoryMiB)},
		{"disk", "MiB of disk", "delete sandboxes or snapshots", q.DiskMiB, has.DiskMiB, need.DiskMiB},
		{"snapshots", "named snapshots", "delete one", int64(q.Snapshots), int64(has.Snapshots), int64(need.Snapshots)},
	} {
		if b.quota > 0 && b.more > 0 && b.have+b.more > b.quota {
			return sandbox.Errorf(sandbox.Quota, "quota_"+b.name, "the project may have %d %s; it has %d and this needs %d more", b.quota, b.of, b.have, b.more).
				WithHint("%s, or ask an admin for a larger quota", b.hint)
		}
	}
	return nil
}

// withinHost sums over all projects, since they share the host.
func withinHost(ctx context.Context, tx *sql.Tx, host sandbox.Capacity, need take) error {
	if need.disk && host.DiskFree < host.DiskFloor {
		return sandbox.Errorf(sandbox.NoCapacity, "no_capacity_disk", "the host has %d MiB of disk left and keeps %d MiB free", host.DiskFree>>20, host.DiskFloor>>20).
			WithHint("delete sandboxes or snapshots, or free space on the host").WithRetry(noCapacityRetry)
	}
	if need.Running == 0 || host.MilliCPU == 0 && host.MemoryMiB == 0 {
		return nil
	}
	has, _, err := usageOf(ctx, tx, "")
	if err != nil {
		return err
	}
	for _, b := range []struct {
		name, of         string
		lends, has, more int
	}{
		{"memory", "MiB of memory", host.MemoryMiB, has.MemoryMiB, need.MemoryMiB},
		{"cpu", "thousandths of a core", host.MilliCPU, has.MilliCPU, need.MilliCPU},
	} {
		if b.lends > 0 && b.has+b.more > b.lends {
			return sandbox.Errorf(sandbox.NoCapacity, "no_capacity_"+b.name, "the host lends %d %s; %d are taken and this needs %d more", b.lends, b.of, b.has, b.more).
				WithHint("suspend, stop or delete a sandbox, or try again later").WithRetry(noCapacityRetry)
		}
	}
	return nil
}

// SetQuotas replaces a project's quotas. What it has already stays.
func (s *Store) SetQuotas(ctx context.Context, project string, q sandbox.Quotas) (p sandbox.Project, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		n, err := exec(ctx, tx, "UPDATE projects SET quotas = ? WHERE id = ?", encode(q), project)
		if err != nil {
			return err
		}
		if n == 0 {
			return projectNotFound(project)
		}
		if err := insertEvent(ctx, tx, sandbox.Event{Project: project, At: s.now(), Type: "project.quotas", Data: []byte(encode(q))}); err != nil {
			return err
		}
		p, err = projectByID(ctx, tx, project)
		return err
	})
	return p, err
}

// UsageOf sums what a project, or with "" every project together, has.
func (s *Store) UsageOf(ctx context.Context, project string) (sandbox.Usage, error) {
	// One transaction, so that both sums are of one instant.
	tx, err := s.r.BeginTx(ctx, nil)
	if err != nil {
		return sandbox.Usage{}, mapError(ctx, err)
	}
	defer func() { _ = tx.Rollback() }() // it changes nothing
	u, _, err := usageOf(ctx, tx, project)
	return u, err
}
