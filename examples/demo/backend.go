package main

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"time"

	"github.com/coder/websocket"
)

// events are what a stream sends, one after the other.
var events = []string{"packed", "sent", "delivered"}

//go:embed page.html
var startPage []byte

// backend is the application behind the tap.
type backend struct {
	*httptest.Server

	// seen gets a value when the client has had an event. Nil: nobody tells.
	seen chan struct{}

	mu   sync.Mutex
	work work
}

// work is what a backend did since it was last asked.
type work struct {
	calls int
	// authorization is that of the last request.
	authorization string
	// size and sum are the last upload's bytes and their SHA-256.
	size int64
	sum  string
	// sent is when the last event was.
	sent time.Time
}

func newBackend(ctx context.Context, paced bool) *backend {
	b := &backend{}
	if paced {
		b.seen = make(chan struct{})
	}

	routes := http.NewServeMux()
	routes.HandleFunc("GET /{$}", b.page)
	routes.HandleFunc("GET /products/42", b.product)
	routes.HandleFunc("POST /orders", b.create)
	routes.HandleFunc("POST /payments", b.create)
	routes.HandleFunc("GET /reports/{number}", b.report)
	routes.HandleFunc("GET /events", b.events)
	routes.HandleFunc("GET /chat", b.chat)
	routes.HandleFunc("PUT /files/{name}", b.store)
	b.Server = startServer(ctx, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		b.note(func(w *work) {
			w.calls++
			w.authorization = req.Header.Get("Authorization")
		})
		routes.ServeHTTP(rw, req)
	}))

	return b
}

func (b *backend) note(change func(w *work)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change(&b.work)
}

// done returns what the backend did since the last forget.
func (b *backend) done() work {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.work
}

// forget returns the same, and starts anew.
func (b *backend) forget() work {
	b.mu.Lock()
	defer b.mu.Unlock()
	done := b.work
	b.work = work{}

	return done
}

func (*backend) page(rw http.ResponseWriter, _ *http.Request) {
	rw.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = rw.Write(startPage)
}

func (*backend) product(rw http.ResponseWriter, _ *http.Request) {
	rw.Header().Set("Set-Cookie", "session="+token)
	answer(rw, http.StatusOK, `{"id":42,"name":"teapot","price":18}`)
}

func (*backend) report(rw http.ResponseWriter, req *http.Request) {
	answer(rw, http.StatusOK, fmt.Sprintf(`{"report":%q}`, req.PathValue("number")))
}

func (*backend) create(rw http.ResponseWriter, req *http.Request) {
	var order map[string]any
	if err := json.NewDecoder(req.Body).Decode(&order); err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	answer(rw, http.StatusCreated, `{"number":7,"state":"accepted"}`)
}

func (b *backend) store(rw http.ResponseWriter, req *http.Request) {
	hash := sha256.New()
	size, err := io.Copy(hash, req.Body)
	if err != nil {
		return
	}
	b.note(func(w *work) { w.size, w.sum = size, hex.EncodeToString(hash.Sum(nil)) })
	answer(rw, http.StatusCreated, fmt.Sprintf(`{"stored":%d}`, size))
}

func answer(rw http.ResponseWriter, status int, text string) {
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(status)
	_, _ = io.WriteString(rw, text)
}

// events never sends an event before the client has had the one before, or a second has passed where nobody tells.
func (b *backend) events(rw http.ResponseWriter, req *http.Request) {
	rw.Header().Set("Content-Type", "text/event-stream")
	for _, event := range events {
		b.note(func(w *work) { w.sent = time.Now() })
		_, _ = fmt.Fprintf(rw, "data: %s\n\n", event)
		_ = http.NewResponseController(rw).Flush()
		b.waitForClient(req.Context())
	}
}

func (b *backend) waitForClient(ctx context.Context) {
	var timer <-chan time.Time
	if b.seen == nil {
		timer = time.After(time.Second)
	}
	select {
	case <-b.seen:
	case <-timer:
	case <-ctx.Done():
	}
}

// chat sends back what it gets.
func (*backend) chat(rw http.ResponseWriter, req *http.Request) {
	conn, err := websocket.Accept(rw, req, nil)
	if err != nil {
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
