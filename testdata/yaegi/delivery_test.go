package yaegi_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// pong answers with a length.
func pong(rw http.ResponseWriter, _ *http.Request) {
	rw.Header().Set("Content-Length", "4")
	_, _ = io.WriteString(rw, "pong")
}

// eachApart returns settings that record all three kinds, each at an endpoint of its own: so that each tells the log of its failure at
// once, and no line comes later, into another test.
func eachApart(service string, options settings) settings {
	config := settings{}
	for _, kind := range []string{"request", "response", "exchange"} {
		config[kind] = one(service, options)
		config[kind].(settings)["path"] = "/" + kind
	}

	return config
}

// The endpoint answers nothing before all clients have their responses, so what it costs a client is not measured but ruled out.
func TestDelivery_CostsNoClientTimeWhoseResponseHasALength(t *testing.T) {
	const clients = 200
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newHanging(t)
		s := newTap(t, e, every(endpoint.URL, settings{"timeout": "1h"}), pong)
		t.Cleanup(endpoint.end) // Before the server is closed, which waits for its requests.
		s.Client.Timeout = patience
		// A connection stays with its request until the records are delivered.
		s.Client.Transport.(*http.Transport).DisableKeepAlives = true

		assert.Equal(t, clients, countOf(crowd(t, s, clients, clients), http.StatusOK))
		endpoint.seen(t, 3*clients) // All at the same time: a slow endpoint is waited for once.
		assert.Empty(t, s.served, "records are delivered inline")

		endpoint.end()
		for range clients {
			require.Nil(t, s.done(t))
		}
	})
}

func TestDelivery_EndsAtTheTimeout(t *testing.T) {
	// A status comes within it on any machine.
	const timeout = time.Second
	// None of these ends before the tap has closed the connection.
	answers := map[string]struct {
		answer http.HandlerFunc
		// accepted says that the status has come, and that counts.
		accepted bool
	}{
		"no answer": {func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() }, false},
		"half a header": {func(rw http.ResponseWriter, _ *http.Request) {
			conn, buffered, err := http.NewResponseController(rw).Hijack()
			if err != nil {
				return
			}
			defer conn.Close()
			_, _ = buffered.WriteString("HTTP/1.1 200 OK\r\nX-Half: ")
			_ = buffered.Flush()
			_, _ = io.Copy(io.Discard, conn)
		}, false},
		"a body that drips": {func(rw http.ResponseWriter, req *http.Request) {
			ticks := time.NewTicker(10 * time.Millisecond)
			defer ticks.Stop()
			for req.Context().Err() == nil {
				_, _ = io.WriteString(rw, "x")
				_ = http.NewResponseController(rw).Flush()
				<-ticks.C
			}
		}, true},
		"a body that does not come": {func(rw http.ResponseWriter, req *http.Request) {
			rw.Header().Set("Content-Length", "10")
			rw.WriteHeader(http.StatusCreated)
			_ = http.NewResponseController(rw).Flush()
			<-req.Context().Done()
		}, true},
	}
	// A tap waits for its endpoint, and not for the default of 10 s.
	assertBounded := func(t *testing.T, started time.Time) {
		t.Helper()
		elapsed := time.Since(started)
		assert.GreaterOrEqual(t, elapsed, timeout)
		assert.Less(t, elapsed, 8*time.Second)
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		// All at the same time, however few may run in parallel: they do nothing but wait.
		var waiting sync.WaitGroup
		for name, c := range answers {
			endpoint := newReceiver(t, c.answer)
			waiting.Go(func() {
				t.Run(name+" without reject", func(t *testing.T) {
					s := newTap(t, e, eachApart(endpoint.URL, settings{"timeout": timeout.String()}), pong)
					started := time.Now()
					resp, body := s.do(t, http.MethodGet, "/", nil)
					assert.Equal(t, http.StatusOK, resp.StatusCode)
					assert.Equal(t, "pong", string(body))
					require.Nil(t, s.done(t))
					assertBounded(t, started)
				})
			})
			for kind, config := range eachApart(endpoint.URL+"/reject", settings{"timeout": timeout.String(), "rejectOnRecordError": true}) {
				waiting.Go(func() {
					t.Run(name+" reject on "+kind, func(t *testing.T) {
						var called atomic.Int64
						s := newTap(t, e, settings{kind: config}, func(rw http.ResponseWriter, req *http.Request) {
							called.Add(1)
							pong(rw, req)
						})
						started := time.Now()
						resp, body := s.do(t, http.MethodGet, "/", nil)
						require.Nil(t, s.done(t))
						assertBounded(t, started)
						if c.accepted {
							assert.Equal(t, http.StatusOK, resp.StatusCode)
							assert.Equal(t, "pong", string(body))
						} else {
							assertRefused(t, resp, body)
						}
						assert.Equal(t, c.accepted || kind != "request", called.Load() == 1)
					})
				})
			}
		}
		waiting.Wait()
	})
}

// connections counts those of a server: all that it has ever accepted, and those that are open.
type connections struct {
	openConnections
	accepted atomic.Int64
}

func (c *connections) note(conn net.Conn, state http.ConnState) {
	if state == http.StateNew {
		c.accepted.Add(1)
	}
	c.openConnections.note(conn, state)
}

// assertReused fails when there were clearly more connections than records at a time. net/http gives up a connection of which the goroutine
// that writes has not run for 50 ms, which happens on a busy machine, and rarely.
func (c *connections) assertReused(t *testing.T, atATime, records int) {
	t.Helper()
	assert.GreaterOrEqual(t, c.accepted.Load(), int64(atATime))
	assert.LessOrEqual(t, c.accepted.Load(), int64(atATime+records/20))
}

// gone waits until none is open. It takes a moment, and 4 s when a connection is left to be closed for its idleness.
func (c *connections) gone(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return c.open.Load() == 0 }, 3*time.Second, time.Millisecond, "connections are left")
}

// newCounted starts an endpoint whose connections are counted.
func newCounted(t *testing.T, answer http.HandlerFunc) (*receiver, *connections) {
	t.Helper()
	counted := &connections{}

	return startReceiver(t, answer, func(server *httptest.Server) { server.Config.ConnState = counted.note }), counted
}

func TestDelivery_UsesAConnectionAgain(t *testing.T) {
	cases := map[string]struct {
		records int
		answer  http.HandlerFunc
	}{
		"nothing":         {50, nil},
		"no content":      {50, status(http.StatusNoContent)},
		"not modified":    {50, status(http.StatusNotModified)},
		"an early hint":   {50, func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusEarlyHints) }},
		"10 kB":           {1000, func(rw http.ResponseWriter, _ *http.Request) { answerLong(rw, true) }},
		"10 kB in chunks": {50, func(rw http.ResponseWriter, _ *http.Request) { answerLong(rw, false) }},
		"10 kB of refusal": {50, func(rw http.ResponseWriter, _ *http.Request) {
			rw.WriteHeader(http.StatusBadRequest)
			answerLong(rw, false)
		}},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				endpoint, counted := newCounted(t, c.answer)
				middleware := t.Name() + "@file"
				handler := newHandler(t, e.plugin, settings{"exchange": one(endpoint.URL, nil)}, http.HandlerFunc(accept), middleware)

				for range c.records {
					handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
					endpoint.next(t)
				}
				counted.assertReused(t, 1, c.records)
				if name == "10 kB of refusal" {
					awaitFailures(t, c.records, middleware)
				}
			})
		}
	})
}

// answerLong answers with 10 kB.
func answerLong(rw http.ResponseWriter, withLength bool) {
	if withLength {
		rw.Header().Set("Content-Length", "10000")
	}
	for range 10 {
		_, _ = rw.Write(make([]byte, 1000))
		if !withLength {
			_ = http.NewResponseController(rw).Flush()
		}
	}
}

func TestDelivery_UsesAsManyConnectionsAsThereAreRecordsAtATime(t *testing.T) {
	const clients = 30
	onBothEngines(t, func(t *testing.T, e engine) {
		var came sync.WaitGroup
		came.Add(clients)
		var posts atomic.Int64
		endpoint, counted := newCounted(t, func(rw http.ResponseWriter, _ *http.Request) {
			// The first of each client is answered when all have come, so that there is a connection for each.
			if posts.Add(1) <= clients {
				came.Done()
				came.Wait()
			}
			answerLong(rw, true)
		})
		handler := newHandler(t, e.plugin, settings{"exchange": one(endpoint.URL, nil)}, http.HandlerFunc(accept), "audit@file")
		serve := func(requests int) {
			var serving sync.WaitGroup
			for range clients {
				serving.Go(func() {
					for range requests {
						handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
					}
				})
			}
			serving.Wait()
		}

		serve(1)
		serve(20)
		assert.EqualValues(t, 21*clients, posts.Load())
		counted.assertReused(t, clients, 21*clients)
	})
}

func TestDelivery_AnEndlessAnswerCostsItsConnectionAlone(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint, counted := newCounted(t, func(rw http.ResponseWriter, _ *http.Request) {
			for piece := make([]byte, 32<<10); ; {
				if _, err := rw.Write(piece); err != nil {
					return // The tap has closed the connection.
				}
			}
		})
		// Without a limit of time, nothing but its length ends the reading of an answer.
		config := settings{"exchange": one(endpoint.URL, settings{"rejectOnRecordError": true, "timeout": "0"})}
		s := newTapInFrontOf(t, e, config, http.HandlerFunc(pong))

		for range 3 {
			resp, body := s.do(t, http.MethodGet, "/", nil)
			require.Nil(t, s.done(t))
			assert.Equal(t, http.StatusOK, resp.StatusCode)
			assert.Equal(t, "pong", string(body))
			endpoint.next(t)
		}
		assert.EqualValues(t, 3, counted.accepted.Load())
		counted.gone(t)
	})
}

func TestDelivery_AcceptsByAStatusBelow400(t *testing.T) {
	accepted := []int{200, 201, 204, 299, 300, 301, 302, 303, 304, 307, 308, 399}
	refused := []int{101, 400, 401, 404, 413, 429, 499, 500, 503, 599}
	onBothEngines(t, func(t *testing.T, e engine) {
		elsewhere := newReceiver(t, nil)
		endpoint := newReceiver(t, func(rw http.ResponseWriter, req *http.Request) {
			assert.Equal(t, http.MethodPost, req.Method)
			final, err := strconv.Atoi(strings.Trim(req.URL.Path, "/"))
			assert.NoError(t, err)
			// Neither is an answer.
			rw.WriteHeader(http.StatusEarlyHints)
			rw.WriteHeader(http.StatusProcessing)
			// A redirect for all who follow one: RFC 9110, section 15.4, names a Location for each.
			rw.Header().Set("Location", elsewhere.URL)
			rw.WriteHeader(final)
		})
		for _, final := range append(accepted, refused...) {
			t.Run(strconv.Itoa(final), func(t *testing.T) {
				bothWays(t, func(t *testing.T, reject bool) {
					service := strings.Replace(endpoint.URL, "://", "://user:password@", 1)
					options := settings{"rejectOnRecordError": reject, "path": fmt.Sprintf("/%d?reject=%t", final, reject), "headers": settings{"X-Token": "token"}}
					s := newTapInFrontOf(t, e, settings{"exchange": one(service, options)}, http.HandlerFunc(pong))
					pluginLog.take()

					resp, body := s.do(t, http.MethodGet, "/", nil)
					require.Nil(t, s.done(t))
					if reject && final >= 400 || reject && final < 200 {
						assertRefused(t, resp, body)
					} else {
						assert.Equal(t, http.StatusOK, resp.StatusCode)
						assert.Equal(t, "pong", string(body))
					}
					told := `Unable to send the exchange record error="tap service returned ` + strconv.Itoa(final) + `" middlewareName=audit@file middlewareType=Tap`
					// Among other lines, since failures of earlier tests are told of up to a second later.
					assert.Equal(t, final >= 400 || final < 200, slices.Contains(pluginLog.take(), told))
					endpoint.next(t)
					endpoint.none(t)
					elsewhere.none(t)
				})
			})
		}
	})
}

// linesWith returns the lines that have a text in them.
func linesWith(lines []string, text string) []string {
	var some []string
	for _, line := range lines {
		if strings.Contains(line, text) {
			some = append(some, line)
		}
	}

	return some
}

func TestDelivery_EachKindRejectsForItself(t *testing.T) {
	kinds := []string{"request", "response", "exchange"}
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, failing := range kinds {
			for subset := range 1 << len(kinds) {
				rejects := map[string]bool{}
				for i, kind := range kinds {
					rejects[kind] = subset>>i&1 == 1
				}
				t.Run(fmt.Sprintf("%s fails, reject %v", failing, rejects), func(t *testing.T) {
					assertRejects(t, e, failing, rejects)
				})
			}
		}
	})
}

// assertRejects checks what becomes of an exchange when the endpoint refuses one kind of record.
func assertRejects(t *testing.T, e engine, failing string, rejects map[string]bool) {
	t.Helper()
	endpoint := newReceiver(t, func(rw http.ResponseWriter, req *http.Request) {
		if req.Header.Get("X-Tap-Record") == failing {
			rw.WriteHeader(http.StatusForbidden)
		}
	})
	config := settings{}
	for kind, reject := range rejects {
		config[kind] = one(endpoint.URL, settings{"rejectOnRecordError": reject})
	}
	var called atomic.Int64
	s := newTap(t, e, config, func(rw http.ResponseWriter, req *http.Request) {
		called.Add(1)
		secretive(rw, req)
	})

	resp, body := s.do(t, http.MethodPost, "/", []byte("ping"))
	require.Nil(t, s.done(t))
	served := http.StatusCreated
	if rejects[failing] {
		served = http.StatusInternalServerError
		assertRefused(t, resp, body)
	} else {
		assert.Equal(t, strings.Repeat("secret", 1_000), string(body))
		assert.Equal(t, "1", resp.Trailer.Get("X-Checksum"))
	}
	assert.Equal(t, served, resp.StatusCode)

	if failing == "request" && rejects["request"] {
		assert.Zero(t, called.Load())
		endpoint.kinds(t, 1)
		endpoint.none(t)

		return
	}
	assert.EqualValues(t, 1, called.Load())
	// A refused response needs no other record before it may be served.
	n := 3
	if failing == "response" && rejects["response"] && rejects["exchange"] {
		n = 2
	}
	for kind, got := range endpoint.kinds(t, n) {
		switch {
		case kind == "request":
		case kind == failing || rejects[kind]:
			assert.Equal(t, http.StatusCreated, got.Response.Status, "what was to be served")
		default:
			assert.Equal(t, served, got.Response.Status, "what was served")
		}
	}
	endpoint.none(t)
}

func TestDelivery_LosesNoRecordOfAClientThatGoesAway(t *testing.T) {
	cases := map[string]bool{"while the backend works": true, "while the endpoint is asked": false}
	for name, backendWorks := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				bothWays(t, func(t *testing.T, reject bool) {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					noticed := make(chan struct{})
					// Ends when the server in front of the tap has noticed that the client is gone.
					goAway := sync.OnceFunc(func() {
						cancel()
						receive(t, noticed, "the end of the client's connection")
					})
					backendURL := newBackend(t, nil, func(http.ResponseWriter, *http.Request) {
						if backendWorks {
							goAway()
						}
					})
					endpoint := newReceiver(t, func(http.ResponseWriter, *http.Request) {
						if !backendWorks {
							goAway()
						}
					})
					s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), newProxy(t, backendURL), func(next http.Handler) http.Handler {
						return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
							context.AfterFunc(req.Context(), func() { close(noticed) })
							next.ServeHTTP(rw, req)
						})
					}, nil)

					resp, err := s.Client.Do(newRequest(ctx, t, http.MethodGet, s.URL, nil))
					if err == nil {
						_ = resp.Body.Close() // The response had been sent before.
					}
					s.done(t)
					endpoint.kinds(t, 3)
					endpoint.none(t)
				})
			})
		})
	}
}

func TestDelivery_SaysWhatItSends(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		type target struct{ host, length string }
		targets := make(chan target, 3)
		endpoint := newReceiver(t, func(_ http.ResponseWriter, req *http.Request) {
			targets <- target{req.Host, strconv.FormatInt(req.ContentLength, 10)}
		})
		options := settings{"path": "records?tenant=a%20b", "headers": settings{"authorization": "Bearer token", "Host": "audit.example", "X-Tenant": "one, two"}}
		service := strings.Replace(endpoint.URL, "://", "://user:password@", 1) + "/base/"
		s := newTap(t, e, every(service, options), pong)

		s.do(t, http.MethodPost, "/", []byte("ping"))
		require.Nil(t, s.done(t))
		lengths := map[string]bool{}
		for kind, got := range endpoint.kinds(t, 3) {
			assert.Equal(t, "/base/records?tenant=a%20b", got.URI)
			lengths[got.Header.Get("Content-Length")] = true
			for name, value := range map[string]string{
				"Content-Type":      "application/json",
				"Content-Length":    strconv.Itoa(len(got.Payload)),
				"X-Tap-Id":          got.ID,
				"X-Tap-Record":      kind,
				"Idempotency-Key":   got.ID + "-" + kind,
				"Authorization":     "Bearer token", // Rather than that of the URL.
				"X-Tenant":          "one, two",
				"Host":              "",
				"Transfer-Encoding": "",
				"Accept-Encoding":   "",
			} {
				assert.Equal(t, value, strings.Join(got.Header.Values(name), "; "), name)
			}
		}
		for range 3 {
			got := <-targets
			assert.Equal(t, "audit.example", got.host)
			assert.Contains(t, lengths, got.length)
		}
	})
}

// A POST that went out over a connection which the endpoint had closed in the meantime was no attempt.
func TestDelivery_SendsAgainWhenAConnectionIsStale(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		var posts atomic.Int64
		endpoint, counted := newCounted(t, func(http.ResponseWriter, *http.Request) {
			if posts.Add(1) == 2 {
				panic(http.ErrAbortHandler) // Closes the connection, which was used before.
			}
		})
		s := newTapInFrontOf(t, e, settings{"exchange": one(endpoint.URL, settings{"rejectOnRecordError": true})}, http.HandlerFunc(pong))

		for range 2 {
			resp, body := s.do(t, http.MethodGet, "/", nil)
			require.Nil(t, s.done(t))
			assert.Equal(t, http.StatusOK, resp.StatusCode)
			assert.Equal(t, "pong", string(body))
		}
		endpoint.next(t)
		assertSamePOST(t, endpoint.next(t), endpoint.next(t))
		endpoint.none(t)
		assert.EqualValues(t, 2, counted.accepted.Load())
	})
}

// A connection that ends before the answer may have been a stale one, even a new one on a busy machine. Beyond that `retry` decides.
func TestDelivery_GivesUpAnEndpointThatCutsEveryConnection(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newReceiver(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
		s := newTapInFrontOf(t, e, settings{"exchange": one(endpoint.URL, settings{"rejectOnRecordError": true})}, http.HandlerFunc(pong))

		resp, body := s.do(t, http.MethodGet, "/", nil)
		require.Nil(t, s.done(t))
		assertRefused(t, resp, body)
		assertSamePOST(t, endpoint.next(t), endpoint.next(t))
		endpoint.none(t)
	})
}

// Traefik ends the context of a middleware before the requests that it serves, and it may serve some more.
func TestDelivery_GoesOnAfterTheConfigurationHasChanged(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			came, answer := make(chan struct{}, 1), make(chan struct{})
			endpoint, counted := newCounted(t, func(http.ResponseWriter, *http.Request) {
				came <- struct{}{}
				<-answer
			})
			config := settings{"exchange": one(endpoint.URL, settings{"rejectOnRecordError": reject})}
			s := newTapInFrontOf(t, e, config, http.HandlerFunc(pong))
			get := func(meanwhile func()) {
				statuses := make(chan []int, 1)
				go func() { statuses <- crowd(t, s, 1, 1) }()
				receive(t, came, "the record")
				meanwhile()
				answer <- struct{}{}
				assert.Equal(t, []int{http.StatusOK}, receive(t, statuses, "the response"))
				require.Nil(t, s.done(t))
				endpoint.next(t)
			}

			get(func() {})
			assert.EqualValues(t, 1, counted.open.Load(), "it is kept for the next record")
			get(s.cancel)
			counted.gone(t)
			for range 2 {
				accepted := counted.accepted.Load()
				get(func() {})
				assert.Equal(t, accepted+1, counted.accepted.Load(), "a connection was kept")
			}
			counted.gone(t)
			endpoint.none(t)
		})
	})
}

// Traefik makes an instance of the middleware for every router.
func TestDelivery_SharesItsConnectionsBetweenAllRouters(t *testing.T) {
	const routers = 300
	onBothEngines(t, func(t *testing.T, e engine) {
		before := goleak.IgnoreCurrent()
		endpoint, counted := newCounted(t, nil)
		// In any spelling.
		configs := []settings{
			{"exchange": one(endpoint.URL, settings{"timeout": "10s", "headers": settings{"x-tenant": "one", "X-Other": "2"}})},
			{"exchange": one(" "+endpoint.URL+"/", settings{"headers": settings{"X-Other": "2", "X-Tenant": "one"}, "path": "records", "recordBody": false})},
		}
		var cancels []context.CancelFunc
		var handlers []http.Handler
		for i := range routers {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			handler, err := e.plugin.New(ctx, http.HandlerFunc(accept), configs[i%2], fmt.Sprintf("audit-%d@file", i%10))
			require.NoError(t, err)
			cancels, handlers = append(cancels, cancel), append(handlers, handler)
		}
		for _, handler := range handlers {
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
			endpoint.next(t)
		}
		counted.assertReused(t, 1, routers)

		// One router is enough to keep it.
		for _, cancel := range cancels[1:] {
			cancel()
		}
		accepted := counted.accepted.Load()
		handlers[0].ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
		endpoint.next(t)
		assert.Equal(t, accepted, counted.accepted.Load())

		cancels[0]()
		counted.gone(t)
		endpoint.Close()
		goleak.VerifyNone(t, before)
	})
}

func TestDelivery_KeepsDifferentSettingsApart(t *testing.T) {
	different := map[string]settings{
		"one header":         {"headers": settings{"X-Tenant": "one"}},
		"another value":      {"headers": settings{"X-Tenant": "two"}},
		"two headers":        {"headers": settings{"X-Tenant": "one", "X-Other": "1"}},
		"a value of the two": {"headers": settings{"X-Tenant": `one" "X-Other": "1`}},
		"another name":       {"headers": settings{"X-Tenants": "one"}},
		"another path":       {"path": "/other"},
		"a query string":     {"path": "/records?a"},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newReceiver(t, nil)
		handlers := map[string]http.Handler{}
		for name, options := range different {
			handlers[name] = newHandler(t, e.plugin, settings{"exchange": one(endpoint.URL, options)}, http.HandlerFunc(accept), "audit@file")
		}
		for name, handler := range handlers {
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
			got := endpoint.next(t)
			path, _ := different[name]["path"].(string)
			if path == "" {
				path = "/records"
			}
			assert.Equal(t, path, got.URI, name)
			headers, _ := different[name]["headers"].(settings)
			for _, header := range []string{"X-Tenant", "X-Tenants", "X-Other"} {
				want, _ := headers[header].(string)
				assert.Equal(t, want, got.Header.Get(header), name)
			}
		}
	})
}

func TestDelivery_TellsOfFailuresOnceASecond(t *testing.T) {
	const clients, failures = 10, 5000
	onBothEngines(t, func(t *testing.T, e engine) {
		down := closedEndpoint(t)
		name, other := e.name+"-down@file", e.name+"-other@file"
		config := settings{"exchange": one(down, nil)}
		handlers := []http.Handler{ // Both at the same endpoint.
			newHandler(t, e.plugin, config, http.HandlerFunc(accept), name),
			newHandler(t, e.plugin, config, http.HandlerFunc(accept), name),
		}
		fail := func(handler http.Handler) {
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
		}
		pluginLog.take()
		started := time.Now()

		fail(handlers[0])
		line := `^Unable to send the exchange record error=".*connection refused" middlewareName=` + name + ` middlewareType=Tap`
		first := linesWith(pluginLog.take(), name)
		require.Len(t, first, 1, "the first failure is told at once")
		assert.Regexp(t, line+"$", first[0])

		var failing sync.WaitGroup
		for i := range clients {
			failing.Go(func() {
				for range failures / clients {
					fail(handlers[i%2])
				}
			})
		}
		failing.Wait()
		lines := awaitFailures(t, failures, name)
		for _, told := range lines {
			assert.Regexp(t, line+`( suppressed=[1-9][0-9]*)?$`, told)
		}
		assert.LessOrEqual(t, float64(1+len(lines)), time.Since(started).Seconds()+1)

		// Another endpoint's failures are told for themselves.
		fail(newHandler(t, e.plugin, settings{"exchange": one(down, settings{"path": "/other"})}, http.HandlerFunc(accept), other))
		assert.Len(t, linesWith(pluginLog.take(), other), 1)
	})
}

var suppressed = regexp.MustCompile(` suppressed=(\d+)$`)

// awaitFailures waits until n failures of a middleware have been told in the log, and returns the lines. What is suppressed is told a
// second later: nobody who waits for it finds it in the log of the next test.
func awaitFailures(t *testing.T, n int, middleware string) []string {
	t.Helper()
	var lines []string
	told := 0
	require.Eventually(t, func() bool {
		for _, line := range linesWith(pluginLog.take(), "middlewareName="+middleware+" ") {
			lines = append(lines, line)
			told++
			if match := suppressed.FindStringSubmatch(line); match != nil {
				more, err := strconv.Atoi(match[1])
				assert.NoError(t, err)
				told += more
			}
		}

		return told >= n
	}, patience, 10*time.Millisecond)
	assert.Equal(t, n, told)

	return lines
}
