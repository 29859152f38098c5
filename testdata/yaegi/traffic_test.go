package yaegi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap"
	"github.com/traefik-tap/tap/testdata/cost"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

const (
	// clients is how many clients there are at a time where there are many.
	clients = 50
	// downloadPath and uploadPath are those of large bodies.
	downloadPath, uploadPath = "/download", "/upload"
	// bodySize is the size of a large body in bytes.
	bodySize = 100_000_000
	// bodiesInFlight is how many large bodies there are at a time while the heap is looked at.
	bodiesInFlight = 4
)

// tapping is a way to record exchanges.
type tapping struct {
	name  string
	kinds string
	// options are those of each kind. Nil with empty kinds: no tap. Nil with the kinds of the native tap: the inline baseline.
	options settings
}

// The way to record nothing, and the one that all others are compared with.
var (
	noTap  = tapping{name: "none"}
	inline = tapping{name: "inline", kinds: "request+response"}
)

// BenchmarkTraffic measures small exchanges between real clients, a backend and an endpoint on loopback. Everything but a single client is in
// one process: allocations are those of all of it. The endpoint takes the time in the benchmark's name for each POST.
//
// One client sends a request when it has the response to the last one, or thinks in between, longer than the endpoint takes for both
// records; its time is that from a request to the end of its response. Many clients do not think, and their time ends when all records
// have been accepted.
func BenchmarkTraffic(b *testing.B) {
	batches := settings{"maxBatchSize": 100}
	taps := []tapping{
		noTap,
		inline,
		{"open", "request+response", settings{}},
		{"reject", "request+response", settings{"rejectOnRecordError": true}},
		{"batches", "request+response", batches},
		{"exchange", "exchange", settings{}},
		{"exchange-batches", "exchange", batches},
		{"exchange-pending-batches", "exchange", settings{"maxBatchSize": 100, "maxPending": 10_000}},
	}

	for _, delay := range []time.Duration{0, time.Millisecond, 10 * time.Millisecond} {
		for _, load := range []string{"serial", "thinking", "many"} {
			for _, t := range taps {
				for _, e := range enginesOf(t, delay == 0 && load != "thinking") {
					b.Run(fmt.Sprintf("endpoint=%s/load=%s/tap=%s/engine=%s", delay, load, t.name, e.name), func(b *testing.B) {
						b.ReportAllocs()
						switch load {
						case "serial":
							runSerial(b, newLane(b, t, e, delay), 0)
						case "thinking":
							runSerial(b, newLane(b, t, e, delay), time.Millisecond+2*delay)
						default:
							runMany(b, newLane(b, t, e, delay))
						}
					})
				}
			}
		}
	}
}

// BenchmarkBodies measures one body of 100 MB at a time, up or down, through a tap that records the first 64 kB of it. The metric
// heap-B/body is the most live heap for each body in flight, as seen by a garbage collector that runs all the time while there
// are several. It has the buffers of the client, the proxy and the backend in it.
func BenchmarkBodies(b *testing.B) {
	taps := []tapping{
		noTap,
		{"open", "request+response", settings{"recordBody": true}},
		{"reject", "request+response", settings{"recordBody": true, "rejectOnRecordError": true}},
		{"exchange", "exchange", settings{"recordBody": true}},
	}

	for _, path := range []string{uploadPath, downloadPath} {
		for _, t := range taps {
			for _, e := range enginesOf(t, t.name == "exchange") {
				b.Run(fmt.Sprintf("body=%s/tap=%s/engine=%s", path[1:], t.name, e.name), func(b *testing.B) {
					l := newLane(b, t, e, 0)
					heap := measureHeap(b, l, path)
					c := l.dial(b)
					b.SetBytes(bodySize)
					b.ReportAllocs()
					n := bodiesInFlight
					for b.Loop() {
						if err := c.transfer(path); err != nil {
							b.Fatal(err)
						}
						n++
					}
					l.awaitRecords(b, n)
					b.ReportMetric(heap, "heap-B/body")
				})
			}
		}
	}
}

// enginesOf returns the engines that a tap is measured with: compiled too where it is asked for, since what the interpreter costs shows
// where nobody waits for anything else. What is no plugin is compiled.
func enginesOf(t tapping, both bool) []engine {
	compiled := engine{"compiled", host.Compiled()}
	switch interpreted := (engine{"interpreted", interpretedPlugin}); {
	case t.options == nil:
		return []engine{compiled}
	case both:
		return []engine{interpreted, compiled}
	default:
		return []engine{interpreted}
	}
}

// runSerial lets one client send requests one after the other, with a pause in between.
func runSerial(b *testing.B, l *lane, pause time.Duration) {
	b.Helper()
	c := startClient(b, l.address)
	var times []time.Duration
	for b.Loop() {
		took, err := c.exchange(pause)
		if err != nil {
			b.Fatal(err)
		}
		times = append(times, took)
	}
	l.awaitRecords(b, len(times))

	var sum time.Duration
	for _, t := range times {
		sum += t
	}
	slices.Sort(times)
	b.ReportMetric(float64(sum)/float64(len(times)), "ns/op")
	b.ReportMetric(float64(times[len(times)/2]), "p50-ns/op")
}

// runMany lets many clients send requests.
func runMany(b *testing.B, l *lane) {
	b.Helper()
	all := make([]*client, clients)
	for i := range all {
		all[i] = l.dial(b)
	}

	b.ResetTimer()
	var sent atomic.Int64
	var working sync.WaitGroup
	for _, c := range all {
		working.Go(func() {
			for sent.Add(1) <= int64(b.N) {
				if err := c.exchange(); err != nil {
					b.Error(err)

					return
				}
			}
		})
	}
	working.Wait()
	l.awaitRecords(b, b.N)
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "req/s")
}

// measureHeap returns the most live heap in bytes that each of several large bodies in flight adds to that before them.
func measureHeap(b *testing.B, l *lane, path string) float64 {
	b.Helper()
	before := reachableHeap()

	var working sync.WaitGroup
	for range bodiesInFlight {
		c := l.dial(b)
		working.Go(func() {
			if err := c.transfer(path); err != nil {
				b.Error(err)
			}
		})
	}
	done := make(chan struct{})
	go func() {
		working.Wait()
		close(done)
	}()

	most := before
	for {
		select {
		case <-done:
			return float64(most-before) / bodiesInFlight
		default:
			most = max(most, reachableHeap())
		}
	}
}

// reachableHeap returns how many bytes of the heap are in use.
func reachableHeap() uint64 {
	runtime.GC()
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)

	return live[0].Value.Uint64()
}

// lane is a backend behind a reverse proxy behind a tap, and the endpoint of the tap.
type lane struct {
	address string
	// kinds is how many records there are of an exchange.
	kinds int64
	// records counts those that the endpoint has accepted, and accepted has something in it after each POST.
	records  atomic.Int64
	accepted chan struct{}
	// before is how many there were when the measured exchanges began.
	before int64
}

// newLane starts a lane, which is warm and ends with the benchmark.
func newLane(b *testing.B, t tapping, e engine, delay time.Duration) *lane {
	b.Helper()
	l := &lane{accepted: make(chan struct{}, 1)}
	if t.kinds != "" {
		l.kinds = int64(strings.Count(t.kinds, "+") + 1)
	}

	endpoint := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		l.accept(rw, req, delay)
	}))
	b.Cleanup(endpoint.Close)
	backend := httptest.NewServer(http.HandlerFunc(serveBackend))
	b.Cleanup(backend.Close)
	proxy, err := host.Proxy(backend.URL)
	require.NoError(b, err)
	b.Cleanup(proxy.CloseIdleConnections)
	front := httptest.NewServer(l.tap(b, t, e, proxy, endpoint.URL))
	b.Cleanup(front.Close)
	l.address = front.Listener.Addr().String()

	l.warmUp(b)

	return l
}

// tap puts a tap, the baseline, or nothing in front of a handler.
func (l *lane) tap(b *testing.B, t tapping, e engine, next http.Handler, endpoint string) http.Handler {
	b.Helper()
	switch {
	case t.kinds == "":
		return next
	case t.options == nil:
		baseline := newInlineTap(next, endpoint)
		b.Cleanup(baseline.client.CloseIdleConnections)

		return baseline
	default:
		return newBare(b, e.plugin, cost.Settings(t.kinds, endpoint, t.options), next)
	}
}

// warmUp makes as many connections as many clients use, and lets the tap see that there is no tracing.
func (l *lane) warmUp(b *testing.B) {
	b.Helper()
	var working sync.WaitGroup
	for range clients {
		c := l.dial(b)
		working.Go(func() {
			if err := c.exchange(); err != nil {
				b.Error(err)
			}
		})
	}
	working.Wait()
	l.awaitRecords(b, clients)
	l.before = l.records.Load()
}

// accept is the endpoint.
func (l *lane) accept(rw http.ResponseWriter, req *http.Request, delay time.Duration) {
	records := int64(1)
	if req.Header.Get("X-Tap-Record") == "batch" {
		lines := &lineCounter{}
		_, _ = io.Copy(lines, req.Body)
		records = lines.lines
	} else {
		_, _ = io.Copy(io.Discard, req.Body)
	}
	time.Sleep(delay)
	l.records.Add(records)
	select {
	case l.accepted <- struct{}{}:
	default:
	}
	rw.WriteHeader(http.StatusNoContent)
}

// awaitRecords waits until all records of so many exchanges have been accepted. One too few or too many fails the benchmark: what
// was measured would be something else.
func (l *lane) awaitRecords(b *testing.B, exchanges int) {
	b.Helper()
	want := l.before + int64(exchanges)*l.kinds
	for l.records.Load() < want {
		select {
		case <-l.accepted:
		case <-time.After(patience):
			require.FailNow(b, "records are missing", "%d of %d", l.records.Load(), want)
		}
	}
	require.Equal(b, want, l.records.Load())
}

// lineCounter counts the records of a batch.
type lineCounter struct {
	lines int64
}

// Write implements io.Writer.
func (c *lineCounter) Write(p []byte) (int, error) {
	c.lines += int64(bytes.Count(p, []byte("\n")))

	return len(p), nil
}

// zeros are what large bodies are made of.
var zeros [64 << 10]byte

// serveBackend is the backend.
func serveBackend(rw http.ResponseWriter, req *http.Request) {
	header := rw.Header()
	for name, values := range cost.ResponseHeaders() {
		header[name] = values
	}
	switch req.URL.Path {
	case uploadPath:
		_, _ = io.Copy(io.Discard, req.Body)
	case downloadPath:
		header.Set("Content-Length", strconv.Itoa(bodySize))
		_ = writeLarge(rw)
	default:
		_, _ = rw.Write(smallBody)
	}
}

// smallBody is the body of a small response.
var smallBody = []byte(`{"id":1701,"state":"paid","items":[{"article":"47-11","count":2,"price":"12.50"},{"article":"08-15","count":1,"price":"7.99"}]}`)

func writeLarge(w io.Writer) error {
	for rest := bodySize; rest > 0; rest -= len(zeros) {
		if _, err := w.Write(zeros[:min(rest, len(zeros))]); err != nil {
			return err
		}
	}

	return nil
}

// inlineTap is the baseline: what the native tap does with its defaults, in a few lines. The request is recorded, and its record
// delivered, before the handler behind is called; the response is with the client when its record is delivered too.
type inlineTap struct {
	next     http.Handler
	client   *http.Client
	endpoint string
	ids      atomic.Int64
}

func newInlineTap(next http.Handler, endpoint string) *inlineTap {
	transport := &http.Transport{MaxIdleConnsPerHost: 512, DisableCompression: true}

	return &inlineTap{next: next, client: &http.Client{Transport: transport, Timeout: 10 * time.Second}, endpoint: endpoint + "/records"}
}

// ServeHTTP implements http.Handler.
func (t *inlineTap) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	id, received := fmt.Sprintf("%032x", t.ids.Add(1)), time.Now().UTC()
	t.deliver(&tap.Record{ID: id, Kind: "request", Time: received, Request: &tap.Request{
		Method: req.Method, URL: req.RequestURI, Host: req.Host, Proto: req.Proto, RemoteAddr: req.RemoteAddr, Headers: req.Header.Clone(),
	}})

	w := &statusWriter{ResponseWriter: rw}
	t.next.ServeHTTP(w, req)

	t.deliver(&tap.Record{ID: id, Kind: "response", Time: received, Response: &tap.Response{
		Status: w.status, Headers: w.header, Duration: time.Since(received),
	}})
}

func (t *inlineTap) deliver(record *tap.Record) {
	payload, _ := json.Marshal(record)
	req, _ := http.NewRequestWithContext(context.Background(), http.MethodPost, t.endpoint, bytes.NewReader(payload))
	req.Header = http.Header{
		"Content-Type": {"application/json"}, "X-Tap-Id": {record.ID}, "X-Tap-Record": {record.Kind},
		"Idempotency-Key": {record.ID + "-" + record.Kind},
	}
	resp, err := t.client.Do(req)
	if err != nil {
		return // The record is missing, which fails the benchmark.
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
}

// statusWriter remembers the status and the header.
type statusWriter struct {
	http.ResponseWriter
	status int
	header http.Header
}

// WriteHeader implements http.ResponseWriter.
func (w *statusWriter) WriteHeader(status int) {
	w.status, w.header = status, w.ResponseWriter.Header().Clone()
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter {
	return w.ResponseWriter
}
