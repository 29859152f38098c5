// Package cost has what the benchmarks and the allocation guards of the compiled plugin share with those of the interpreted one:
// an exchange that happens without a network, and a plugin that delivers nothing.
package cost

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Limit is the limit of the bodies in the records of Settings in bytes: the default of the plugin.
const Limit = 64 << 10

// Size is a size of the bodies of an exchange.
type Size struct {
	// Name is how the size is called in the name of a benchmark.
	Name string
	// Bytes is the size in bytes, the same for the request and the response.
	Bytes int
}

// Sizes are those that records are measured with: without a body, small, at the limit, and far above it.
func Sizes() []Size {
	return []Size{{"0", 0}, {"2kB", 2 << 10}, {"64kB", Limit}, {"1MB", 1 << 20}}
}

// Kinds are the kinds of record, alone and in the combination that the native tap has.
func Kinds() []string {
	return []string{"request", "response", "exchange", "request+response"}
}

// Settings returns the settings of a tap that records the given kinds at an endpoint, "+" between them. The options are added to
// each kind; nil adds none.
func Settings(kinds, endpoint string, options map[string]any) map[string]any {
	all := map[string]any{}
	for _, kind := range strings.Split(kinds, "+") {
		settings := map[string]any{"service": []string{endpoint}, "path": "/records"}
		for name, value := range options {
			settings[name] = value
		}
		all[kind] = settings
	}

	return all
}

// RequestHeaders are those of a browser behind a Traefik.
func RequestHeaders() http.Header {
	return http.Header{
		"Accept":            {"application/json"},
		"Accept-Encoding":   {"gzip, deflate, br"},
		"Accept-Language":   {"en-GB,en;q=0.9"},
		"Cookie":            {"session=0123456789abcdef0123456789abcdef"},
		"Referer":           {"https://shop.example/basket"},
		"User-Agent":        {"Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"},
		"X-Forwarded-For":   {"192.0.2.1"},
		"X-Forwarded-Host":  {"shop.example"},
		"X-Forwarded-Proto": {"https"},
		"X-Real-Ip":         {"192.0.2.1"},
	}
}

// ResponseHeaders are those of a small service, apart from Content-Length.
func ResponseHeaders() http.Header {
	return http.Header{
		"Cache-Control": {"no-store"},
		"Content-Type":  {"application/json"},
		"Date":          {"Thu, 29 Feb 2024 21:59:59 GMT"},
		"Etag":          {`"0123456789abcdef"`},
		"Vary":          {"Origin"},
	}
}

// chunk is how much a reverse proxy reads and writes at once, in bytes.
const chunk = 32 << 10

// Exchange is a request and its response in memory, again and again. It allocates next to nothing itself, and is for one goroutine.
type Exchange struct {
	req    *http.Request
	body   body
	rw     writer
	reply  []byte
	header http.Header
	buffer []byte
}

// NewExchange returns an exchange whose request and response have bodies of this size in bytes each; 0: a GET without a body and a
// response with Content-Length: 0.
func NewExchange(size int) *Exchange {
	method := http.MethodPost
	if size == 0 {
		method = http.MethodGet
	}
	const uri = "/orders/1701?expand=items"
	// The URL is a valid one.
	req, _ := http.NewRequestWithContext(context.Background(), method, uri, http.NoBody)
	req.Host, req.RequestURI, req.RemoteAddr = "shop.example", uri, "192.0.2.1:49152"
	req.Header = RequestHeaders()
	req.ContentLength = int64(size)

	x := &Exchange{
		req:    req,
		body:   body{content: bytes.Repeat([]byte("0123456789abcdef"), size/16)},
		rw:     writer{header: http.Header{}},
		reply:  bytes.Repeat([]byte("fedcba9876543210"), size/16),
		header: ResponseHeaders(),
		buffer: make([]byte, chunk),
	}
	x.header.Set("Content-Length", strconv.Itoa(size))

	return x
}

// Happen lets the exchange happen once, through a handler in front of x. It returns an error when the client did not get all of the
// response, or the handler behind did not get all of the request.
func (x *Exchange) Happen(handler http.Handler) error {
	x.body.Reset(x.body.content)
	x.req.Body = http.NoBody
	if len(x.body.content) > 0 {
		x.req.Body = &x.body
	}
	clear(x.rw.header)
	x.rw.status, x.rw.written = 0, 0

	handler.ServeHTTP(&x.rw, x.req)

	if x.rw.status != http.StatusOK || x.rw.written != len(x.reply) || x.body.Len() > 0 {
		return fmt.Errorf("status %d with %d bytes, %d of the request left", x.rw.status, x.rw.written, x.body.Len())
	}

	return nil
}

// ServeHTTP implements http.Handler. It is the end of the chain: it reads the request and writes the response as a reverse proxy does.
func (x *Exchange) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	for err := error(nil); err == nil; {
		_, err = req.Body.Read(x.buffer)
	}

	header := rw.Header()
	for name, values := range x.header {
		header[name] = values
	}
	rw.WriteHeader(http.StatusOK)
	for rest := x.reply; len(rest) > 0; {
		part := rest[:min(chunk, len(rest))]
		_, _ = rw.Write(part)
		rest = rest[len(part):]
	}
}

// body is the body of a request, which can be read anew.
type body struct {
	bytes.Reader
	content []byte
}

// Close implements io.Closer.
func (*body) Close() error {
	return nil
}

// writer is a response writer that counts what it takes.
type writer struct {
	header  http.Header
	status  int
	written int
}

// Header implements http.ResponseWriter.
func (w *writer) Header() http.Header {
	return w.header
}

// WriteHeader implements http.ResponseWriter.
func (w *writer) WriteHeader(status int) {
	w.status = status
}

// Write implements http.ResponseWriter.
func (w *writer) Write(p []byte) (int, error) {
	w.written += len(p)

	return len(p), nil
}

// Flush implements http.Flusher.
func (*writer) Flush() {}

// CheckAllocations fails a test when what happens allocates more than it did once, with a little room: allocations repeat, but a
// garbage collection or another version of Go may cost a few. It also fails when there are so few that the guard guards nothing.
func CheckAllocations(tb testing.TB, before float64, happen func() error) {
	tb.Helper()

	room := 1.05
	if underRace() {
		// The race detector makes each sync.Pool lose some of what it is given.
		room = 1.15
	}
	now := testing.AllocsPerRun(200, func() {
		if err := happen(); err != nil {
			tb.Fatal(err)
		}
	})

	tb.Logf("%.0f allocations", now)
	if now > before*room {
		tb.Errorf("%.0f allocations for each exchange, which were %.0f", now, before)
	}
	if now < before/2 {
		tb.Errorf("%.0f allocations for each exchange, which were %.0f: renew the number, so that it guards something", now, before)
	}
}

func underRace() bool {
	info, _ := debug.ReadBuildInfo()

	return info != nil && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// sendSource is the line with which the plugin's function begins that every record goes through.
var sendSource = regexp.MustCompile(`(?m)^func send(\(.*\) \{)$`)

// StubDelivery returns the plugin's source with a function in the place of send that accepts every record and does nothing, so that
// all of the plugin runs but the delivery: file name and text. Root is the folder of the plugin. The error says that the file
// cannot be read, or that send is not in it.
func StubDelivery(root string) (name, text string, err error) {
	name = "endpoint.go"
	source, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		return "", "", err
	}
	if found := len(sendSource.FindAll(source, -1)); found != 1 {
		return "", "", fmt.Errorf("%s has %d functions send instead of one", name, found)
	}

	return name, sendSource.ReplaceAllString(string(source), "func send$1\n}\n\nfunc deliverForReal$1"), nil
}

// Interface guards.
var (
	_ http.Handler        = (*Exchange)(nil)
	_ http.ResponseWriter = (*writer)(nil)
	_ http.Flusher        = (*writer)(nil)
	_ io.ReadCloser       = (*body)(nil)
)
