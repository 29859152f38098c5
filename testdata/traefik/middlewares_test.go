package traefik_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coder/websocket"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik/traefik/v3/pkg/config/dynamic"
	"github.com/traefik/traefik/v3/pkg/middlewares/buffering"
	"github.com/traefik/traefik/v3/pkg/middlewares/recovery"
)

// middleware puts something in front of a handler.
type middleware func(t *testing.T, next http.Handler) http.Handler

// Traefik puts its recovery in front of all middlewares of a router.
func recovering(t *testing.T, next http.Handler) http.Handler {
	t.Helper()
	handler, err := recovery.New(t.Context(), next)
	require.NoError(t, err)

	return handler
}

// buffered keeps whole requests and whole responses, as without any option.
func buffered(t *testing.T, next http.Handler) http.Handler {
	t.Helper()

	return buffer(t, next, dynamic.Buffering{})
}

// bufferedRequests keeps whole requests, and lets responses through. Manifests can say so, files and labels cannot.
func bufferedRequests(t *testing.T, next http.Handler) http.Handler {
	t.Helper()

	return buffer(t, next, dynamic.Buffering{DisableResponseBuffer: true})
}

func buffer(t *testing.T, next http.Handler, config dynamic.Buffering) http.Handler {
	t.Helper()
	handler, err := buffering.New(t.Context(), next, config, "buffer@file")
	require.NoError(t, err)

	return handler
}

func tapping(config settings) middleware {
	return func(t *testing.T, next http.Handler) http.Handler {
		t.Helper()

		return newTap(t, next, config)
	}
}

func nothing(_ *testing.T, next http.Handler) http.Handler {
	return next
}

// chains are the places that the tap may have among Traefik's own middlewares.
var chains = map[string]func(tap middleware) []middleware{
	"recovery":                      func(tap middleware) []middleware { return []middleware{recovering, tap} },
	"recovery, buffering":           func(tap middleware) []middleware { return []middleware{recovering, buffered, tap} },
	"recovery, tap, then buffering": func(tap middleware) []middleware { return []middleware{recovering, tap, buffered} },
	"buffering of requests": func(tap middleware) []middleware {
		return []middleware{recovering, bufferedRequests, tap}
	},
	"tap, then buffering of requests": func(tap middleware) []middleware {
		return []middleware{recovering, tap, bufferedRequests}
	},
}

// streaming are the chains that let responses through as they come.
var streaming = []string{"recovery", "buffering of requests", "tap, then buffering of requests"}

// serve starts a backend, a reverse proxy in front of it and middlewares in front of that, and returns the URL of the server.
func serve(t *testing.T, backend http.HandlerFunc, middlewares ...middleware) string {
	t.Helper()
	behind := httptest.NewServer(backend)
	t.Cleanup(behind.Close)
	target, err := url.Parse(behind.URL)
	require.NoError(t, err)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)

	var handler http.Handler = &httputil.ReverseProxy{
		Rewrite:   func(req *httputil.ProxyRequest) { req.SetURL(target) },
		Transport: transport,
	}
	for i := len(middlewares) - 1; i >= 0; i-- {
		handler = middlewares[i](t, handler)
	}
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)

	return server.URL
}

// onEachChain runs a test with the tap at each place, without and with rejectOnRecordError, and without a tap.
func onEachChain(t *testing.T, names []string, test func(t *testing.T, endpoint *endpoint, middlewares []middleware)) {
	t.Helper()
	for _, name := range names {
		for _, reject := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, reject=%t", name, reject), func(t *testing.T) {
				endpoint := newEndpoint(t)
				// Without a body the record is complete when the header has come, and nothing is held.
				config := settings{"exchange": settings{"service": endpoint.URL, "rejectOnRecordError": reject}}
				test(t, endpoint, chains[name](tapping(config)))
			})
		}
		t.Run(name+", no tap", func(t *testing.T) {
			test(t, nil, chains[name](nothing))
		})
	}
}

// recorded waits for the record of the one exchange, where there is a tap.
func (e *endpoint) recorded(t *testing.T, status int) {
	t.Helper()
	if e == nil {
		return
	}
	got := e.next(t)
	require.Equal(t, "exchange", got.Kind)
	assert.Equal(t, status, got.Response.Status)
}

// stream is a backend that sends an event when it is told to.
type stream struct {
	next     chan bool
	finished atomic.Bool
}

func (s *stream) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	rw.Header().Set("Content-Type", "text/event-stream")
	for number := 0; ; number++ {
		select {
		case more := <-s.next:
			if !more {
				s.finished.Store(true)

				return
			}
		case <-req.Context().Done():
			return
		}
		_, _ = fmt.Fprintf(rw, "data: %d\n\n", number)
		_ = http.NewResponseController(rw).Flush()
	}
}

// get sends a GET that ends with the test, or when patience is over.
func get(t *testing.T, url string) *http.Response {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	require.NoError(t, err)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	resp, err := (&http.Client{Transport: transport}).Do(req)
	require.NoError(t, err)
	t.Cleanup(func() { resp.Body.Close() })

	return resp
}

func TestTap_ForwardsEachEventAtOnceAmongMiddlewaresThatDo(t *testing.T) {
	onEachChain(t, streaming, func(t *testing.T, endpoint *endpoint, middlewares []middleware) {
		source := &stream{next: make(chan bool, 1)}
		url := serve(t, source.ServeHTTP, middlewares...)

		source.next <- true
		resp := get(t, url)
		events := bufio.NewReader(resp.Body)
		for number := range 5 {
			// The next event is sent when this one has come.
			event, err := events.ReadString('\n')
			require.NoError(t, err, "the event did not come")
			assert.Equal(t, fmt.Sprintf("data: %d\n", number), event)
			_, err = events.ReadString('\n')
			require.NoError(t, err)
			source.next <- number < 4
		}
		_, err := events.ReadByte()
		require.ErrorIs(t, err, io.EOF)
		endpoint.recorded(t, http.StatusOK)
	})
}

func TestTap_ChangesNothingOfAStreamThatIsBuffered(t *testing.T) {
	onEachChain(t, []string{"recovery, buffering", "recovery, tap, then buffering"}, func(t *testing.T, endpoint *endpoint, middlewares []middleware) {
		source := &stream{next: make(chan bool, 4)}
		url := serve(t, source.ServeHTTP, middlewares...)
		for number := range 4 {
			source.next <- number < 3
		}

		resp := get(t, url)

		assert.True(t, source.finished.Load(), "the middleware does not buffer")
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.Equal(t, "data: 0\n\ndata: 1\n\ndata: 2\n\n", string(body))
		assert.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
		endpoint.recorded(t, http.StatusOK)
	})
}

func TestTap_LetsAWebSocketThroughAmongMiddlewares(t *testing.T) {
	echo := func(rw http.ResponseWriter, req *http.Request) {
		conn, err := websocket.Accept(rw, req, nil)
		if !assert.NoError(t, err) {
			return
		}
		defer func() { _ = conn.CloseNow() }()
		for {
			kind, message, err := conn.Read(req.Context())
			if err != nil || conn.Write(req.Context(), kind, message) != nil {
				return
			}
		}
	}
	onEachChain(t, namesOfChains(), func(t *testing.T, endpoint *endpoint, middlewares []middleware) {
		url := serve(t, echo, middlewares...)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		transport := &http.Transport{}
		defer transport.CloseIdleConnections()

		conn, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPClient: &http.Client{Transport: transport}})
		require.NoError(t, err)
		defer func() { _ = conn.CloseNow() }()
		for number := range 3 {
			sent := strings.Repeat(fmt.Sprint(number), 1000)
			require.NoError(t, conn.Write(ctx, websocket.MessageText, []byte(sent)))
			kind, got, err := conn.Read(ctx)
			require.NoError(t, err)
			assert.Equal(t, websocket.MessageText, kind)
			assert.Equal(t, sent, string(got))
		}
		require.NoError(t, conn.Close(websocket.StatusNormalClosure, ""))
		endpoint.recorded(t, http.StatusSwitchingProtocols)
	})
}

func TestTap_LeavesAPlainResponseAsItIsAmongMiddlewares(t *testing.T) {
	body := strings.Repeat("0123456789", 10_000)
	backend := func(rw http.ResponseWriter, req *http.Request) {
		received, err := io.ReadAll(req.Body)
		if assert.NoError(t, err) && assert.Equal(t, body, string(received)) {
			rw.Header().Set("X-Backend", "yes")
			rw.WriteHeader(http.StatusCreated)
			_, _ = rw.Write(received)
		}
	}
	onEachChain(t, namesOfChains(), func(t *testing.T, endpoint *endpoint, middlewares []middleware) {
		url := serve(t, backend, middlewares...)
		transport := &http.Transport{}
		defer transport.CloseIdleConnections()

		resp, err := (&http.Client{Transport: transport}).Post(url, "text/plain", strings.NewReader(body))
		require.NoError(t, err)
		defer resp.Body.Close()

		received, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.Equal(t, http.StatusCreated, resp.StatusCode)
		assert.Equal(t, body, string(received))
		assert.Equal(t, "yes", resp.Header.Get("X-Backend"))
		endpoint.recorded(t, http.StatusCreated)
	})
}

func TestTap_LeavesAnAbortAnAbortForRecovery(t *testing.T) {
	onEachChain(t, streaming, func(t *testing.T, endpoint *endpoint, middlewares []middleware) {
		url := serve(t, func(rw http.ResponseWriter, _ *http.Request) {
			_, _ = rw.Write([]byte("half"))
			_ = http.NewResponseController(rw).Flush()
			panic(http.ErrAbortHandler)
		}, middlewares...)
		traefikLog.take()

		_, err := io.ReadAll(get(t, url).Body)

		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		endpoint.recorded(t, http.StatusOK)
		assert.Empty(t, traefikLog.errors())
	})
}

func TestTap_LeavesAPanicToRecovery(t *testing.T) {
	handler := recovering(t, newTap(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		panic("a mistake")
	}), settings{"exchange": settings{"service": newEndpoint(t).URL}}))
	traefikLog.take()

	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/", nil))

	assert.Equal(t, http.StatusInternalServerError, answer.Code)
	recovered := ""
	for _, line := range traefikLog.take() {
		if line["level"] == zerolog.LevelErrorValue && line["middlewareType"] == "Recovery" {
			recovered += fmt.Sprint(line["message"])
		}
	}
	assert.Contains(t, recovered, "a mistake")
}

func namesOfChains() []string {
	names := make([]string, 0, len(chains))
	for name := range chains {
		names = append(names, name)
	}

	return names
}
