package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/coder/websocket"
)

// token is a secret: it must reach the application, and be in no record.
const token = "s3cret-t0ken"

// exchange is a request that is sent through the tap, and what is promised about it.
type exchange struct {
	title string
	// short is its title where there is less room.
	short      string
	middleware string
	// records are the kinds of the records that are promised, in the order in which they are shown.
	records []string
	// endpointDown says that the endpoint is taken down before, so that no record can be delivered.
	endpointDown bool
	// happen sends the request, and notes what the client sees.
	happen func(ctx context.Context, c *chain, o *outcome) error
	// note is what its cost needs said, endNote the same about its end, where a client does not wait for that.
	note, endNote string
	// promises are those that not every exchange has.
	promises func(o *outcome) []promise
}

// outcome is all that came of an exchange.
type outcome struct {
	// What the client sent: the header without what net/http adds.
	method, path string
	header       http.Header
	sent         []byte

	// What the client got. Body is what came in the response's body.
	response *http.Response
	body     []byte
	// onTheWay is how long each event took from the backend's writing to the client.
	onTheWay []time.Duration
	// said and heard are the messages of a WebSocket.
	said, heard string
	err         error

	// started, and from there: complete is when the client had all that it waited for, took when the response had ended too.
	started        time.Time
	complete, took time.Duration
	// ended is when the request had been served and all records were delivered.
	ended time.Time

	// What others saw.
	backend work
	records []record
	log     []string
}

// exchanges are those of the demo. The last one leaves the endpoint down.
func exchanges() []exchange {
	both := []string{"request", "response"}
	order := []byte(`{"item":"teapot","quantity":2}`)

	return []exchange{{
		title: "A GET", short: "GET", middleware: "audit", records: both,
		happen:   get("/products/42"),
		promises: func(o *outcome) []promise { return []promise{recordsHide("the cookie", o)} },
	}, {
		title: "A POST with JSON and a bearer token, recorded in one piece", short: "POST", middleware: "audit-exchange",
		records:  []string{"exchange"},
		happen:   upload(http.MethodPost, "/orders", "application/json", order),
		promises: func(o *outcome) []promise { return []promise{recordsHide("the token", o)} },
	}, {
		title: "A stream of events", short: "events, until the last", middleware: "audit", records: both,
		happen:   listen,
		endNote:  "waits for its record; no event does",
		promises: func(o *outcome) []promise { return []promise{eventsComeAtOnce(o)} },
	}, {
		title: "A WebSocket", short: "WebSocket, one echo", middleware: "audit", records: both,
		happen:   chat,
		promises: func(o *outcome) []promise { return []promise{upgradeIsServed(o)} },
	}, {
		title: "An upload of 200,001 bytes", short: "upload, 200,001 bytes", middleware: "audit", records: both,
		happen:   upload(http.MethodPut, "/files/sales.csv", "text/csv", sales(200_001)),
		promises: func(o *outcome) []promise { return []promise{uploadIsWhole(o)} },
	}, {
		title: "A POST that must be recorded, while the endpoint is down", short: "POST, audit-strict", middleware: "audit-strict",
		endpointDown: true,
		note:         "the record first, as asked",
		happen:       upload(http.MethodPost, "/payments", "application/json", []byte(`{"order":7,"amount":36}`)),
		promises:     func(o *outcome) []promise { return []promise{nothingIsServed(o)} },
	}}
}

func get(path string) func(context.Context, *chain, *outcome) error {
	return func(ctx context.Context, c *chain, o *outcome) error {
		return c.send(ctx, o, http.MethodGet, path, nil, nil)
	}
}

func upload(method, path, contentType string, body []byte) func(context.Context, *chain, *outcome) error {
	return func(ctx context.Context, c *chain, o *outcome) error {
		header := http.Header{"Authorization": {"Bearer " + token}, "Content-Type": {contentType}}

		return c.send(ctx, o, method, path, header, body)
	}
}

// send sends a request, and reads the answer to its end.
func (c *chain) send(ctx context.Context, o *outcome, method, path string, header http.Header, body []byte) error {
	if err := c.ask(ctx, o, method, path, header, body); err != nil {
		return err
	}
	defer func() { _ = o.response.Body.Close() }()

	var err error
	if o.body, err = io.ReadAll(o.response.Body); err != nil {
		return err
	}
	c.completed(o)

	return nil
}

// ask sends a request, and returns with the header of the answer.
func (c *chain) ask(ctx context.Context, o *outcome, method, path string, header http.Header, body []byte) error {
	o.method, o.path, o.header, o.sent = method, path, header, body
	req, err := http.NewRequestWithContext(ctx, method, c.URL+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if header != nil {
		req.Header = header.Clone()
	}
	o.response, err = c.client.Do(req) //nolint:bodyclose // Whoever asks reads and closes it.

	return err
}

// listen tells the backend of each event, so that it goes on: an event that were held back would end in a deadline.
func listen(ctx context.Context, c *chain, o *outcome) error {
	if err := c.ask(ctx, o, http.MethodGet, "/events", http.Header{"Accept": {"text/event-stream"}}, nil); err != nil {
		return err
	}
	defer func() { _ = o.response.Body.Close() }()

	var got bytes.Buffer
	defer func() { o.body = got.Bytes() }()
	lines := bufio.NewScanner(io.TeeReader(o.response.Body, &got))
	for lines.Scan() {
		if !strings.HasPrefix(lines.Text(), "data: ") {
			continue
		}
		o.onTheWay = append(o.onTheWay, time.Since(c.backend.done().sent))
		if len(o.onTheWay) == len(events) {
			c.completed(o)
		}
		select {
		case c.backend.seen <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}

	return lines.Err()
}

// chat says something to a WebSocket, hears the echo and closes.
func chat(ctx context.Context, c *chain, o *outcome) error {
	o.method, o.path, o.header = http.MethodGet, "/chat", http.Header{"Upgrade": {"websocket"}}
	conn, response, err := websocket.Dial(ctx, c.URL+o.path, &websocket.DialOptions{HTTPClient: c.client}) //nolint:bodyclose // It is the connection.
	if err != nil {
		return err
	}
	o.response = response
	defer func() { _ = conn.CloseNow() }()

	o.said = "is it tea time?"
	if err := conn.Write(ctx, websocket.MessageText, []byte(o.said)); err != nil {
		return err
	}
	_, echo, err := conn.Read(ctx)
	if err != nil {
		return err
	}
	o.heard = string(echo)
	c.completed(o)

	return conn.Close(websocket.StatusNormalClosure, "")
}

// sales returns so many bytes of text.
func sales(size int) []byte {
	var text bytes.Buffer
	for line := 1; text.Len() < size; line++ {
		_, _ = fmt.Fprintf(&text, "%d,teapot,18\n", line)
	}

	return text.Bytes()[:size]
}
