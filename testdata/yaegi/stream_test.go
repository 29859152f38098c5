package yaegi_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// atOnce is how soon after its sending the client has an event.
const atOnce = 50 * time.Millisecond

// event is what streams send, time and again.
const event = "data: 0123456789\n\n"

func TestTap_ForwardsEachEventAtOnce(t *testing.T) {
	const events = 5
	inFull := func(prepare func(*httptest.Server)) streamCase {
		return streamCase{prepare: prepare, recorded: events * len(event)}
	}
	cases := map[string]streamCase{
		"recorded":                  inFull(nil),
		"over HTTP/2":               inFull(overHTTP2),
		"while the endpoint hangs":  {hangs: true, recorded: events * len(event)},
		"chunks that are no events": {contentType: "text/plain", recorded: events * len(event)},
		"a trickle with a length":   {contentType: "text/plain", length: events * len(event), recorded: events * len(event)},
		"of an error":               {status: http.StatusServiceUnavailable, recorded: events * len(event)},
		"rejected on the header":    {options: settings{"rejectOnRecordError": true, "recordBody": false}},
		"rejected, with a length":   {options: settings{"rejectOnRecordError": true, "recordBody": false}, length: events * len(event)},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				release, hanging := context.WithCancel(context.Background())
				defer hanging()
				if !c.hangs {
					hanging()
				}
				endpoint := newReceiver(t, func(http.ResponseWriter, *http.Request) { <-release.Done() })
				backend := newEventSource(t, c)
				s := serve(t, e, settings{"request": one(endpoint.URL, c.options), "response": one(endpoint.URL, c.options)},
					newProxy(t, backend.URL), inFrontNothing, c.prepare)

				// A machine that is busy elsewhere can hold up an event by itself, but not one of every five.
				var slowest time.Duration
				streams := 0
				for streams == 0 || slowest > atOnce && streams < 5 {
					slowest = slices.Max(backend.latencies(t, s, events))
					streams++
				}
				assert.LessOrEqual(t, slowest, atOnce)

				hanging()
				for range streams {
					require.Nil(t, s.done(t))
				}
				for range 2 * streams {
					if got := endpoint.next(t); got.Kind == "response" {
						assert.Equal(t, c.wantStatus(), got.Response.Status)
						assert.Len(t, got.Response.Body, c.recorded)
						assert.False(t, got.Response.BodyTruncated && c.recorded > 0)
					}
				}
				endpoint.none(t)
			})
		})
	}
}

// streamCase is one way to send a stream.
type streamCase struct {
	prepare     func(*httptest.Server)
	options     settings
	contentType string
	status      int
	// length is announced if it is not 0.
	length int
	// hangs says that the endpoint answers nothing before the stream has ended.
	hangs bool
	// recorded is how many bytes of the body are in the record.
	recorded int
}

func (c streamCase) wantStatus() int {
	if c.status == 0 {
		return http.StatusOK
	}

	return c.status
}

// eventSource is a backend that sends an event each time it is told to.
type eventSource struct {
	*httptest.Server
	// next lets it send one event more, or end where it gets false.
	next chan bool
	// sent tells when it has sent each event.
	sent chan time.Time
}

func newEventSource(t *testing.T, c streamCase) *eventSource {
	t.Helper()
	source := &eventSource{next: make(chan bool), sent: make(chan time.Time, 100)}
	source.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		rw.Header().Set("Content-Type", "text/event-stream")
		if c.contentType != "" {
			rw.Header().Set("Content-Type", c.contentType)
		}
		if c.length > 0 {
			rw.Header().Set("Content-Length", strconv.Itoa(c.length))
		}
		rw.WriteHeader(c.wantStatus())
		for {
			_ = http.NewResponseController(rw).Flush()
			select {
			case more := <-source.next:
				if !more {
					return
				}
				source.sent <- time.Now()
				_, _ = io.WriteString(rw, event)
			case <-req.Context().Done():
				return
			}
		}
	}))
	t.Cleanup(source.Close)

	return source
}

// latencies makes it send events to a client, each when the client has the one before, and returns how long each took.
func (source *eventSource) latencies(t *testing.T, s *tapped, events int) []time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	// The header of an error is not worth a flush of its own. So the first event may go before there is a response.
	go func() { source.next <- true }()
	resp, err := s.Client.Do(newRequest(ctx, t, http.MethodGet, s.URL, nil))
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })

	var all []time.Duration
	got := make([]byte, len(event))
	for len(all) < events {
		if len(all) > 0 {
			source.next <- true
		}
		_, err := io.ReadFull(resp.Body, got)
		require.NoError(t, err, "the event did not come")
		all = append(all, time.Since(<-source.sent))
		require.Equal(t, event, string(got))
	}
	source.next <- false

	return all
}

func TestTap_ForwardsAThousandEventsOfWhichItRecordsTenBytes(t *testing.T) {
	var want strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&want, "data: %d\n\n", i)
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			config := settings{"response": one(endpoint.URL, settings{"rejectOnRecordError": reject, "maxRecordBodySize": 10})}
			s := newTap(t, e, config, func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Type", "text/event-stream")
				for i := range 1000 {
					_, _ = fmt.Fprintf(rw, "data: %d\n\n", i)
					_ = http.NewResponseController(rw).Flush()
				}
			})

			_, body := s.do(t, http.MethodGet, "/", nil)
			require.Nil(t, s.done(t))
			assert.Equal(t, want.String(), string(body))

			got := endpoint.next(t)
			assert.Equal(t, "data: 0\n\nd", string(got.Response.Body))
			assert.True(t, got.Response.BodyTruncated)
			endpoint.none(t)
		})
	})
}

func TestTap_ClientHasAWholeResponseWhileTheEndpointHangs(t *testing.T) {
	cases := map[string]struct {
		method string
		status int
		length int
		sent   int
	}{
		"a small body":        {http.MethodGet, http.StatusOK, 5, 5},
		"a large body":        {http.MethodGet, http.StatusOK, 200_000, 200_000},
		"an error":            {http.MethodGet, http.StatusNotFound, 5, 5},
		"an empty body":       {http.MethodGet, http.StatusOK, 0, 0},
		"an empty redirect":   {http.MethodGet, http.StatusFound, 0, 0},
		"no content":          {http.MethodGet, http.StatusNoContent, -1, 0},
		"not modified":        {http.MethodGet, http.StatusNotModified, -1, 0},
		"the header of a GET": {http.MethodHead, http.StatusOK, 12345, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				hang := make(chan struct{})
				release := sync.OnceFunc(func() { close(hang) })
				defer release()
				endpoint := newReceiver(t, func(http.ResponseWriter, *http.Request) { <-hang })
				s := newTap(t, e, every(endpoint.URL, settings{"timeout": "0"}), func(rw http.ResponseWriter, _ *http.Request) {
					if c.length >= 0 {
						rw.Header().Set("Content-Length", strconv.Itoa(c.length))
					}
					rw.WriteHeader(c.status)
					_, _ = rw.Write(make([]byte, c.sent))
				})

				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				resp, body := s.send(t, newRequest(ctx, t, c.method, s.URL, nil))
				assert.Equal(t, c.status, resp.StatusCode)
				assert.Len(t, body, c.sent)

				release()
				require.Nil(t, s.done(t))
				endpoint.kinds(t, 3)
			})
		})
	}
}

// watchedWriter tells what has reached a writer in front of the tap.
type watchedWriter struct {
	http.ResponseWriter
	begun   *atomic.Bool
	flushes *atomic.Int64
}

func (w *watchedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *watchedWriter) Flush() {
	w.flushes.Add(1)
	_ = http.NewResponseController(w.ResponseWriter).Flush()
}

func (w *watchedWriter) WriteHeader(status int) {
	w.begun.Store(true)
	w.ResponseWriter.WriteHeader(status)
}

func (w *watchedWriter) Write(p []byte) (int, error) {
	w.begun.Store(true)

	return w.ResponseWriter.Write(p)
}

// watch is a middleware in front of the tap that tells what has reached it.
func watch(begun *atomic.Bool, flushes *atomic.Int64) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			next.ServeHTTP(&watchedWriter{rw, begun, flushes}, req)
		})
	}
}

func TestTap_HoldsADownloadOnlyUntilItsRecordIsAccepted(t *testing.T) {
	const size = 200 << 20
	onBothEngines(t, func(t *testing.T, e engine) {
		var begun atomic.Bool
		var flushes atomic.Int64
		early := make(chan bool, 2)
		endpoint := newReceiver(t, func(http.ResponseWriter, *http.Request) { early <- begun.Load() })
		sent := sha256.New()
		backend := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Length", strconv.Itoa(size))
			_, _ = io.Copy(io.MultiWriter(sent, rw), io.LimitReader(rand.NewChaCha8([32]byte{}), size))
		}))
		t.Cleanup(backend.Close)
		config := settings{"response": one(endpoint.URL, settings{"rejectOnRecordError": true, "maxRecordBodySize": 4096})}
		s := serve(t, e, config, newProxy(t, backend.URL), watch(&begun, &flushes), nil)

		before := liveHeap()
		resp, err := s.Client.Do(newRequest(t.Context(), t, http.MethodGet, s.URL, nil))
		require.NoError(t, err)
		defer func() { _ = resp.Body.Close() }()
		came := sha256.New()
		_, err = io.CopyN(came, resp.Body, size/2)
		require.NoError(t, err)
		// Here the client does not read, so the rest is under way.
		assert.Less(t, liveHeap()-before, int64(8<<20), "memory grows with the download")
		_, err = io.Copy(came, resp.Body)
		require.NoError(t, err)
		require.Nil(t, s.done(t))

		assert.Equal(t, int64(size), resp.ContentLength)
		backend.Close() // Until it has ended, it may still be adding to the sum.
		assert.Equal(t, sent.Sum(nil), came.Sum(nil))
		assert.False(t, <-early, "the client got something before the record was accepted")
		got := endpoint.next(t)
		assert.Len(t, got.Response.Body, 4096)
		assert.True(t, got.Response.BodyTruncated)
		endpoint.none(t)
	})
}

// liveHeap returns how many bytes are reachable.
func liveHeap() int64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)

	return int64(stats.HeapAlloc)
}

func TestTap_StopsReadingADownloadThatItRefuses(t *testing.T) {
	cases := map[string]struct {
		options settings
		// recorded is how many bytes of the body are in the record.
		recorded int
	}{
		"for its first bytes": {settings{"rejectOnRecordError": true, "maxRecordBodySize": 4096}, 4096},
		"for its header":      {settings{"rejectOnRecordError": true, "recordBody": false}, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				onBothProtocols(t, func(t *testing.T, prepare func(*httptest.Server)) {
					var refuse atomic.Bool
					refuse.Store(true)
					endpoint := newReceiver(t, func(rw http.ResponseWriter, _ *http.Request) {
						if refuse.Load() {
							rw.WriteHeader(http.StatusServiceUnavailable)
						}
					})
					stopped := make(chan error, 1)
					backend := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
						rw.Header().Set("X-Backend", "yes")
						if req.URL.Path == "/small" {
							return
						}
						// No socket buffer takes so much, so somebody must have read it if no write fails.
						_, err := io.Copy(rw, io.LimitReader(rand.NewChaCha8([32]byte{}), 256<<20))
						stopped <- err
					}))
					t.Cleanup(backend.Close)
					config := settings{"response": one(endpoint.URL, c.options)}
					s := serve(t, e, config, newProxy(t, backend.URL), inFrontNothing, prepare)

					resp, body := s.do(t, http.MethodGet, "/large", nil)
					assert.Nil(t, s.done(t), "the abort of a refused response is swallowed")
					assert.Error(t, receive(t, stopped, "the end of the download"), "the backend was read to its end")
					assertRefused(t, resp, body)
					assert.Len(t, endpoint.next(t).Response.Body, c.recorded)

					refuse.Store(false)
					resp, _ = s.sendReusing(t, newRequest(t.Context(), t, http.MethodGet, s.URL+"/small", nil))
					assert.Equal(t, http.StatusOK, resp.StatusCode)
					assert.Equal(t, "yes", resp.Header.Get("X-Backend"))
				})
			})
		})
	}
}
