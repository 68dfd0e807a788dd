package metrics

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	// rowsKept is how long what was read of the store is shown again.
	rowsKept = 5 * time.Second
	// rowsTimeout bounds reading it, so that a scrape still has the rest.
	rowsTimeout = 5 * time.Second
	rowsPage    = 500
)

// rows reads gauges when they are asked for.
type rows struct {
	o    Options
	now  func() time.Time
	mu   sync.Mutex // held while they are read
	at   time.Time
	last []prometheus.Metric
}

func newRows(o Options) *rows { return &rows{o: o, now: time.Now} }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("cloche_"+name, help, labels, nil)
}

var (
	sandboxesDesc     = desc("sandboxes", "Sandboxes that are not deleted, by state.", "state")
	snapshotsDesc     = desc("snapshots", "Snapshots that are ready.", "kind", "purpose")
	snapshotBytesDesc = desc("snapshot_bytes", "Bytes on disk of the snapshots that are ready.", "kind", "purpose")
	usedCPUDesc       = desc("used_cpu_cores", "Cores that sandboxes with a machine were given.")
	usedMemoryDesc    = desc("used_memory_bytes", "Memory that sandboxes with a machine were given.")
	usedDiskDesc      = desc("used_disk_bytes", "Disk that sandboxes may write and snapshots hold.")
	hostCPUDesc       = desc("host_cpu_cores", "Cores that the host lends to sandboxes; absent where that has no bound.")
	hostMemoryDesc    = desc("host_memory_bytes", "Memory that the host lends to sandboxes; absent where that has no bound.")
	diskFreeDesc      = desc("host_disk_free_bytes", "Free bytes where the state directory is.")
	diskFloorDesc     = desc("host_disk_floor_bytes", "Bytes that stay free: below them nothing new is made.")
	queueDesc         = desc("bringups", "Machines that are being brought up, and those that wait for their turn.", "state")
	sessionsDesc      = desc("sessions", "Sessions that are kept on this host, by status.", "status")
	readDesc          = desc("metrics_read", "Whether something measured could be read: 1, or 0.", "what")
)

// Describe implements prometheus.Collector.
func (r *rows) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		sandboxesDesc, snapshotsDesc, snapshotBytesDesc, usedCPUDesc, usedMemoryDesc, usedDiskDesc, hostCPUDesc, hostMemoryDesc,
		diskFreeDesc, diskFloorDesc, queueDesc, sessionsDesc, readDesc,
	} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (r *rows) Collect(to chan<- prometheus.Metric) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == nil || r.now().Sub(r.at) >= rowsKept {
		ctx, cancel := context.WithTimeout(context.Background(), rowsTimeout)
		defer cancel()
		r.last, r.at = r.read(ctx), r.now()
	}
	for _, m := range r.last {
		to <- m
	}
}

// gauges gathers metrics.
type gauges []prometheus.Metric

func (g *gauges) set(d *prometheus.Desc, v float64, labels ...string) {
	*g = append(*g, prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...))
}

// read reads each part by itself: what can't be read is left out, and said.
func (r *rows) read(ctx context.Context) []prometheus.Metric {
	var all gauges
	for _, p := range []struct {
		what string
		read func(context.Context, *gauges) error
	}{{"sandboxes", r.sandboxes}, {"snapshots", r.snapshots}, {"usage", r.usage}, {"host", r.host}} {
		var g gauges
		if err := p.read(ctx, &g); err != nil {
			r.o.Log.WarnContext(ctx, "a part of the metrics can't be read", "what", p.what, "error", err)
			all.set(readDesc, 0, p.what)
			continue
		}
		all.set(readDesc, 1, p.what)
		all = append(all, g...)
	}
	if r.o.Sessions != nil {
		for status, n := range r.o.Sessions() {
			all.set(sessionsDesc, float64(n), status)
		}
	}
	return all
}

func (r *rows) sandboxes(ctx context.Context, g *gauges) error {
	count := r.o.States
	if count == nil {
		count = r.countStates
	}
	n, err := count(ctx)
	if err != nil {
		return err
	}
	for _, s := range sandbox.States {
		if s != sandbox.StateDeleted {
			g.set(sandboxesDesc, float64(n[s]), string(s))
		}
	}
	return nil
}

func (r *rows) countStates(ctx context.Context) (map[sandbox.State]int, error) {
	n := map[sandbox.State]int{}
	var living sandbox.SandboxFilter
	for _, s := range sandbox.States {
		if s != sandbox.StateDeleted {
			living.States = append(living.States, s)
		}
	}
	for p := (sandbox.Page{Limit: rowsPage}); ; {
		list, next, err := r.o.Store.Sandboxes(ctx, "", living, p)
		if err != nil {
			return nil, err
		}
		for _, sb := range list {
			n[sb.State]++
		}
		if next == "" {
			return n, nil
		}
		p.Token = next
	}
}

func (r *rows) snapshots(ctx context.Context, g *gauges) error {
	type group struct {
		kind    sandbox.SnapshotKind
		purpose sandbox.SnapshotPurpose
	}
	count, bytes := map[group]int{}, map[group]int64{}
	ready := sandbox.SnapshotFilter{States: []sandbox.SnapshotState{sandbox.SnapshotReady}}
	for p := (sandbox.Page{Limit: rowsPage}); ; {
		list, next, err := r.o.Store.Snapshots(ctx, "", ready, p)
		if err != nil {
			return err
		}
		for _, s := range list {
			count[group{s.Kind, s.Purpose}]++
			bytes[group{s.Kind, s.Purpose}] += s.SizeBytes
		}
		if next == "" {
			break
		}
		p.Token = next
	}
	for k, n := range count {
		g.set(snapshotsDesc, float64(n), string(k.kind), string(k.purpose))
		g.set(snapshotBytesDesc, float64(bytes[k]), string(k.kind), string(k.purpose))
	}
	return nil
}

func (r *rows) usage(ctx context.Context, g *gauges) error {
	u, err := r.o.Store.UsageOf(ctx, "")
	if err != nil {
		return err
	}
	g.set(usedCPUDesc, float64(u.MilliCPU)/1000)
	g.set(usedMemoryDesc, float64(u.MemoryMiB)*(1<<20))
	g.set(usedDiskDesc, float64(u.DiskMiB)*(1<<20))
	return nil
}

func (r *rows) host(ctx context.Context, g *gauges) error {
	if r.o.Host == nil {
		return nil
	}
	c, err := r.o.Host.Capacity(ctx)
	if err != nil {
		return err
	}
	if c.MilliCPU > 0 {
		g.set(hostCPUDesc, float64(c.MilliCPU)/1000)
	}
	if c.MemoryMiB > 0 {
		g.set(hostMemoryDesc, float64(c.MemoryMiB)*(1<<20))
	}
	g.set(diskFreeDesc, float64(c.DiskFree))
	g.set(diskFloorDesc, float64(c.DiskFloor))
	running, waiting, err := r.o.Host.Queue(ctx)
	if err != nil {
		return err
	}
	g.set(queueDesc, float64(running), "running")
	g.set(queueDesc, float64(waiting), "waiting")
	return nil
}
