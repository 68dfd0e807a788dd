package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"

	"cloche.dev/cloche/internal/sandbox"
)

// Store is what is read of a sandbox.Store.
type Store interface {
	Events(ctx context.Context, project string, after int64, limit int) ([]sandbox.Event, error)
	Operation(ctx context.Context, project, id string) (sandbox.Operation, error)
	Sandboxes(ctx context.Context, project string, f sandbox.SandboxFilter, p sandbox.Page) ([]sandbox.Sandbox, string, error)
	Snapshots(ctx context.Context, project string, f sandbox.SnapshotFilter, p sandbox.Page) ([]sandbox.Snapshot, string, error)
	UsageOf(ctx context.Context, project string) (sandbox.Usage, error)
}

// Host is what is read of a sandbox.Node.
type Host interface {
	Queue(ctx context.Context) (running, waiting int, err error)
	Capacity(ctx context.Context) (sandbox.Capacity, error)
}

// Options says what is measured. Store is required; what else is nil has no
// metrics.
type Options struct {
	Store Store
	Host  Host
	// States counts sandboxes by state; nil reads their rows, page by page.
	States func(ctx context.Context) (map[sandbox.State]int, error)
	// Sessions counts the sessions on this host by status.
	Sessions func() map[string]int
	// Output is how many bytes of commands' output were recorded since the start.
	Output func() uint64
	// Egress tells of the egress gateway; with an error it still tells Decisions.
	Egress  func(ctx context.Context) (Egress, error)
	Version string
	Driver  func() string // of new sandboxes, now; nil: "" is told
	Log     *slog.Logger
}

// Metrics holds a daemon's metrics. It is safe for concurrent use.
type Metrics struct {
	o   Options
	reg *prometheus.Registry
	counted
}

// New makes the metrics; Run lets them grow.
func New(o Options) *Metrics {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	m := &Metrics{o: o, reg: prometheus.NewRegistry(), counted: newCounted()}
	m.reg.MustRegister(buildInfo{o}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.reg.MustRegister(m.all()...)
	m.reg.MustRegister(newRows(o))
	if o.Output != nil {
		m.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "cloche_output_bytes_total", Help: "Bytes of commands' output that were recorded.",
		}, func() float64 { return float64(o.Output()) }))
	}
	if o.Egress != nil {
		m.reg.MustRegister(egress{o})
	}
	return m
}

// buildInfo tells what runs here, which a gauge with fixed labels can't: the
// driver of new sandboxes may change.
type buildInfo struct{ o Options }

var buildDesc = prometheus.NewDesc("cloche_build_info", "Always 1; its labels say what runs here.", []string{"driver", "go", "version"}, nil)

// Describe implements prometheus.Collector.
func (buildInfo) Describe(ch chan<- *prometheus.Desc) { ch <- buildDesc }

// Collect implements prometheus.Collector.
func (b buildInfo) Collect(ch chan<- prometheus.Metric) {
	driver := ""
	if b.o.Driver != nil {
		driver = b.o.Driver()
	}
	ch <- prometheus.MustNewConstMetric(buildDesc, prometheus.GaugeValue, 1, driver, runtime.Version(), b.o.Version)
}

// Listen opens the metrics' listener. What can be seen there names no user and
// opens no door, but nobody is asked for a key either: so an address that is
// not loopback needs insecure.
func Listen(ctx context.Context, address string, insecure bool) (net.Listener, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Invalid, "bad_metrics_listen", "the metrics' address is not host:port: %w", err)
	}
	ip := net.ParseIP(host)
	if host != "localhost" && (ip == nil || !ip.IsLoopback()) && !insecure {
		return nil, sandbox.Errorf(sandbox.Invalid, "open_metrics", "%s is not loopback, and metrics need no key", address).
			WithHint("let a proxy on this host ask who wants them, or give --insecure")
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "cannot_listen_metrics", "%w", err).WithHint("--metrics takes another address")
	}
	return l, nil
}

// The bounds of a scrape.
const (
	scrapeTimeout = 10 * time.Second
	maxScrapes    = 4
)

// Handler answers GET /metrics.
func (m *Metrics) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.reg, promhttp.HandlerOpts{
		Timeout: scrapeTimeout, MaxRequestsInFlight: maxScrapes, ErrorHandling: promhttp.ContinueOnError,
	}))
	return mux
}

// Run follows the store and serves l until ctx ends; it closes l. A store that
// can't be read is asked again: the error is only ever the listener's.
func (m *Metrics) Run(ctx context.Context, l net.Listener) error {
	srv := &http.Server{
		Handler: m.Handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second,
		WriteTimeout: 2 * scrapeTimeout, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(m.o.Log.Handler(), slog.LevelDebug),
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return m.follow(ctx) })
	g.Go(func() error {
		<-ctx.Done()
		return srv.Close()
	})
	g.Go(func() error {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve metrics: %w", err)
		}
		return nil
	})
	return g.Wait()
}
