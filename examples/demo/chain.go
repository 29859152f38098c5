package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/traefik-tap/tap"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

// chain is the routers of dynamic.yml with all around them: a client in front, the application behind, the endpoint beside.
type chain struct {
	*httptest.Server
	client   *http.Client
	backend  *backend
	endpoint *endpoint

	// complete is called when a client has all of an answer that it waits for.
	complete func()
	// served gets a value when a request has been served and its records are delivered.
	served  chan struct{}
	handler *host.Handler
	release context.CancelFunc
}

// newChain starts all servers. Without a plugin the routers have no middlewares. Where paced, the backend sends an event when the
// client has had the one before; otherwise each second. They hear of the end of ctx, and stand until Close.
func newChain(ctx context.Context, plugin host.Plugin, paced bool) (*chain, error) {
	ctx, release := context.WithCancel(ctx)
	c := &chain{
		client:   &http.Client{Transport: &http.Transport{}},
		backend:  newBackend(ctx, paced),
		endpoint: newEndpoint(ctx),
		complete: func() {},
		served:   make(chan struct{}, 1),
		release:  release,
	}

	if err := c.build(ctx, plugin); err != nil {
		c.Close()
		return nil, err
	}
	c.Server = startServer(ctx, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		if paced {
			// Deferred, since a reverse proxy whose client is gone panics.
			defer func() { c.served <- struct{}{} }()
		}
		c.handler.ServeHTTP(rw, req)
	}))

	return c, nil
}

func (c *chain) build(ctx context.Context, plugin host.Plugin) error {
	dynamic, err := host.ReadDynamic(filepath.Join(host.Root(), "examples", "file-provider", "dynamic.yml"),
		"http://127.0.0.1:8080", c.backend.URL, "http://127.0.0.1:9000", c.endpoint.URL, "http://127.0.0.1:9001", nobody(ctx))
	if err != nil {
		return err
	}
	if plugin == nil {
		for _, router := range dynamic.HTTP.Routers {
			router.Middlewares = nil
		}
	}
	c.handler, err = dynamic.Build(ctx, plugin)

	return err
}

// nobody returns a URL at which nobody listens.
func nobody(ctx context.Context) string {
	server := startServer(ctx, http.NotFoundHandler())
	server.Close()

	return server.URL
}

// Close ends all servers and connections.
func (c *chain) Close() {
	c.client.CloseIdleConnections()
	if c.Server != nil {
		c.Server.Close()
	}
	c.release()
	if c.handler != nil {
		c.handler.CloseIdleConnections()
	}
	c.backend.Close()
	c.endpoint.Close()
}

// observe lets an exchange happen, and waits until all is delivered that comes of it. What goes wrong for the client is part of the
// outcome.
func (c *chain) observe(ctx context.Context, x exchange, patience time.Duration) (*outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c.backend.forget()
	c.endpoint.take()

	o := &outcome{started: time.Now()}
	o.err = x.happen(ctx, c, o)
	o.took = time.Since(o.started)

	select {
	case <-c.served:
	case <-time.After(patience):
		return nil, fmt.Errorf("%s: the request is still being served", x.title)
	}
	o.ended = time.Now()
	o.records = c.endpoint.take()
	slices.SortStableFunc(o.records, func(a, b record) int { return slices.Index(x.records, a.Kind) - slices.Index(x.records, b.Kind) })
	o.backend = c.backend.forget()

	// An interrupt.
	if errors.Is(ctx.Err(), context.Canceled) {
		return nil, context.Cause(ctx)
	}

	return o, nil
}

// completed tells that the client has all of an answer that it waits for.
func (c *chain) completed(o *outcome) {
	o.complete = time.Since(o.started)
	c.complete()
}

// endpoint is a tap endpoint that accepts all records.
type endpoint struct {
	*httptest.Server

	mu      sync.Mutex
	records []record
	// answering is called for each record before its POST is answered, if it is not nil.
	answering func(ctx context.Context, got record)
	// posts counts the POSTs.
	posts int
	// answered counts the POSTs that were answered since the last take.
	answered int
}

// record is a record that an endpoint got, with what came of its POST.
type record struct {
	tap.Record
	payload []byte
	header  http.Header
	path    string
}

func newEndpoint(ctx context.Context) *endpoint {
	e := &endpoint{}
	e.Server = startServer(ctx, http.HandlerFunc(e.serve))

	return e
}

func (e *endpoint) serve(rw http.ResponseWriter, req *http.Request) {
	got, err := readRecords(req)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}

	e.mu.Lock()
	e.posts++
	e.records = append(e.records, got...)
	answering := e.answering
	e.mu.Unlock()

	if answering != nil {
		for _, r := range got {
			answering(req.Context(), r)
		}
	}

	e.mu.Lock()
	e.answered++
	e.mu.Unlock()
	rw.WriteHeader(http.StatusNoContent)
}

// readRecords reads a record, or a batch with one a line: JSON has no line feeds of its own here.
func readRecords(req *http.Request) ([]record, error) {
	payload, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}

	var records []record
	for line := range bytes.Lines(payload) {
		r := record{header: req.Header, path: req.URL.Path, payload: bytes.TrimSuffix(line, []byte("\n"))}
		if err := json.Unmarshal(r.payload, &r.Record); err != nil {
			return nil, err
		}
		records = append(records, r)
	}

	return records, nil
}

// before lets a function be called for each record before its POST is answered.
func (e *endpoint) before(answering func(ctx context.Context, got record)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answering = answering
}

// take returns the records since the last take.
func (e *endpoint) take() []record {
	e.mu.Lock()
	defer e.mu.Unlock()
	records := e.records
	e.records, e.answered = nil, 0

	return records
}

// hasAnswered says whether a POST was answered since the last take.
func (e *endpoint) hasAnswered() bool {
	e.mu.Lock()
	defer e.mu.Unlock()

	return e.answered > 0
}

// logLines is a log in memory.
type logLines struct {
	mu    sync.Mutex
	lines []string
	// each gets each line, if it is not nil, and then nothing is kept.
	each func(line string)
}

// Write implements io.Writer for whole lines.
func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := strings.TrimSuffix(string(p), "\n")
	if l.each != nil {
		l.each(line)
	} else {
		l.lines = append(l.lines, line)
	}

	return len(p), nil
}

// follow lets a function have each line that comes from now on.
func (l *logLines) follow(each func(line string)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.each = each
}

// take returns the lines since the last take.
func (l *logLines) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := l.lines
	l.lines = nil

	return lines
}

// startServer starts a server whose requests end with ctx. It logs nothing: what goes wrong shows in what the client gets.
func startServer(ctx context.Context, handler http.Handler) *httptest.Server {
	server := httptest.NewUnstartedServer(handler)
	server.Config.BaseContext = func(net.Listener) context.Context { return ctx }
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Start()

	return server
}
