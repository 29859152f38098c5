// Package tap is a Traefik middleware plugin that copies every request and response which passes a router into JSON records,
// and delivers them to an endpoint.
package tap

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	defaultMaxRecordBodySize = 64 << 10
	defaultTimeout           = 10 * time.Second
	defaultInterval          = 100 * time.Millisecond
)

// defaultRedactHeaders are the headers that carry credentials: RFC 9110, sections 11.6.2 and 11.7.2, and RFC 6265.
const defaultRedactHeaders = "Authorization,Proxy-Authorization,Cookie,Set-Cookie"

// Config is what the user writes under `plugin.tap`. At least one of Request, Response and Exchange is set.
type Config struct {
	// RedactHeaders names the headers whose values are not recorded, in any letter case. Default Authorization,
	// Proxy-Authorization, Cookie and Set-Cookie; an empty list records all values.
	RedactHeaders []string `json:"redactHeaders,omitempty"`
	// Request records requests. Nil: no such records.
	Request *RecordConfig `json:"request,omitempty"`
	// Response records responses. Nil: no such records.
	Response *RecordConfig `json:"response,omitempty"`
	// Exchange records requests together with their responses, in one record. Nil: no such records.
	Exchange *RecordConfig `json:"exchange,omitempty"`
	// MetricsPath is a path on which the middleware itself answers, with its counters in the text format of Prometheus: for a router of
	// its own. Default "": none.
	MetricsPath string `json:"metricsPath,omitempty"`
	// Unknown collects the options that do not exist. New refuses them.
	Unknown map[string]interface{} `json:"-" mapstructure:",remain"`
}

// RecordConfig is what the user writes about one kind of record.
type RecordConfig struct {
	// Service is the http or https URL of the endpoint, or several that are tried in turn: the one that worked last first. A URL may have
	// a path, which Path follows, and credentials for Basic authentication. Required.
	Service []string `json:"service,omitempty"`
	// Path is where records are POSTed. It may carry a query string; a missing slash in front is added. Default: the path of
	// Service, or "/".
	Path string `json:"path,omitempty"`
	// Headers are sent with every POST. A value that starts with file: is read from that file.
	Headers map[string]string `json:"headers,omitempty"`
	// Timeout bounds the whole delivery of one record, with all that is tried for it. A Go duration, or a number of seconds; default 10s, 0: no limit.
	Timeout string `json:"timeout,omitempty"`
	// Retry tries a record again. Nil: once.
	Retry *RetryConfig `json:"retry,omitempty"`
	// TLS is for https URLs. Nil: the certificate authorities of the system.
	TLS *TLSConfig `json:"tls,omitempty"`
	// MaxBatchSize is how many records go in one POST, one a line, when they come faster than POSTs are answered. Default 1.
	MaxBatchSize *int `json:"maxBatchSize,omitempty"`
	// MaxPending is how many records may wait for delivery without their request waiting for them; one more is dropped. Default 0: the
	// request waits. An error together with RejectOnRecordError.
	MaxPending *int `json:"maxPending,omitempty"`
	// RecordBody puts bodies into the records. Default false.
	RecordBody bool `json:"recordBody,omitempty"`
	// MaxRecordBodySize is how many bytes of a body are recorded. Default 65536; 0: none, -1: no limit.
	MaxRecordBodySize *int64 `json:"maxRecordBodySize,omitempty"`
	// MaxBodySize is how many bytes of a body are held in memory. Default -1: no limit. Records are cut there; but where
	// RejectOnRecordError is set and MaxRecordBodySize is -1, larger requests get 413 and larger responses are replaced by 500.
	MaxBodySize *int64 `json:"maxBodySize,omitempty"`
	// RejectOnRecordError serves nothing whose record was not accepted: the client gets 500 instead. Default false.
	RejectOnRecordError bool `json:"rejectOnRecordError,omitempty"`
	// RequestHeaders adds the request line and these headers of the request to response records. Only under Response.
	RequestHeaders []string `json:"requestHeaders,omitempty"`
	// Unknown collects the options that do not exist. New refuses them.
	Unknown map[string]interface{} `json:"-" mapstructure:",remain"`
}

// RetryConfig is what the user writes about trying again: after network errors and the statuses 408, 425, 429 and 5xx.
type RetryConfig struct {
	// Attempts is how often a record is tried, the first time included. Default 1.
	Attempts *int `json:"attempts,omitempty"`
	// InitialInterval is about the pause before the second time; it doubles from then on, up to 30s. A Go duration, or a number of seconds;
	// default 100ms. A Retry-After of the endpoint is honoured. All ends at the timeout.
	InitialInterval string `json:"initialInterval,omitempty"`
	// Unknown collects the options that do not exist. New refuses them.
	Unknown map[string]interface{} `json:"-" mapstructure:",remain"`
}

// TLSConfig is what the user writes about TLS, under Traefik's own names. Certificates and keys are PEM text or names of files.
type TLSConfig struct {
	// RootCAs are the certificate authorities that are trusted. Empty: those of the system.
	RootCAs []string `json:"rootCAs,omitempty"`
	// Cert and Key are the client certificate. Empty: none.
	Cert string `json:"cert,omitempty"`
	Key  string `json:"key,omitempty"`
	// ServerName is the name in the endpoint's certificate. Empty: the host of the URL.
	ServerName string `json:"serverName,omitempty"`
	// InsecureSkipVerify trusts any certificate. Default false.
	InsecureSkipVerify bool `json:"insecureSkipVerify,omitempty"`
	// Unknown collects the options that do not exist. New refuses them.
	Unknown map[string]interface{} `json:"-" mapstructure:",remain"`
}

// CreateConfig returns an empty Config. Defaults are applied by New: the decoder would merge the user's lists into them.
func CreateConfig() *Config {
	return &Config{}
}

// New returns the middleware. It neither dials nor blocks, and what it takes of the process is given back when ctx is done.
// The error names the option that is wrong as the user typed it.
func New(ctx context.Context, next http.Handler, config *Config, name string) (http.Handler, error) {
	h := &handler{
		next:   next,
		redact: newRedaction(config.RedactHeaders),
	}
	h.seeksSpans.Store(true)
	if config.RedactHeaders == nil {
		h.redact = newRedaction(strings.Split(defaultRedactHeaders, ","))
	}

	if err := refuseUnknown("", config.Unknown); err != nil {
		return nil, err
	}
	if config.Request == nil && config.Response == nil && config.Exchange == nil {
		return nil, errors.New("one of request, response and exchange is needed: nothing would be recorded")
	}

	var err error
	if h.request, err = newKind(kindRequest, config.Request); err != nil {
		return nil, err
	}
	if h.response, err = newKind(kindResponse, config.Response); err != nil {
		return nil, err
	}
	if h.exchange, err = newKind(kindExchange, config.Exchange); err != nil {
		return nil, err
	}
	decide(h)

	// Only now that nothing can fail any more: an endpoint is held until ctx is done.
	for _, k := range []*kind{h.request, h.response, h.exchange} {
		if k != nil {
			k.source = newSource(name, k.name, acquireEndpoint(ctx, k.settings))
		}
	}

	if path := strings.TrimSpace(config.MetricsPath); path != "" {
		return &metricsHandler{next: h, path: "/" + strings.TrimPrefix(path, "/")}, nil
	}

	return h, nil
}

// kind is one kind of record, as configured.
type kind struct {
	name     string
	settings endpointSettings
	source   *source
	// limit is how many bytes of a body are recorded; 0 when bodies are not.
	limit int64
	// max is how many bytes a body may have. With more it is refused.
	max    int64
	reject bool
	// pends says that the handler never waits for a record.
	pends bool
	// describes says that the request stands in the record, responds that the response does, and completes that one of them is not the
	// same as in all records of the exchange.
	describes, responds, completes bool
	// gathers says that records go together with others.
	gathers        bool
	requestHeaders []string
}

// newKind returns nil where the user wrote nothing about a kind.
func newKind(name string, config *RecordConfig) (*kind, error) {
	if config == nil {
		return nil, nil //nolint:nilnil // No such records is no error.
	}

	if err := refuseUnknown(name+".", config.Unknown); err != nil {
		return nil, err
	}
	if len(config.RequestHeaders) > 0 && name != kindResponse {
		return nil, fmt.Errorf("%s.requestHeaders: only response records take it, the others have all headers of the request", name)
	}
	settings, err := parseSettings(name, config)
	if err != nil {
		return nil, err
	}
	recordSize, err := parseSize(name+".maxRecordBodySize", config.MaxRecordBodySize, defaultMaxRecordBodySize)
	if err != nil {
		return nil, err
	}
	bodySize, err := parseSize(name+".maxBodySize", config.MaxBodySize, unlimited)
	if err != nil {
		return nil, err
	}

	k := &kind{
		name:           name,
		settings:       settings,
		max:            unlimited,
		reject:         config.RejectOnRecordError,
		pends:          settings.maxPending > 0,
		requestHeaders: canonical(config.RequestHeaders),
	}
	if config.RecordBody {
		k.limit = recordSize
		if bodySize < k.limit {
			k.limit = bodySize
		}
		if k.reject && recordSize == unlimited {
			k.max = bodySize
		}
	}
	k.describes = name != kindResponse || len(k.requestHeaders) > 0
	k.responds = name != kindRequest
	k.completes = k.limit > 0 || len(k.requestHeaders) > 0
	k.gathers = settings.maxBatch > 1

	return k, nil
}

// canonical returns header names as they stand in an http.Header.
func canonical(names []string) []string {
	var all []string
	for _, name := range names {
		if name = strings.TrimSpace(name); name != "" {
			all = append(all, http.CanonicalHeaderKey(name))
		}
	}

	return all
}

// handler is the middleware.
type handler struct {
	next   http.Handler
	redact *redaction

	// A kind is nil when it is not recorded.
	request, response, exchange *kind

	// What follows is derived from the kinds, so that no request has to.

	// describesRequest says that a record has something of the request.
	describesRequest bool
	// requestRoom and responseRoom are how many bytes of a body are copied, for the kind that wants most.
	requestRoom, responseRoom int64
	// copiesBody says that request bodies are copied or read ahead.
	copiesBody bool
	// Request records are sent before the backend is called, or while it works: at once, or when they have the body.
	before, atOnce, afterBody *kind
	// waits says that records may be delivered in goroutines, for which the handler waits.
	waits bool
	// requestMax is how many bytes a request body may have.
	requestMax int64
	// readAhead is how many bytes of a request body are read before the handler is called; -1: none.
	readAhead int64
	// admits says that a request may be refused before the handler is called.
	admits bool
	// holds says that responses are held until their record is accepted: for at most holdLimit bytes of the body, which may
	// have holdMax.
	holds              bool
	holdLimit, holdMax int64
	// first and second are the kinds of record without which a held response is not served. Second is nil when there is one alone.
	first, second *kind
	// holdsAll says that no record is left to be delivered of a response that was held and released.
	holdsAll bool
	// unseen says that no record has anything of the response.
	unseen bool
	// last is the kind of record that is delivered when the response has ended, where it is the only one and nothing is held.
	last *kind

	// early says that a record may be sent before the client has the response.
	early bool

	// seeksSpans says that requests may have a span of Traefik's tracing.
	seeksSpans atomic.Bool

	mu sync.Mutex
	// ids are hex digits for the next exchanges.
	ids string
	// tracing says that a request with a span has been seen. Until then spanless counts those without.
	tracing  bool
	spanless int
}

// decide derives what the kinds mean for every exchange.
func decide(h *handler) {
	h.requestMax, h.holdMax, h.readAhead = unlimited, unlimited, -1

	if k := h.request; k != nil {
		h.describesRequest = true
		h.requestRoom = k.limit
		if k.reject {
			h.admits = true
			h.requestMax = k.max
			if k.limit > 0 || k.max < unlimited {
				h.readAhead = k.limit
			}
		}
	}
	if k := h.response; k != nil {
		h.describesRequest = h.describesRequest || len(k.requestHeaders) > 0
		decideHold(h, k)
	}
	if k := h.exchange; k != nil {
		h.describesRequest = true
		h.requestRoom = larger(h.requestRoom, k.limit)
		if k.max < unlimited {
			// A body that must be recorded whole or not served is read to its end before the backend gets any of it.
			h.admits = true
			h.readAhead = larger(h.readAhead, k.max)
			h.requestMax = smaller(h.requestMax, k.max)
		}
		decideHold(h, k)
	}

	switch k := h.request; {
	case k == nil:
	case k.reject:
		h.before = k
	case k.limit == 0:
		h.atOnce = k
	default:
		h.afterBody = k
	}
	h.waits = h.atOnce != nil || h.afterBody != nil || h.response != nil && h.exchange != nil
	h.copiesBody = h.requestRoom > 0 || h.readAhead >= 0
	h.holdsAll = h.holds && (h.response == nil || h.response.reject) && (h.exchange == nil || h.exchange.reject)
	h.unseen = h.response == nil && h.exchange == nil
	h.early = h.request != nil || h.holds
	if !h.holds && h.exchange == nil {
		h.last = h.response
	} else if !h.holds && h.response == nil {
		h.last = h.exchange
	}
}

func decideHold(h *handler, k *kind) {
	h.responseRoom = larger(h.responseRoom, k.limit)
	if k.reject {
		h.holds = true
		h.holdLimit = larger(h.holdLimit, k.limit)
		h.holdMax = smaller(h.holdMax, k.max)
		if h.first == nil {
			h.first = k
		} else {
			h.second = k
		}
	}
}

func larger(a, b int64) int64 {
	if a > b {
		return a
	}

	return b
}

func smaller(a, b int64) int64 {
	if a < b {
		return a
	}

	return b
}

// exchange is one request and its response on their way through the middleware.
type exchange struct {
	handler  *handler
	id       string
	received time.Time
	traceID  string
	// request is nil when no record has anything of it. Its headers are the real ones until the exchange is prepared.
	request *Request
	// body is nil when the request has none, or none of it is recorded.
	body   *requestBody
	writer *responseWriter
	// held is nil unless the response is held back.
	held *heldWriter
	// headers are the response's, as they are recorded.
	headers http.Header

	// returned says that the handler has returned, rather than panicked.
	returned bool
	// aborted says that the response ended early, because the handler panicked.
	aborted bool
	// asked says that the endpoint was asked whether a held response may be served: its records are delivered. Recorded says that there
	// are no others of the response.
	asked, recorded bool
	// sending counts the records that are being delivered in goroutines of their own.
	sending sync.WaitGroup
}

// ServeHTTP implements http.Handler.
//
// What only some exchanges need stands in functions of its own, here and in what is called from here: the interpreter pays for
// every expression of a function that is called, whether it is reached or not, and for local variables and results. So what is found
// out goes into the fields of the exchange at once.
func (h *handler) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	x := &exchange{handler: h, received: now().UTC()}
	if h.seeksSpans.Load() || req.Header["Traceparent"] != nil {
		findTrace(x, req)
	}
	if h.describesRequest {
		x.request = describeRequest(req)
	}
	if h.early {
		prepare(x)
	}
	if h.copiesBody {
		req = copyBody(x, req)
	}

	if h.admits {
		if !admit(x, rw, req) {
			return
		}
	}
	if h.atOnce != nil {
		sendApart(x, h.atOnce)
	}

	if h.unseen {
		serveUnseen(x, rw, req)

		return
	}

	x.writer = &responseWriter{ResponseWriter: rw, handlesWrites: true, flushBelow: bufferSize}
	if h.responseRoom > 0 || rw.Header()["Vary"] != nil {
		prepareWriter(x.writer, h.responseRoom, req)
	}
	if h.holds {
		serveHeld(x, req)

		return
	}
	defer conclude(x)
	h.next.ServeHTTP(x.writer, req)
	x.returned = true
}

// prepare does what no record goes without, and no response waits for: it gives the exchange its id, and redacts its request.
func prepare(x *exchange) {
	h := x.handler
	h.mu.Lock()
	if h.ids == "" {
		makeIDs(h)
	}
	x.id = h.ids[:idLength]
	h.ids = h.ids[idLength:]
	h.mu.Unlock()
	if h.describesRequest {
		redact(x.request.Headers, h.redact)
	}
}

// serveUnseen lets the handler write its response itself: nothing is recorded of it.
func serveUnseen(x *exchange, rw http.ResponseWriter, req *http.Request) {
	defer concludeUnseen(x)
	x.handler.next.ServeHTTP(rw, req)
	x.returned = true
}

// concludeUnseen is conclude where the response is not seen. A panic goes on at once.
func concludeUnseen(x *exchange) {
	if x.body != nil {
		endBody(x)
	}
	if x.returned && x.handler.waits {
		x.sending.Wait()
	}
}

// serveHeld lets the handler serve a response that is held back until its records are accepted.
func serveHeld(x *exchange, req *http.Request) {
	x.writer.bodiless = req.Method == http.MethodHead
	holdBack(x)
	defer concludeHeld(x)
	x.handler.next.ServeHTTP(x.held, req)
	x.returned = true
}

// holdBack is no part of serveHeld, since its closure is called from a deferred function: that locks the frame of what has deferred it, and
// a closure that frame in which it was made.
func holdBack(x *exchange) {
	x.held = &heldWriter{
		ResponseWriter: x.writer.ResponseWriter,
		w:              x.writer,
		limit:          x.handler.holdLimit,
		max:            x.handler.holdMax,
		accept:         func() bool { return acceptResponse(x) },
		before:         x.writer.ResponseWriter.Header().Clone(),
	}
}

// conclude ends an exchange whose handler has returned or panicked: the client gets what is left of the response, and the endpoint the
// records that are left. It is deferred: its argument is a pointer that does not change, since the interpreter looks at it only now.
func conclude(x *exchange) {
	if !x.returned {
		abandon(x)

		return
	}

	h := x.handler
	if !x.writer.flushed {
		endResponse(x.writer)
	}
	if x.body != nil {
		endBody(x)
	}
	if !h.early {
		prepare(x)
	}

	if h.last != nil {
		x.headers = x.writer.header
		redact(x.headers, h.redact)
		deliver(x, h.last)
	} else if !x.recorded {
		deliverRest(x)
	}
	if h.waits {
		x.sending.Wait()
	}
}

// concludeHeld is conclude where the response was held.
func concludeHeld(x *exchange) {
	if !x.returned && x.held.refused {
		// The proxy gives up in this way when it cannot write on. The client has its answer, and its connection stays usable.
		_ = recover() //nolint:forbidigo // Nothing is served any more, and nothing panics again.
		x.returned = true
	}
	if x.returned && !x.held.passes {
		endHold(x.held)
	}
	x.recorded = x.asked && x.handler.holdsAll
	conclude(x)
}

// copyBody returns the request with a copying body, unless it has none. It is another request: net/http looks at the body of its own to
// decide what becomes of the connection.
func copyBody(x *exchange, req *http.Request) *http.Request {
	h := x.handler
	if req.ContentLength == 0 || req.Body == nil || req.Body == http.NoBody {
		if h.afterBody != nil {
			sendApart(x, h.afterBody)
		}

		return req
	}

	x.body = newRequestBody(req.Body, req.ContentLength, h.requestRoom)
	if h.afterBody != nil {
		x.body.recordable = h.afterBody.limit
		x.body.recorded = func() { sendApart(x, h.afterBody) }
	}
	req = req.WithContext(req.Context())
	req.Body = x.body

	return req
}

// admit decides whether a request may go on, and answers it where it may not: nothing that must be recorded whole is larger
// than what is recorded, and nothing that must be recorded goes on before its record is accepted.
func admit(x *exchange, rw http.ResponseWriter, req *http.Request) bool {
	h := x.handler
	if h.readAhead >= 0 {
		if status := admitBody(x, req); status != 0 {
			return refuseRequest(x, rw, status)
		}
	}
	if h.before != nil && deliver(x, h.before).err != nil {
		return refuseRequest(x, rw, http.StatusInternalServerError)
	}

	return true
}

// refuseRequest answers in place of the backend.
func refuseRequest(x *exchange, rw http.ResponseWriter, status int) bool {
	serveError(rw, status)
	// Of a kind that records the request whatever becomes of it.
	x.sending.Wait()

	return false
}

// admitBody reads of a body what is needed before the request may go on. It returns the status of the answer to one that is too large, or
// cannot be read; 0 for any other.
func admitBody(x *exchange, req *http.Request) int {
	if req.ContentLength > x.handler.requestMax {
		return http.StatusRequestEntityTooLarge
	}
	if x.body == nil {
		return 0
	}

	return readBodyAhead(x, req)
}

// readBodyAhead returns the status of the answer to a body that cannot be read, or is too large; 0 for any other.
func readBodyAhead(x *exchange, req *http.Request) int {
	if err := readAhead(x.body, x.handler.readAhead); err != nil {
		return http.StatusBadRequest
	}
	if x.body.read > x.handler.requestMax {
		return http.StatusRequestEntityTooLarge
	}
	// Not the reader that it had.
	req.Body = x.body
	// Reading has answered it.
	req.Header.Del("Expect")

	return 0
}

// sendApart delivers a record in a goroutine of its own; conclude waits for it.
func sendApart(x *exchange, k *kind) {
	if k.pends {
		deliver(x, k)

		return
	}
	x.sending.Add(1)
	go deliverApart(x, k)
}

func deliverApart(x *exchange, k *kind) {
	deliver(x, k)
	x.sending.Done()
}

// acceptResponse delivers the records without which a response must not be served.
func acceptResponse(x *exchange) bool {
	h := x.handler
	x.asked = true
	// The client gets the real values: these are of a copy.
	x.headers = x.writer.header
	redact(x.headers, h.redact)

	return deliver(x, h.first).err == nil && (h.second == nil || deliver(x, h.second).err == nil)
}

// abandon leaves the records of an aborted response to a goroutine, since the panic must go on at once. The response is left as it is.
func abandon(x *exchange) {
	x.aborted = true
	if x.writer.status == 0 {
		settle(x.writer)
	}
	x.writer.flushed = true
	x.returned = true
	go conclude(x)
}

// endBody ends the copying of the request's body. The record that waits for the body is sent as it is.
func endBody(x *exchange) {
	if freeze(x.body) {
		sendApart(x, x.handler.afterBody)
	}
}

// deliverRest delivers what is not one record alone: a response record and an exchange record at the same time, without those for which the
// endpoint has been asked while the response was held.
func deliverRest(x *exchange) {
	x.headers = x.writer.header
	redact(x.headers, x.handler.redact)

	response, exchange := undelivered(x, x.handler.response), undelivered(x, x.handler.exchange)
	if response != nil && exchange != nil {
		sendApart(x, response)
	} else if response != nil {
		deliver(x, response)
	}
	if exchange != nil {
		deliver(x, exchange)
	}
}

// undelivered returns nil for a kind whose record has been delivered before the response was released, or is not to be. What
// becomes of the record of an upgrade or of an aborted response refuses nothing.
func undelivered(x *exchange, k *kind) *kind {
	if k == nil || !k.reject {
		return k
	}
	if x.asked || x.held.refused {
		return nil
	}
	open := *k
	open.reject = false

	return &open
}

// deliver builds a record and sends it. The error of the delivery is to be looked at only where the kind rejects: a record that is pending is
// another goroutine's by then.
func deliver(x *exchange, k *kind) *delivery {
	record := &Record{ID: x.id, Kind: k.name, Time: x.received, TraceID: x.traceID}
	if k.describes {
		record.Request = x.request
	}
	if k.responds {
		record.Response = &Response{Status: x.writer.status, Headers: x.headers, Duration: since(x.received), Aborted: x.aborted}
	}
	if k.completes {
		complete(record, x, k)
	}

	d := &delivery{source: k.source, id: x.id, payload: encode(record), rejects: k.reject}
	switch {
	case k.pends:
		handOver(d)
	case k.gathers:
		commit(d)
	default:
		send(d)
	}

	return d
}

// complete adds to a record what is not the same in all records of an exchange: bodies, and the request of a response record.
func complete(record *Record, x *exchange, k *kind) {
	if k.describes {
		record.Request = requestPart(x, k)
	}
	if k.responds && k.limit > 0 {
		record.Response.Body, record.Response.BodyTruncated = bodyWritten(x.writer, k.limit)
	}
}

// requestPart returns what a record says of the request where that is not all of it but the body.
func requestPart(x *exchange, k *kind) *Request {
	if k.name == kindResponse {
		return requestLine(x.request, k.requestHeaders)
	}

	request := *x.request
	if x.body != nil {
		request.Body, request.BodyTruncated = bodyRead(x.body, k.limit)
	}

	return &request
}

// These are variables so that tests can fix the times and the id of a record.
var (
	now    = time.Now
	since  = time.Since
	newIDs = randomIDs
)

const (
	// idLength is the number of hex digits of an id, which stand for 16 random bytes.
	idLength = 32
	// idsAtOnce is how many ids are made at a time: a call for each would cost more than all the rest of making it.
	idsAtOnce = 64
)

func makeIDs(h *handler) {
	h.ids = newIDs()
}

// randomIDs returns several ids, one after the other.
func randomIDs() string {
	b := make([]byte, idsAtOnce*idLength/2)
	_, _ = rand.Read(b) // Fails only on a system without randomness, where nothing else of net/http works either.

	return hex.EncodeToString(b)
}
