package tap

import (
	"bytes"
	"expvar"
	"fmt"
	"io"
	"log"
	"net/http"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

// counters count the records of one source. They are variables of expvar, which is how several interpreters in one process share them.
type counters struct {
	sent, failed, rejected, dropped, bytes *expvar.Int
	// buckets count the deliveries by duration: as many as there are bounds, and one more.
	buckets []*expvar.Int
	seconds *expvar.Float
}

// Outcomes, as they stand in the metrics.
const (
	outcomeSent     = "sent"
	outcomeFailed   = "failed"
	outcomeRejected = "rejected"
	outcomeDropped  = "dropped"
)

// bounds are the upper ends of the buckets in seconds: those of Traefik's own metrics are coarser than a POST on a local network.
var bounds = []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10}

// metrics are those of the whole process.
var metrics = newMetrics()

type metricsMap struct {
	// byName has a map for every middleware, with a map for every kind, and the gauge called pending.
	byName  *expvar.Map
	pending *expvar.Int
	mu      sync.Mutex
}

// newMetrics publishes the variable called tap, or shares the one that another interpreter of this process has published.
func newMetrics() *metricsMap {
	m := &metricsMap{}
	switch published := expvar.Get("tap").(type) {
	case nil:
		m.byName = expvar.NewMap("tap")
	case *expvar.Map:
		m.byName = published
	default:
		// Somebody else has the name. To publish it again would end the process.
		m.byName = new(expvar.Map).Init()
	}
	m.pending = intIn(m.byName, "pending")

	return m
}

// countersFor returns the counters of one kind of record of one middleware. Their number is that of the middlewares configured.
func countersFor(middleware, kind string) *counters {
	metrics.mu.Lock()
	defer metrics.mu.Unlock()

	byKind := mapIn(mapIn(metrics.byName, middleware), kind)
	c := &counters{
		sent:     intIn(byKind, outcomeSent),
		failed:   intIn(byKind, outcomeFailed),
		rejected: intIn(byKind, outcomeRejected),
		dropped:  intIn(byKind, outcomeDropped),
		bytes:    intIn(byKind, "bytes"),
	}

	histogram := mapIn(byKind, "seconds")
	for _, bound := range bounds {
		c.buckets = append(c.buckets, intIn(histogram, formatBound(bound)))
	}
	c.buckets = append(c.buckets, intIn(histogram, "+Inf"))
	sum, ok := histogram.Get("sum").(*expvar.Float)
	if !ok {
		sum = new(expvar.Float)
		histogram.Set("sum", sum)
	}
	c.seconds = sum

	return c
}

func formatBound(bound float64) string {
	return strconv.FormatFloat(bound, 'g', -1, 64)
}

func intIn(in *expvar.Map, name string) *expvar.Int {
	value, ok := in.Get(name).(*expvar.Int)
	if !ok {
		value = new(expvar.Int)
		in.Set(name, value)
	}

	return value
}

func mapIn(in *expvar.Map, name string) *expvar.Map {
	value, ok := in.Get(name).(*expvar.Map)
	if !ok {
		value = new(expvar.Map).Init()
		in.Set(name, value)
	}

	return value
}

// account counts a record, and the others of its batch, by what came of their delivery. A failure is told to the log.
func account(d *delivery, others []*delivery, err error) {
	for {
		c := d.source.counters
		seconds := time.Since(d.started).Seconds()
		c.seconds.Add(seconds)
		c.buckets[sort.SearchFloat64s(bounds, seconds)].Add(1)
		if err != nil {
			accountFailure(d, err)
		} else {
			c.sent.Add(1)
			c.bytes.Add(int64(len(d.payload)))
		}

		if len(others) == 0 {
			return
		}
		d = others[0]
		others = others[1:]
	}
}

func accountFailure(d *delivery, err error) {
	d.err = err
	if d.rejects {
		d.source.counters.rejected.Add(1)
	} else {
		d.source.counters.failed.Add(1)
	}
	report(d.source, err)
}

// accountDropped counts a record that was not even tried.
func accountDropped(d *delivery) {
	d.source.counters.dropped.Add(1)
	report(d.source, errDropped)
}

// metricsHandler answers one path with the metrics, and leaves all others to the tap.
type metricsHandler struct {
	next http.Handler
	path string
}

// ServeHTTP implements http.Handler.
func (h *metricsHandler) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	if req.URL.Path == h.path {
		serveMetrics(rw)
	} else {
		h.next.ServeHTTP(rw, req)
	}
}

// serveMetrics answers in the text format of Prometheus.
func serveMetrics(rw http.ResponseWriter) {
	var records, sizes, seconds bytes.Buffer
	metrics.byName.Do(func(middleware expvar.KeyValue) {
		byKind, ok := middleware.Value.(*expvar.Map)
		if !ok {
			return
		}
		byKind.Do(func(kind expvar.KeyValue) {
			labels := fmt.Sprintf(`middleware="%s",kind="%s"`, escapeLabel(middleware.Key), escapeLabel(kind.Key))
			writeSource(&records, &sizes, &seconds, labels, kind.Value.(*expvar.Map)) //nolint:errcheck // countersFor has made it one.
		})
	})

	rw.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = fmt.Fprintf(rw, "# HELP tap_records_total Records by what came of them.\n# TYPE tap_records_total counter\n%s"+
		"# HELP tap_record_bytes_total Bytes of the records that were accepted.\n# TYPE tap_record_bytes_total counter\n%s"+
		"# HELP tap_delivery_seconds Time from a record being ready to the answer of its endpoint.\n# TYPE tap_delivery_seconds histogram\n%s"+
		"# HELP tap_pending_records Records handed over and not yet answered.\n# TYPE tap_pending_records gauge\ntap_pending_records %s\n",
		records.String(), sizes.String(), seconds.String(), metrics.pending.String())
}

func writeSource(records, sizes, seconds *bytes.Buffer, labels string, source *expvar.Map) {
	for _, outcome := range []string{outcomeSent, outcomeFailed, outcomeRejected, outcomeDropped} {
		fmt.Fprintf(records, "tap_records_total{%s,outcome=\"%s\"} %s\n", labels, outcome, source.Get(outcome).String())
	}
	fmt.Fprintf(sizes, "tap_record_bytes_total{%s} %s\n", labels, source.Get("bytes").String())

	histogram := mapIn(source, "seconds")
	var count int64
	for _, bound := range bounds {
		count += intIn(histogram, formatBound(bound)).Value()
		fmt.Fprintf(seconds, "tap_delivery_seconds_bucket{%s,le=\"%s\"} %d\n", labels, formatBound(bound), count)
	}
	count += intIn(histogram, "+Inf").Value()
	fmt.Fprintf(seconds, "tap_delivery_seconds_bucket{%s,le=\"+Inf\"} %d\n", labels, count)
	fmt.Fprintf(seconds, "tap_delivery_seconds_sum{%s} %s\n", labels, histogram.Get("sum").String())
	fmt.Fprintf(seconds, "tap_delivery_seconds_count{%s} %d\n", labels, count)
}

// escapeLabel escapes what the text format of Prometheus wants escaped in the value of a label.
func escapeLabel(value string) string {
	return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(value)
}

// logInterval is the least time between two lines in the log about one endpoint.
const logInterval = time.Second

// failures tells the log about an endpoint's failures, once in a logInterval at most.
type failures struct {
	mu sync.Mutex
	// quiet says that a line was written within the last logInterval.
	quiet bool
	// suppressed counts the failures since then, and latest is the line about the last of them.
	suppressed int
	latest     string
}

// report writes a line about a failed record to Traefik's log. Within logInterval of the line before it is held back, and told
// of at the end of that time.
func report(s *source, err error) {
	line := fmt.Sprintf("Unable to send the %s record error=%q middlewareName=%s middlewareType=Tap", s.kind, err.Error(), s.middleware)

	f := &s.endpoint.failures
	f.mu.Lock()
	defer f.mu.Unlock()

	if f.quiet {
		f.suppressed++
		f.latest = line

		return
	}
	f.quiet = true
	time.AfterFunc(logInterval, func() { reportSuppressed(f) })
	writeLog(line)
}

// reportSuppressed writes the line about the failures that were held back. With none, the next failure is logged at once.
func reportSuppressed(f *failures) {
	f.mu.Lock()
	defer f.mu.Unlock()

	if f.suppressed == 0 {
		f.quiet = false

		return
	}
	// The line stands for one failure itself.
	if f.suppressed > 1 {
		f.latest += fmt.Sprintf(" suppressed=%d", f.suppressed-1)
	}
	writeLog(f.latest)
	f.suppressed = 0
	time.AfterFunc(logInterval, func() { reportSuppressed(f) })
}

// writeLog writes a line to Traefik's log, at ERROR: there Traefik's plugin loader sends what is written to log.Writer.
func writeLog(line string) {
	_, _ = io.WriteString(log.Writer(), line+"\n")
}
