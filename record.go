package tap

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"time"
)

// The kinds of record, as they stand in Record.Kind and in the header X-Tap-Record.
const (
	kindRequest  = "request"
	kindResponse = "response"
	kindExchange = "exchange"
)

// redacted stands in a record for the value of a header that is listed in `redactHeaders`.
const redacted = "REDACTED"

// Record is what is delivered to an endpoint: one JSON object for a request, a response, or both.
type Record struct {
	// ID is 32 hex digits of 16 random bytes, the same in every record of one exchange.
	ID string `json:"id"`
	// Kind is request, response or exchange.
	Kind string `json:"kind"`
	// Time is when the request was received, in UTC, the same in every record of one exchange.
	Time time.Time `json:"time"`
	// TraceID is the id of the W3C trace that the request belongs to: Traefik's own where its tracing is on, else the client's.
	// Absent when there is none.
	TraceID string `json:"traceId,omitempty"`
	// Request is absent in response records, unless `requestHeaders` asks for it.
	Request *Request `json:"request,omitempty"`
	// Response is absent in request records.
	Response *Response `json:"response,omitempty"`
}

// Request is a request as it arrived at the middleware, before anything behind it has changed it.
type Request struct {
	Method string `json:"method"`
	// URL is the request URI as received, path and query, byte for byte.
	URL   string `json:"url"`
	Host  string `json:"host"`
	Proto string `json:"proto"`
	// RemoteAddr is the peer's address, verbatim. Absent in response records.
	RemoteAddr string      `json:"remoteAddr,omitempty"`
	Headers    http.Header `json:"headers,omitempty"`
	// Body is what the backend has read of the body, base64 in JSON. Absent when empty or not recorded.
	Body []byte `json:"body,omitempty"`
	// BodyTruncated says that the body was longer than Body: it was over the limit, or was not read to its end.
	BodyTruncated bool `json:"bodyTruncated,omitempty"`
}

// Response is a response as it was when its final status was written.
type Response struct {
	Status  int         `json:"status"`
	Headers http.Header `json:"headers,omitempty"`
	// Body is what was written of the body, base64 in JSON. Absent when empty or not recorded.
	Body []byte `json:"body,omitempty"`
	// BodyTruncated says that the body was longer than Body.
	BodyTruncated bool `json:"bodyTruncated,omitempty"`
	// Duration is the time from the request's reception to the end of the response in nanoseconds; with
	// `rejectOnRecordError`, to the moment its record was complete.
	Duration time.Duration `json:"duration"`
	// Aborted says that the response ended early, because whatever made it gave up.
	Aborted bool `json:"aborted,omitempty"`
}

// describeRequest returns all of a request but its body. Its headers are a copy, and not redacted yet.
func describeRequest(req *http.Request) *Request {
	return &Request{
		Method:     req.Method,
		URL:        req.RequestURI,
		Host:       req.Host,
		Proto:      req.Proto,
		RemoteAddr: req.RemoteAddr,
		Headers:    req.Header.Clone(),
	}
}

// requestLine returns the request object of a response record: the request line and those of its headers that are named.
func requestLine(request *Request, names []string) *Request {
	headers := http.Header{}
	for _, name := range names {
		if values := request.Headers[name]; values != nil {
			headers[name] = values
		}
	}

	return &Request{
		Method:  request.Method,
		URL:     request.URL,
		Host:    request.Host,
		Proto:   request.Proto,
		Headers: headers,
	}
}

// redaction is which header values are not recorded.
type redaction struct {
	// names are the names of the headers in canonical form.
	names map[string]bool
	// lengths are those of the names, and ends their last letters in both cases. A header that differs in either is passed over without
	// a call.
	lengths map[int]bool
	ends    map[byte]bool
}

func newRedaction(names []string) *redaction {
	r := &redaction{names: map[string]bool{}, lengths: map[int]bool{}, ends: map[byte]bool{}}
	for _, name := range canonical(names) {
		r.names[name] = true
		r.lengths[len(name)] = true
		end := name[len(name)-1]
		r.ends[end] = true
		// The same letter in the other case, in ASCII.
		r.ends[end^0x20] = true
	}

	return r
}

// redact takes values out of headers, which it changes. Their number stays.
//
// Names from the network are canonical, but a middleware may have written any spelling into the map, so all are looked at.
func redact(headers http.Header, r *redaction) {
	for name := range headers {
		if r.lengths[len(name)] && r.ends[name[len(name)-1]] {
			redactHeader(headers, name, r)
		}
	}
}

func redactHeader(headers http.Header, name string, r *redaction) {
	if r.names[http.CanonicalHeaderKey(name)] {
		// One call, where a loop would cost its every step.
		headers[name] = strings.Fields(strings.Repeat(redacted+" ", len(headers[name])))
	}
}

// encode returns the JSON of a record. Nothing in a record can make it fail: invalid UTF-8 becomes U+FFFD.
func encode(record *Record) []byte {
	payload, _ := json.Marshal(record)
	// A trailer may stand among the headers before the status is written. One search of the whole costs less than a look at every name.
	if bytes.Contains(payload, trailerKey) {
		return encodeWithoutTrailers(record)
	}

	return payload
}

// trailerKey is how a header name that starts with http.TrailerPrefix begins in JSON.
var trailerKey = []byte(`"` + http.TrailerPrefix)

func encodeWithoutTrailers(record *Record) []byte {
	if record.Response != nil {
		headers := http.Header{}
		for name, values := range record.Response.Headers {
			if !strings.HasPrefix(name, http.TrailerPrefix) {
				headers[name] = values
			}
		}
		record.Response.Headers = headers
	}
	payload, _ := json.Marshal(record)

	return payload
}
