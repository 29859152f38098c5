package yaegi_test

import (
	"context"
	"encoding/json"
	"expvar"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

func TestMetrics_AreSharedByAllInterpretersOfAProcess(t *testing.T) {
	second, err := host.Interpret(host.Options{Stderr: pluginLog})
	require.NoError(t, err)
	endpoint := newReceiver(t, nil)
	name := uncounted("shared@file")

	for _, plugin := range []host.Plugin{interpretedPlugin, second, host.Compiled()} {
		handler := newHandler(t, plugin, settings{"exchange": one(endpoint.URL, nil), "metricsPath": "/metrics"}, http.HandlerFunc(accept), name)
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
	}

	counted := countsOf(t, name)
	assert.EqualValues(t, 6, counted.Sent)
	bytes := 0
	for range 6 {
		bytes += len(endpoint.next(t).Payload)
	}
	assert.EqualValues(t, bytes, counted.Bytes)
	for _, plugin := range []host.Plugin{interpretedPlugin, second, host.Compiled()} {
		handler := newHandler(t, plugin, settings{"exchange": one(endpoint.URL, nil), "metricsPath": "/metrics"}, http.HandlerFunc(accept), "reader@file")
		labels := map[string]string{"middleware": name, "kind": "exchange", "outcome": "sent"}
		assert.EqualValues(t, 6, metricOf(t, scrape(t, handler, "/metrics"), "tap_records_total", labels).GetCounter().GetValue())
	}
}

func TestMetrics_CountEveryRecordByWhatBecameOfIt(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		// A name that the text format must escape.
		name := uncounted("we \"count\" \\ every\nrecord@file")
		answers := make(chan int, 100)
		endpoint := newReceiver(t, func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(<-answers) })
		config := settings{
			"metricsPath": "metrics",
			"request":     one(endpoint.URL, settings{"rejectOnRecordError": true}),
			"exchange":    one(endpoint.URL, settings{"headers": settings{"X-For": "exchange"}}),
		}
		handler := newHandler(t, e.plugin, config, http.HandlerFunc(accept), name)
		serve := func(statuses ...int) {
			for _, status := range statuses {
				answers <- status
			}
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", strings.NewReader("body")))
		}

		serve(200, 200)
		serve(200, 500)
		serve(204, 399)
		serve(503) // Rejected: there is no exchange.

		families := scrape(t, handler, "/metrics?x=1")
		for kind, outcomes := range map[string]map[string]int{
			"request":  {"sent": 3, "failed": 0, "rejected": 1, "dropped": 0},
			"exchange": {"sent": 2, "failed": 1, "rejected": 0, "dropped": 0},
		} {
			labels := map[string]string{"middleware": name, "kind": kind}
			deliveries := 0
			for outcome, count := range outcomes {
				labels["outcome"] = outcome
				assert.EqualValues(t, count, metricOf(t, families, "tap_records_total", labels).GetCounter().GetValue(), "%s %s", kind, outcome)
				deliveries += count
			}
			delete(labels, "outcome")

			histogram := metricOf(t, families, "tap_delivery_seconds", labels).GetHistogram()
			assert.EqualValues(t, deliveries, histogram.GetSampleCount(), kind)
			assert.Positive(t, histogram.GetSampleSum())
			last := uint64(0)
			for _, bucket := range histogram.GetBucket() {
				assert.GreaterOrEqual(t, bucket.GetCumulativeCount(), last, "buckets are cumulative")
				last = bucket.GetCumulativeCount()
			}
			assert.EqualValues(t, deliveries, last)
		}
	})
}

func TestMetrics_PathIsNeitherRecordedNorPassedOn(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			passed := make(chan string, 10)
			config := every(endpoint.URL, settings{"rejectOnRecordError": reject})
			config["metricsPath"] = "/metrics"
			s := newTap(t, e, config, func(_ http.ResponseWriter, req *http.Request) { passed <- req.URL.Path })

			resp, body := s.do(t, http.MethodGet, "/metrics", nil)
			require.Nil(t, s.done(t))
			assert.Equal(t, http.StatusOK, resp.StatusCode)
			assert.Contains(t, string(body), "# TYPE tap_records_total counter")
			assert.Equal(t, expfmt.TypeTextPlain, expfmt.ResponseFormat(resp.Header).FormatType())
			endpoint.none(t)
			assert.Empty(t, passed)

			for _, path := range []string{"/metrics/", "/metrics2", "/"} {
				s.do(t, http.MethodGet, path, nil)
				require.Nil(t, s.done(t))
				assert.Equal(t, path, <-passed)
				endpoint.kinds(t, 3)
			}
		})
	})
}

func TestMetrics_NamesComeFromTheConfigurationOnly(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newReceiver(t, nil)
		config := settings{"exchange": one(endpoint.URL, nil), "metricsPath": "/metrics"}
		handler := newHandler(t, e.plugin, config, http.HandlerFunc(accept), "names@file")
		before := seriesOf(scrape(t, handler, "/metrics"))

		for i := range 100 {
			req := httptest.NewRequest(fmt.Sprintf("METHOD%d", i), fmt.Sprintf("http://host%d.test/path%d?q=%d", i, i, i), nil)
			req.Header.Set(fmt.Sprintf("X-Header-%d", i), "x")
			handler.ServeHTTP(httptest.NewRecorder(), req)
		}

		assert.Equal(t, before, seriesOf(scrape(t, handler, "/metrics")))
	})
}

func TestMetrics_PendingIsAGauge(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newHanging(t)
		config := settings{"exchange": one(endpoint.URL, settings{"maxPending": 40, "timeout": "1m"}), "metricsPath": "/metrics"}
		handler := newHandler(t, e.plugin, config, http.HandlerFunc(accept), "gauge@file")
		before := countsOf(t, "gauge@file")
		for range 50 {
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
		}

		pending := func() float64 {
			return scrape(t, handler, "/metrics")["tap_pending_records"].GetMetric()[0].GetGauge().GetValue()
		}
		assert.EqualValues(t, 40, pending())
		endpoint.end()
		awaitAnswers(t)
		assert.Zero(t, pending())
		counted := countsOf(t, "gauge@file").since(before)
		assert.Equal(t, counts{Sent: 40, Dropped: 10, Bytes: counted.Bytes}, counted)
	})
}

// newHandler returns the tap in front of next, and lets go of it when the test ends.
func newHandler(t *testing.T, plugin host.Plugin, config settings, next http.Handler, name string) http.Handler {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	handler, err := plugin.New(ctx, next, config, name)
	require.NoError(t, err)

	return handler
}

// scrape reads metrics as Prometheus does.
func scrape(t *testing.T, handler http.Handler, target string) map[string]*dto.MetricFamily {
	t.Helper()
	rw := httptest.NewRecorder()
	handler.ServeHTTP(rw, httptest.NewRequest(http.MethodGet, target, nil))
	require.Equal(t, http.StatusOK, rw.Code)
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(rw.Body)
	require.NoError(t, err)

	return families
}

// metricOf returns the metric with these labels and no others.
func metricOf(t *testing.T, families map[string]*dto.MetricFamily, name string, labels map[string]string) *dto.Metric {
	t.Helper()
	require.Contains(t, families, name)
	for _, metric := range families[name].GetMetric() {
		found := map[string]string{}
		for _, label := range metric.GetLabel() {
			found[label.GetName()] = label.GetValue()
		}
		if assert.ObjectsAreEqual(labels, found) {
			return metric
		}
	}
	require.FailNow(t, "no such metric", "%s %v", name, labels)

	return nil
}

// seriesOf returns how many series each metric has.
func seriesOf(families map[string]*dto.MetricFamily) map[string]int {
	series := map[string]int{}
	for name, family := range families {
		series[name] = len(family.GetMetric())
	}

	return series
}

// counts are the records of one middleware by what became of them. They are read as Traefik shows them under /debug/vars.
type counts struct {
	Sent, Failed, Rejected, Dropped, Bytes int64
}

var names atomic.Int64

// uncounted makes a middleware's name of a text, for which nothing has been counted in this process.
func uncounted(text string) string {
	return fmt.Sprintf("%d %s", names.Add(1), text)
}

// countsOf returns what has been counted in this process for a middleware, over all kinds.
func countsOf(t *testing.T, middleware string) counts {
	t.Helper()
	var names map[string]json.RawMessage
	readExpvar(t, &names)
	var kinds map[string]counts
	if text, ok := names[middleware]; ok {
		require.NoError(t, json.Unmarshal(text, &kinds))
	}

	var sum counts
	for _, c := range kinds {
		sum.Sent += c.Sent
		sum.Failed += c.Failed
		sum.Rejected += c.Rejected
		sum.Dropped += c.Dropped
		sum.Bytes += c.Bytes
	}

	return sum
}

// since returns what has been added.
func (c counts) since(before counts) counts {
	return counts{c.Sent - before.Sent, c.Failed - before.Failed, c.Rejected - before.Rejected, c.Dropped - before.Dropped, c.Bytes - before.Bytes}
}

// records returns how many records have been counted.
func (c counts) records() int64 {
	return c.Sent + c.Failed + c.Rejected + c.Dropped
}

// awaitAnswers waits until nothing is pending in this process.
func awaitAnswers(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		var gauge struct{ Pending int64 }
		readExpvar(t, &gauge)

		return gauge.Pending == 0
	}, patience, time.Millisecond)
}

// readExpvar reads the variable of the plugin in the host's process, where every interpreter's ends up.
func readExpvar(t *testing.T, into any) {
	t.Helper()
	variable := expvar.Get("tap")
	require.NotNil(t, variable)
	require.NoError(t, json.Unmarshal([]byte(variable.String()), into))
}
