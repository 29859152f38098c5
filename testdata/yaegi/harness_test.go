package yaegi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
	"go.uber.org/goleak"
)

// patience is how long a test waits for what must come. It is never waited out when all is well.
const patience = 20 * time.Second

// engine is one of the two ways in which the plugin runs. What it promises, it promises in both.
type engine struct {
	name   string
	plugin host.Plugin
}

// Set up once: loading the plugin takes the interpreter a second.
var interpretedPlugin host.Plugin

func TestMain(m *testing.M) {
	if address := os.Getenv(clientAddress); address != "" {
		os.Exit(runAsClient(address))
	}

	log.SetFlags(0)
	log.SetOutput(pluginLog)

	var err error
	if interpretedPlugin, err = host.Interpret(host.Options{Stderr: pluginLog}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}

	goleak.VerifyTestMain(m)
}

// onBothEngines runs a test with the plugin compiled and interpreted.
func onBothEngines(t *testing.T, test func(t *testing.T, e engine)) {
	t.Helper()
	for _, e := range []engine{{"compiled", host.Compiled()}, {"interpreted", interpretedPlugin}} {
		t.Run(e.name, func(t *testing.T) { test(t, e) })
	}
}

// pluginLog is where both engines log. Every line is one write.
var pluginLog = &logLines{}

type logLines struct {
	mu    sync.Mutex
	lines []string
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, strings.TrimSuffix(string(p), "\n"))

	return len(p), nil
}

// take returns the lines since the last take.
func (l *logLines) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := l.lines
	l.lines = nil

	return lines
}

// received is one record that an endpoint got.
type received struct {
	tap.Record
	// Payload is the body of the POST, or the record's line of a batch without its line feed.
	Payload []byte
	Header  http.Header
	URI     string
	// POST is the number of the POST from 1. The records of a batch share it.
	POST int64
}

// receiver is an endpoint on loopback.
type receiver struct {
	*httptest.Server
	records chan received
}

// newReceiver starts an endpoint that answers by answer; nil accepts every record. What it got can be read before it has answered, and
// answer can read the body once more.
func newReceiver(t *testing.T, answer http.HandlerFunc) *receiver {
	t.Helper()

	return startReceiver(t, answer, func(*httptest.Server) {})
}

// startReceiver is newReceiver for an endpoint that prepare changes before it starts: with TLS when it sets that up.
func startReceiver(t *testing.T, answer http.HandlerFunc, prepare func(*httptest.Server)) *receiver {
	t.Helper()
	r := &receiver{records: make(chan received, 100_000)}
	var posts atomic.Int64
	r.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		payload, err := io.ReadAll(req.Body)
		if err != nil {
			return // The connection was cut: no record.
		}
		post := posts.Add(1)
		for _, line := range linesOf(t, req.Header, payload) {
			got := received{Payload: line, Header: req.Header, URI: req.RequestURI, POST: post}
			if err := json.Unmarshal(line, &got.Record); err != nil {
				t.Errorf("the endpoint got no JSON: %v: %q", err, line)
			}
			r.records <- got
		}
		if answer != nil {
			req.Body = io.NopCloser(bytes.NewReader(payload))
			answer(rw, req)
		}
	}))
	r.Config.ErrorLog = log.New(io.Discard, "", 0)
	prepare(r.Server)
	if r.TLS == nil {
		r.Start()
	} else {
		r.StartTLS()
	}
	t.Cleanup(r.Close)

	return r
}

// linesOf returns the records of a POST: several when it is a batch.
func linesOf(t *testing.T, header http.Header, payload []byte) [][]byte {
	t.Helper()
	if header.Get("Content-Type") != "application/x-ndjson" {
		return [][]byte{payload}
	}
	text, whole := bytes.CutSuffix(payload, []byte("\n"))
	assert.True(t, whole, "the last line of a batch has no end")

	return bytes.Split(text, []byte("\n"))
}

// next waits for one record.
func (r *receiver) next(t *testing.T) received {
	t.Helper()
	select {
	case got := <-r.records:
		return got
	case <-time.After(patience):
		require.FailNow(t, "no record came")

		return received{}
	}
}

// kinds waits for n records, and returns them by their kind. Two of one kind are an error.
func (r *receiver) kinds(t *testing.T, n int) map[string]received {
	t.Helper()
	byKind := map[string]received{}
	for range n {
		got := r.next(t)
		require.NotContains(t, byKind, got.Kind, "a second record of this kind")
		byKind[got.Kind] = got
	}

	return byKind
}

// none fails when there is another record. It does not wait: records are delivered before a tap has served a request.
func (r *receiver) none(t *testing.T) {
	t.Helper()
	select {
	case got := <-r.records:
		require.FailNow(t, "a record too many", "%s", got.Payload)
	default:
	}
}

// settings are what a user writes under the plugin's alias.
type settings = map[string]any

// tapped is a server with the tap in it.
type tapped struct {
	*httptest.Server
	// Client has connections of its own.
	Client *http.Client
	// served gets what ServeHTTP of the tap panicked with, nil where it returned, for each request that it has served.
	served chan any
	cancel context.CancelFunc
}

// newTap puts the tap, a reverse proxy as Traefik's and a server with the backend's handler in a row.
func newTap(t *testing.T, e engine, config settings, backend http.HandlerFunc) *tapped {
	t.Helper()
	server := httptest.NewServer(backend)
	t.Cleanup(server.Close)

	return newTapInFrontOf(t, e, config, newProxy(t, server.URL))
}

// newProxy returns a reverse proxy as Traefik's.
func newProxy(t *testing.T, target string) http.Handler {
	t.Helper()
	proxy, err := host.Proxy(target)
	require.NoError(t, err)
	t.Cleanup(proxy.CloseIdleConnections)

	return proxy
}

// newTapInFrontOf puts the tap in front of any handler.
func newTapInFrontOf(t *testing.T, e engine, config settings, next http.Handler) *tapped {
	t.Helper()

	return serve(t, e, config, next, func(handler http.Handler) http.Handler { return handler }, nil)
}

// serve puts the tap in front of a handler, and wrap's middleware in front of the tap. Prepare may change the server before it starts.
func serve(t *testing.T, e engine, config settings, next http.Handler, wrap func(http.Handler) http.Handler, prepare func(*httptest.Server)) *tapped {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	handler, err := e.plugin.New(ctx, next, config, "audit@file")
	require.NoError(t, err)

	s := &tapped{served: make(chan any, 100_000), cancel: cancel}
	watched := http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		defer func() {
			value := recover()
			s.served <- value
			if value != nil {
				panic(value)
			}
		}()
		handler.ServeHTTP(rw, req)
	})
	s.Server = httptest.NewUnstartedServer(wrap(watched))
	s.Server.Config.ErrorLog = log.New(io.Discard, "", 0)
	if prepare != nil {
		prepare(s.Server)
	}
	if s.Server.EnableHTTP2 {
		s.Server.StartTLS()
	} else {
		s.Server.Start()
	}
	s.Client = s.Server.Client()
	s.Client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	t.Cleanup(func() {
		s.Server.Close() // Waits for the requests under way.
		cancel()
	})

	return s
}

// done waits until the tap has served one request, and returns what it panicked with, if it did.
func (s *tapped) done(t *testing.T) any {
	t.Helper()
	select {
	case value := <-s.served:
		return value
	case <-time.After(patience):
		require.FailNow(t, "the tap did not return")

		return nil
	}
}

// do sends a request, and returns the answer and its body.
func (s *tapped) do(t *testing.T, method, path string, body []byte, header ...string) (*http.Response, []byte) {
	t.Helper()
	var reader io.Reader
	if body != nil {
		reader = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, reader)
	require.NoError(t, err)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}

	return s.send(t, req)
}

// send sends a request, and returns the answer and its body.
func (s *tapped) send(t *testing.T, req *http.Request) (*http.Response, []byte) {
	t.Helper()
	resp, err := s.Client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	require.NoError(t, err)

	return resp, answer
}

// every returns settings that record all three kinds at one endpoint, bodies included, with the given options added to each.
func every(service string, options settings) settings {
	config := settings{}
	for _, kind := range []string{"request", "response", "exchange"} {
		config[kind] = one(service, options)
	}

	return config
}

// one returns the settings of one kind of record.
func one(service string, options settings) settings {
	kind := settings{"service": service, "path": "/records", "recordBody": true}
	for name, value := range options {
		kind[name] = value
	}

	return kind
}

// bothWays runs a test with rejectOnRecordError off and on.
func bothWays(t *testing.T, test func(t *testing.T, reject bool)) {
	t.Helper()
	for _, reject := range []bool{false, true} {
		t.Run(fmt.Sprintf("reject=%t", reject), func(t *testing.T) { test(t, reject) })
	}
}
