package yaegi_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestPending_ReturnsAtOnce(t *testing.T) {
	responses := map[string]http.HandlerFunc{
		"with a length": func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Length", "4")
			_, _ = io.WriteString(rw, "pong")
		},
		"without a length": func(rw http.ResponseWriter, _ *http.Request) {
			for _, part := range []string{"p", "ong"} {
				_, _ = io.WriteString(rw, part)
				_ = http.NewResponseController(rw).Flush()
			}
		},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		for name, response := range responses {
			for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
				t.Run(name+" over "+protocol, func(t *testing.T) {
					// The endpoint answers nothing before the test ends, so a handler that waited would not return in time.
					endpoint := newHanging(t)
					config := every(endpoint.URL, settings{"maxPending": 1000, "timeout": "1h"})
					identity := func(handler http.Handler) http.Handler { return handler }
					s := serve(t, e, config, response, identity, func(server *httptest.Server) { server.EnableHTTP2 = protocol == "HTTP/2.0" })

					for range 60 {
						resp, body := s.do(t, http.MethodPost, "/", []byte("ping"))
						require.Nil(t, s.done(t))
						require.Equal(t, protocol, resp.Proto)
						require.Equal(t, "pong", string(body))
					}

					endpoint.end()
					awaitAnswers(t)
					for range 180 {
						endpoint.next(t)
					}
					endpoint.none(t)
				})
			}
		}
	})
}

func TestPending_DropsWhatIsTooMuch(t *testing.T) {
	tests := []struct{ n, maxBatchSize int }{{max(2000, exchangesOfLoad(t)), 1}, {500, 10}}
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, test := range tests {
			t.Run(fmt.Sprintf("maxBatchSize=%d", test.maxBatchSize), func(t *testing.T) {
				dropWhatIsTooMuch(t, e, test.n, test.maxBatchSize)
			})
		}
	})
}

func dropWhatIsTooMuch(t *testing.T, e engine, n, maxBatchSize int) {
	t.Helper()
	const maxPending, size = 100, 5000
	endpoint := newHanging(t)
	name := t.Name() + "@file"
	before := countsOf(t, name)
	config := settings{"exchange": one(endpoint.URL, settings{"maxPending": maxPending, "maxBatchSize": maxBatchSize, "timeout": "1h"})}
	body := make([]byte, size)
	handler := newHandler(t, e.plugin, config, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(body) }), name)
	pluginLog.take()
	memory := memoryInUse()

	var working sync.WaitGroup
	for range 50 {
		working.Go(func() {
			for range n / 50 {
				rw := httptest.NewRecorder()
				handler.ServeHTTP(rw, httptest.NewRequest(http.MethodGet, "/", nil))
				assert.Equal(t, http.StatusOK, rw.Code)
			}
		})
	}
	working.Wait()

	if maxBatchSize == 1 {
		// All records have more than n * size bytes, and those that are pending a tenth of that at most.
		assert.Less(t, memoryInUse()-memory, int64(n*size/2))
	}
	counted := countsOf(t, name).since(before)
	assert.EqualValues(t, n-maxPending, counted.Dropped)
	assert.EqualValues(t, n-maxPending, counted.records(), "the others are pending")

	endpoint.end()
	awaitAnswers(t)
	counted = countsOf(t, name).since(before)
	assert.EqualValues(t, maxPending, counted.Sent)
	assert.EqualValues(t, n, counted.records())
	for _, line := range awaitFailures(t, n-maxPending, name) {
		assert.Regexp(t, `^Unable to send the exchange record error=".*maxPending.*" middlewareName=`+name+` middlewareType=Tap`, line)
	}
}

func TestPending_IsCountedOverTheEndpoint(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newHanging(t)
		config := settings{"exchange": one(endpoint.URL, settings{"maxPending": 10, "timeout": "1h"})}
		var dropped int64
		for _, name := range []string{"first@file", "second@file"} {
			before := countsOf(t, name)
			handler := newHandler(t, e.plugin, config, http.HandlerFunc(accept), name)
			for range 10 {
				handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
			}
			dropped += countsOf(t, name).since(before).Dropped
		}
		assert.EqualValues(t, 10, dropped)
		endpoint.end()
		awaitAnswers(t)
	})
}

func TestPending_CannotReject(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, kind := range []string{"request", "response", "exchange"} {
			config := settings{kind: one("http://127.0.0.1:1", settings{"maxPending": 1, "rejectOnRecordError": true})}
			_, err := e.plugin.New(t.Context(), http.HandlerFunc(accept), config, "audit@file")
			require.ErrorContains(t, err, kind+".maxPending")
			require.ErrorContains(t, err, kind+".rejectOnRecordError")
		}
	})
}

func TestDelivery_LosesNothingWhenTheConfigurationChanges(t *testing.T) {
	modes := map[string]settings{
		"inline":            {"rejectOnRecordError": true},
		"batch":             {"maxBatchSize": 10, "rejectOnRecordError": true},
		"pending":           {"maxPending": 1_000_000},
		"batch and pending": {"maxBatchSize": 10, "maxPending": 1_000_000},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		for name, options := range modes {
			t.Run(name, func(t *testing.T) { reloadUnderLoad(t, e, options) })
		}
	})
}

func reloadUnderLoad(t *testing.T, e engine, options settings) {
	t.Helper()
	const reloads, clients = 200, 20
	running := goleak.IgnoreCurrent()
	before := countsOf(t, "audit@file")

	var connections openConnections
	endpoint := startReceiver(t, func(http.ResponseWriter, *http.Request) { time.Sleep(5 * time.Millisecond) }, func(server *httptest.Server) {
		server.Config.ConnState = connections.note
	})
	config := settings{"exchange": one(endpoint.URL, options)}
	router := newReloading(t, e, config)

	var over atomic.Bool
	var working sync.WaitGroup
	var made atomic.Int64
	for range clients {
		working.Go(func() {
			for !over.Load() {
				rw := httptest.NewRecorder()
				router.ServeHTTP(rw, httptest.NewRequest(http.MethodGet, fmt.Sprintf("/%d", made.Add(1)), nil))
				assert.Equal(t, http.StatusOK, rw.Code)
				time.Sleep(time.Millisecond) // The pace of the load: nothing pushes back where records are left pending.
			}
		})
	}
	for i := range reloads {
		router.reload(t)
		endpoint.seen(t, int64(i+1)) // So that every configuration has had something to do.
	}
	over.Store(true)
	working.Wait()
	awaitAnswers(t)
	router.cancel()

	urls := map[string]bool{}
	for range made.Load() {
		url := endpoint.next(t).Request.URL
		assert.NotContains(t, urls, url, "a record came twice")
		urls[url] = true
	}
	endpoint.none(t)
	assert.Equal(t, made.Load(), countsOf(t, "audit@file").since(before).Sent)
	require.Eventually(t, func() bool { return connections.open.Load() == 0 }, patience, time.Millisecond, "connections are left")
	endpoint.Close()
	goleak.VerifyNone(t, running)
}

// reloading is a router whose configuration changes in the way of Traefik: the old middleware's context ends first, and the requests that
// it serves go on.
type reloading struct {
	engine  engine
	config  settings
	handler atomic.Pointer[http.Handler]
	cancel  context.CancelFunc
}

func newReloading(t *testing.T, e engine, config settings) *reloading {
	t.Helper()
	r := &reloading{engine: e, config: config, cancel: func() {}}
	r.reload(t)
	t.Cleanup(func() { r.cancel() })

	return r
}

func (r *reloading) reload(t *testing.T) {
	t.Helper()
	r.cancel()
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	handler, err := r.engine.plugin.New(ctx, http.HandlerFunc(accept), r.config, "audit@file")
	require.NoError(t, err)
	r.handler.Store(&handler)
}

func (r *reloading) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	(*r.handler.Load()).ServeHTTP(rw, req)
}

// seen waits until the endpoint has got n records that nobody has taken.
func (r *receiver) seen(t *testing.T, n int64) {
	t.Helper()
	require.Eventually(t, func() bool { return int64(len(r.records)) >= n }, patience, 100*time.Microsecond)
}

// openConnections counts the connections of a server.
type openConnections struct {
	open atomic.Int64
}

func (c *openConnections) note(_ net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		c.open.Add(1)
	case http.StateClosed, http.StateHijacked:
		c.open.Add(-1)
	default:
	}
}

// memoryInUse returns the bytes that live on the heap.
func memoryInUse() int64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)

	return int64(stats.HeapAlloc) //nolint:gosec // No heap is that large.
}
