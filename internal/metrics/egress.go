package metrics

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Egress is what the gateway tells of itself.
type Egress struct {
	Decisions   map[Decision]uint64 // since the daemon's start
	Connections int64               // open now
	Sandboxes   int                 // attached now
}

// Decision is what decisions are counted by.
type Decision struct{ Kind, Verdict string }

// egress shows Options.Egress.
type egress struct{ o Options }

var (
	decisionsDesc   = prometheus.NewDesc("cloche_egress_decisions_total", "Decisions of the egress gateway, as audited.", []string{"kind", "verdict"}, nil)
	connectionsDesc = prometheus.NewDesc("cloche_egress_connections", "Connections of sandboxes that are open at the egress gateway.", nil, nil)
	attachedDesc    = prometheus.NewDesc("cloche_egress_sandboxes", "Sandboxes that the egress gateway serves.", nil, nil)
)

// egressWait bounds the question to the gateway.
const egressWait = 2 * time.Second

// Describe implements prometheus.Collector.
func (egress) Describe(ch chan<- *prometheus.Desc) {
	ch <- decisionsDesc
	ch <- connectionsDesc
	ch <- attachedDesc
}

// Collect implements prometheus.Collector.
func (e egress) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), egressWait)
	defer cancel()
	now, err := e.o.Egress(ctx)
	for d, n := range now.Decisions {
		ch <- prometheus.MustNewConstMetric(decisionsDesc, prometheus.CounterValue, float64(n), d.Kind, d.Verdict)
	}
	if err != nil { // between two gateways
		e.o.Log.Debug("ask the egress gateway how it is", "err", err)
		return
	}
	ch <- prometheus.MustNewConstMetric(connectionsDesc, prometheus.GaugeValue, float64(now.Connections))
	ch <- prometheus.MustNewConstMetric(attachedDesc, prometheus.GaugeValue, float64(now.Sandboxes))
}
