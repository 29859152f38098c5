package yaegi_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// failures are what makes a record worth another attempt.
var failures = map[string]http.HandlerFunc{
	"408": status(http.StatusRequestTimeout),
	"425": status(http.StatusTooEarly),
	"429": status(http.StatusTooManyRequests),
	"500": status(http.StatusInternalServerError),
	"502": status(http.StatusBadGateway),
	"503": status(http.StatusServiceUnavailable),
	"504": status(http.StatusGatewayTimeout),
	"cut": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
}

func status(code int) http.HandlerFunc {
	return func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(code) }
}

func TestFailover_DeliversToTheNextService(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		up := newReceiver(t, nil)
		deliver := func(t *testing.T, service any) {
			t.Helper()
			s := newTapInFrontOf(t, e, settings{"exchange": one("", settings{"service": service, "rejectOnRecordError": true})}, http.HandlerFunc(accept))
			resp, _ := s.do(t, http.MethodGet, "/", nil)
			assert.Equal(t, http.StatusOK, resp.StatusCode)
			up.next(t)
			up.none(t)
		}

		t.Run("refused", func(t *testing.T) { deliver(t, []string{unusedURL(t), up.URL}) })
		t.Run("as a string", func(t *testing.T) { deliver(t, unusedURL(t)+", "+up.URL) })
		for name, failure := range failures {
			t.Run(name, func(t *testing.T) {
				failing := newReceiver(t, failure)
				deliver(t, []any{failing.URL, failing.URL + "/too", up.URL})
				posts := map[string]received{}
				for len(failing.records) > 0 {
					got := failing.next(t)
					posts[got.URI] = got
				}
				first, again := posts["/records"], posts["/too/records"]
				assert.NotEmpty(t, first.Payload)
				again.URI = first.URI
				assertSamePOST(t, first, again)
			})
		}
	})
}

func TestFailover_LeavesTimeForTheServicesThatAreLeft(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		t.Parallel()
		blackHole, up := newHanging(t), newReceiver(t, nil)
		options := settings{"service": []string{blackHole.URL, blackHole.URL + "/too", up.URL}, "rejectOnRecordError": true, "timeout": "3s"}
		s := newTapInFrontOf(t, e, settings{"exchange": one("", options)}, http.HandlerFunc(accept))

		resp, _ := s.do(t, http.MethodGet, "/", nil)
		assert.Equal(t, http.StatusOK, resp.StatusCode)
		up.next(t)
	})
}

func TestFailover_TakesARefusalForAnAnswer(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, code := range []int{301, 400, 401, 404, 413} {
			first, second := newReceiver(t, status(code)), newReceiver(t, nil)
			options := settings{"service": []string{first.URL, second.URL}, "rejectOnRecordError": true, "retry": settings{"attempts": 3}}
			s := newTapInFrontOf(t, e, settings{"exchange": one("", options)}, http.HandlerFunc(accept))

			resp, _ := s.do(t, http.MethodGet, "/", nil)
			assert.Equal(t, code < 400, resp.StatusCode == http.StatusOK, code)
			first.next(t)
			first.none(t)
			second.none(t)
		}
	})
}

func TestFailover_TriesTheServiceFirstThatWorkedLast(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		var down atomic.Bool
		first := newReceiver(t, func(rw http.ResponseWriter, _ *http.Request) {
			if down.Load() {
				rw.WriteHeader(http.StatusServiceUnavailable)
			}
		})
		second := newReceiver(t, nil)
		options := settings{"service": []string{first.URL, second.URL}, "rejectOnRecordError": true}
		s := newTapInFrontOf(t, e, settings{"exchange": one("", options)}, http.HandlerFunc(accept))
		ask := func() {
			resp, _ := s.do(t, http.MethodGet, "/", nil)
			require.Equal(t, http.StatusOK, resp.StatusCode)
		}

		ask()
		first.next(t)
		second.none(t)

		down.Store(true)
		for range 100 {
			ask()
			second.next(t)
		}
		// Its pauses double from 50 ms on: a slow machine would need a minute to try it so often.
		assert.LessOrEqual(t, len(first.records), 12)

		down.Store(false)
		tries := len(first.records)
		for deadline := time.Now().Add(patience); len(first.records) == tries; ask() {
			require.True(t, time.Now().Before(deadline), "it is not tried again")
		}
		for len(second.records) > 0 {
			second.next(t)
		}
		for range 10 {
			ask()
		}
		second.none(t)
	})
}

func TestFailover_TriesAllAtOnceWhenAllHaveFailed(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		var down atomic.Bool
		answer := func(rw http.ResponseWriter, _ *http.Request) {
			if down.Load() {
				rw.WriteHeader(http.StatusServiceUnavailable)
			}
		}
		first, second := newReceiver(t, answer), newReceiver(t, answer)
		options := settings{"service": []string{first.URL, second.URL}, "rejectOnRecordError": true}
		s := newTapInFrontOf(t, e, settings{"exchange": one("", options)}, http.HandlerFunc(accept))

		for range 20 {
			down.Store(true)
			resp, _ := s.do(t, http.MethodGet, "/", nil)
			assert.Equal(t, http.StatusInternalServerError, resp.StatusCode)
			down.Store(false)
			resp, _ = s.do(t, http.MethodGet, "/", nil)
			assert.Equal(t, http.StatusOK, resp.StatusCode)
		}
	})
}

func TestRetry_SendsTheSameBytesAgain(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		for name, failure := range failures {
			t.Run(name, func(t *testing.T) {
				var posts atomic.Int64
				endpoint := newReceiver(t, func(rw http.ResponseWriter, req *http.Request) {
					if posts.Add(1) < 3 {
						failure(rw, req)
					}
				})
				options := settings{"rejectOnRecordError": true, "retry": settings{"attempts": 3, "initialInterval": "1ms"}}
				s := newTapInFrontOf(t, e, settings{"exchange": one(endpoint.URL, options)}, http.HandlerFunc(accept))

				resp, _ := s.do(t, http.MethodGet, "/", nil)
				assert.Equal(t, http.StatusOK, resp.StatusCode)
				first := endpoint.next(t)
				assertSamePOST(t, first, endpoint.next(t))
				assertSamePOST(t, first, endpoint.next(t))
				endpoint.none(t)
			})
		}
	})
}

func TestRetry_EndsAfterTheLastAttempt(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, retry := range []settings{nil, {}, {"attempts": 1}, {"attempts": 4, "initialInterval": "1ms"}} {
			endpoint := newReceiver(t, failures["503"])
			options := settings{"rejectOnRecordError": true}
			posts := 1
			if retry != nil {
				options["retry"] = retry
			}
			if retry["attempts"] != nil {
				posts, _ = retry["attempts"].(int)
			}
			s := newTapInFrontOf(t, e, settings{"exchange": one(endpoint.URL, options)}, http.HandlerFunc(accept))

			resp, _ := s.do(t, http.MethodGet, "/", nil)
			assert.Equal(t, http.StatusInternalServerError, resp.StatusCode)
			assert.Len(t, endpoint.records, posts)
		}
	})
}

func TestRetry_WaitsAsLongAsTheEndpointAsks(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		t.Parallel()
		var posts atomic.Int64
		var notBefore [3]time.Time
		arrived := make(chan time.Time, 3)
		endpoint := newReceiver(t, func(rw http.ResponseWriter, _ *http.Request) {
			arrived <- time.Now()
			switch n := posts.Add(1); n {
			case 1:
				notBefore[n] = time.Now().Add(time.Second)
				rw.Header().Set("Retry-After", "1")
				rw.WriteHeader(http.StatusTooManyRequests)
			case 2:
				notBefore[n] = time.Now().Add(2 * time.Second).Truncate(time.Second)
				rw.Header().Set("Retry-After", notBefore[n].UTC().Format(http.TimeFormat))
				rw.WriteHeader(http.StatusTooManyRequests)
			}
		})
		options := settings{"rejectOnRecordError": true, "timeout": "20s", "retry": settings{"attempts": 3, "initialInterval": "1ms"}}
		s := newTapInFrontOf(t, e, settings{"exchange": one(endpoint.URL, options)}, http.HandlerFunc(accept))

		resp, _ := s.do(t, http.MethodGet, "/", nil)
		assert.Equal(t, http.StatusOK, resp.StatusCode)
		require.Len(t, arrived, 3)
		for n := range 3 {
			assert.False(t, (<-arrived).Before(notBefore[n]), "attempt %d came too early", n+1)
		}
	})
}

func TestRetry_GivesUpAtTheTimeout(t *testing.T) {
	day := map[string]string{"seconds": "86400", "date": time.Now().Add(24 * time.Hour).UTC().Format(http.TimeFormat), "": ""}
	onBothEngines(t, func(t *testing.T, e engine) {
		for name, retryAfter := range day {
			t.Run("Retry-After "+name, func(t *testing.T) {
				endpoint := newReceiver(t, func(rw http.ResponseWriter, _ *http.Request) {
					rw.Header().Set("Retry-After", retryAfter)
					rw.WriteHeader(http.StatusServiceUnavailable)
				})
				options := settings{"rejectOnRecordError": true, "timeout": "300ms", "retry": settings{"attempts": 1_000_000, "initialInterval": "10ms"}}
				s := newTapInFrontOf(t, e, settings{"exchange": one(endpoint.URL, options)}, http.HandlerFunc(accept))

				resp, _ := s.do(t, http.MethodGet, "/", nil)
				assert.Equal(t, http.StatusInternalServerError, resp.StatusCode)
				if name != "" {
					assert.Len(t, endpoint.records, 1)
				} else {
					assert.Greater(t, len(endpoint.records), 1)
				}
			})
		}
	})
}

func TestDelivery_TakesAStaleConnectionForNoFailure(t *testing.T) {
	for name, size := range map[string]int{"small": 0, "large": 40_000} {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				endpoint := startReceiver(t, nil, func(server *httptest.Server) { server.Config.IdleTimeout = time.Millisecond })
				config := settings{"exchange": one(endpoint.URL, settings{"rejectOnRecordError": true, "maxRecordBodySize": -1})}
				body := bytes.Repeat([]byte("x"), size)
				s := newTapInFrontOf(t, e, config, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(body) }))

				pluginLog.take()
				accepted := countOf(crowd(t, s, 20, 300), http.StatusOK)
				assert.Equal(t, 300, accepted, pluginLog.take())
			})
		})
	}
}

func TestDelivery_SurvivesARestartOfTheEndpoint(t *testing.T) {
	for name, options := range map[string]settings{"one POST a record": {}, "batch": {"maxBatchSize": 10}} {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				endpoint := newRestartable(t)
				options["rejectOnRecordError"] = true
				s := newTapInFrontOf(t, e, settings{"exchange": one(endpoint.url, options)}, http.HandlerFunc(accept))

				const n = 1000
				answered := make(chan []int, 1)
				go func() { answered <- crowd(t, s, 20, n) }()
				for range 9 {
					posts := endpoint.posts.Load() + n/20
					require.Eventually(t, func() bool { return endpoint.posts.Load() >= posts || len(answered) > 0 }, patience, time.Millisecond)
					endpoint.restart(t)
				}
				assert.Equal(t, n, countOf(<-answered, http.StatusOK))
			})
		})
	}
}

// restartable is an endpoint whose server can be replaced: the new one goes on with the listener, so that no connection is refused.
type restartable struct {
	url      string
	posts    atomic.Int64
	listener *net.TCPListener
	server   *http.Server
	served   chan struct{}
	stopping sync.WaitGroup
}

func newRestartable(t *testing.T) *restartable {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &restartable{url: "http://" + listener.Addr().String()}
	r.listener, _ = listener.(*net.TCPListener)
	r.start()
	t.Cleanup(func() {
		r.stop(t)
		r.stopping.Wait()
		assert.NoError(t, r.listener.Close())
	})

	return r
}

func (r *restartable) start() {
	server, served := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { r.posts.Add(1) })}, make(chan struct{})
	r.server, r.served = server, served
	go func() {
		defer close(served)
		_ = server.Serve(keptListener{r.listener})
	}()
}

// stop lets the server end what it has begun, and closes its idle connections.
func (r *restartable) stop(t *testing.T) {
	t.Helper()
	server := r.server
	r.stopping.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		assert.NoError(t, server.Shutdown(ctx))
	})
	<-r.served
}

func (r *restartable) restart(t *testing.T) {
	t.Helper()
	r.stop(t)
	assert.NoError(t, r.listener.SetDeadline(time.Time{}))
	r.start()
}

// keptListener stops to accept when it is closed, and stays open.
type keptListener struct {
	*net.TCPListener
}

// Close implements net.Listener.
func (l keptListener) Close() error {
	return l.SetDeadline(time.Unix(1, 0))
}

func TestDelivery_SparesAnEndpointThatIsDown(t *testing.T) {
	outages := []struct {
		name    string
		refuses bool
		options settings
	}{
		{"cut", false, settings{}},
		{"cut, with retry", false, settings{"retry": settings{"attempts": 3, "initialInterval": "10ms"}}},
		{"cut, with pending batches", false, settings{"maxBatchSize": 10, "maxPending": 1000}},
		{"refused", true, settings{}},
	}
	pluginLog.take()
	var mu sync.Mutex
	lasted := map[string]time.Duration{}
	t.Run("", func(t *testing.T) {
		onBothEngines(t, func(t *testing.T, e engine) {
			for _, outage := range outages {
				t.Run(outage.name, func(t *testing.T) {
					t.Parallel()
					started := time.Now()
					name := endureOutage(t, e, outage.refuses, outage.options)
					mu.Lock()
					defer mu.Unlock()
					lasted[name] = time.Since(started)
				})
			}
		})
	})

	lines := map[string]int{}
	for _, line := range pluginLog.take() {
		_, name, _ := strings.Cut(line, "middlewareName=")
		name, _, _ = strings.Cut(name, " middlewareType=")
		lines[name]++
	}
	for name, outage := range lasted {
		assert.NotZero(t, lines[name], name)
		// One at once, and one up to a second later about what was held back.
		assert.LessOrEqual(t, float64(lines[name]), outage.Seconds()+2, name)
	}
}

// endureOutage sends 200 requests a second while the endpoint is down, and on until it has a record again. It returns the name of the
// middleware, under which it logs.
func endureOutage(t *testing.T, e engine, refuses bool, options settings) string {
	t.Helper()
	endpoint := newOutage(t, refuses)
	name := uncounted(t.Name() + "@file")
	handler := newHandler(t, e.plugin, settings{"exchange": one(endpoint.url, options)}, http.HandlerFunc(accept), name)

	var working sync.WaitGroup
	made := 0
	request := func() {
		made++
		working.Go(func() { handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)) })
	}
	ticks := time.NewTicker(5 * time.Millisecond)
	defer ticks.Stop()
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); <-ticks.C {
		request()
	}
	// A burst before the first failure is known, and then a few a second. It is about 400 when each record tries.
	assert.LessOrEqual(t, endpoint.attempts.Load(), int64(60))

	endpoint.comeBack(t)
	returned := time.Now()
	for waiting := true; waiting; {
		select {
		case <-endpoint.delivered:
			waiting = false
		case <-ticks.C:
			request()
		}
		require.Less(t, time.Since(returned), patience)
	}
	assert.Less(t, time.Since(returned), 2*time.Second)

	working.Wait()
	awaitAnswers(t)
	counted := countsOf(t, name)
	assert.EqualValues(t, made, counted.records())
	assert.NotZero(t, counted.Sent)

	return name
}

// outage is an endpoint that is down: it refuses connections, or cuts them as soon as they are made.
type outage struct {
	url       string
	attempts  atomic.Int64
	delivered chan struct{}
	server    *httptest.Server
}

func newOutage(t *testing.T, refuses bool) *outage {
	t.Helper()
	o := &outage{delivered: make(chan struct{}, 100_000)}
	if refuses {
		o.url = unusedURL(t)

		return o
	}

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	o.url = "http://" + listener.Addr().String()
	o.serve(t, &cutting{Listener: listener, attempts: &o.attempts})

	return o
}

func (o *outage) serve(t *testing.T, listener net.Listener) {
	t.Helper()
	o.server = httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { o.delivered <- struct{}{} }))
	assert.NoError(t, o.server.Listener.Close())
	o.server.Listener = listener
	o.server.Start()
	t.Cleanup(o.server.Close)
}

func (o *outage) comeBack(t *testing.T) {
	t.Helper()
	if o.server != nil {
		listener, _ := o.server.Listener.(*cutting)
		listener.back.Store(true)

		return
	}
	listener, err := net.Listen("tcp", strings.TrimPrefix(o.url, "http://"))
	require.NoError(t, err)
	o.serve(t, listener)
}

// cutting is a listener that cuts every connection, until it is back.
type cutting struct {
	net.Listener
	attempts *atomic.Int64
	back     atomic.Bool
}

// Accept implements net.Listener.
func (l *cutting) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil || l.back.Load() {
			return conn, err
		}
		l.attempts.Add(1)
		_ = conn.Close()
	}
}

// unusedURL returns a URL at which nobody listens.
func unusedURL(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())

	return fmt.Sprintf("http://%s", listener.Addr())
}
