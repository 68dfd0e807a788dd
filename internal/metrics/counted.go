package metrics

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cloche.dev/cloche/internal/sandbox"
)

// counted are the metrics that grow.
type counted struct {
	operations   *prometheus.HistogramVec
	failures     *prometheus.CounterVec
	sizes        *prometheus.HistogramVec
	ends         *prometheus.CounterVec
	requests     *prometheus.HistogramVec
	refusals     *prometheus.CounterVec
	unread       *prometheus.CounterVec
	codes, ended *few
}

func newCounted() counted {
	return counted{
		operations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cloche_operation_seconds",
			Help: "How long operations took that ended: step wait is from accepted to started, run from started to ended, all is both.",
			// From what a pause takes to what a build takes.
			Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800},
		}, []string{"verb", "step", "result"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cloche_operation_errors_total", Help: "Operations that failed.",
		}, []string{"verb", "class", "code"}),
		sizes: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cloche_snapshot_size_bytes", Help: "Sizes on disk of the snapshots that were taken.",
			Buckets: prometheus.ExponentialBuckets(1<<20, 4, 10), // 1 MiB to 256 GiB
		}, []string{"kind", "purpose"}),
		ends: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cloche_machine_ends_total", Help: "Machines that ended without being asked to.",
		}, []string{"reason"}),
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cloche_http_request_seconds", Help: "How long requests to the API took, streams and long polls included.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30, 300},
		}, []string{"status"}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cloche_http_errors_total", Help: "Requests to the API that were answered with an error.",
		}, []string{"class", "code"}),
		unread: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cloche_metrics_errors_total", Help: "Times that something measured could not be read.",
		}, []string{"what"}),
		codes: &few{most: 300}, ended: &few{most: 30},
	}
}

func (c *counted) all() []prometheus.Collector {
	return []prometheus.Collector{c.operations, c.failures, c.sizes, c.ends, c.requests, c.refusals, c.unread}
}

// Request counts one request to the API: the face calls it when it has
// answered. err is what it answered, or nil.
func (m *Metrics) Request(status int, took time.Duration, err *sandbox.Error) {
	m.requests.WithLabelValues(strconv.Itoa(status)).Observe(took.Seconds())
	if err != nil {
		m.refusals.WithLabelValues(string(err.Class), m.codes.of(err.Code)).Inc()
	}
}

// operation counts one that has ended.
func (c *counted) operation(op sandbox.Operation) {
	if op.EndedAt == nil {
		return
	}
	verb, result := string(op.Verb), string(op.State)
	step := func(name string, from, to time.Time) {
		c.operations.WithLabelValues(verb, name, result).Observe(max(0, to.Sub(from).Seconds()))
	}
	step("all", op.CreatedAt, *op.EndedAt)
	if op.StartedAt == nil {
		step("wait", op.CreatedAt, *op.EndedAt)
	} else {
		step("wait", op.CreatedAt, *op.StartedAt)
		step("run", *op.StartedAt, *op.EndedAt)
	}
	if e := op.Error; e != nil {
		c.failures.WithLabelValues(verb, string(e.Class), c.codes.of(e.Code)).Inc()
	}
}

// few bounds the values of a label: those that come after the most are "other".
type few struct {
	most int
	mu   sync.Mutex
	seen map[string]bool
}

func (f *few) of(value string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.seen[value] {
		return value
	}
	if len(f.seen) >= f.most {
		return "other"
	}
	if f.seen == nil {
		f.seen = map[string]bool{}
	}
	f.seen[value] = true
	return value
}
