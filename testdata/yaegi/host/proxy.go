package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"
)

const (
	// flushInterval is what Traefik sets for a service without responseForwarding.
	flushInterval = 100 * time.Millisecond
	// statusClientClosedRequest is what Traefik answers, to its own logs rather, when the client has gone away.
	statusClientClosedRequest = 499
)

// ReverseProxy passes requests on to one server in the way that Traefik's does.
type ReverseProxy struct {
	handler   http.Handler
	transport *transport
}

// Proxy returns a reverse proxy to target, a URL of scheme http, https or h2c (HTTP/2 without TLS) whose path is not
// used. It passes the Host header on, flushes every 100 ms, or at once where httputil.ReverseProxy knows a stream, and
// answers 502 when the server cannot be reached, 504 when it is too slow and 499 when the client went away. It has
// connections of its own. It returns an error if target is not such a URL.
func Proxy(target string) (*ReverseProxy, error) {
	return newProxy(target, newTransport())
}

func (p *ReverseProxy) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	p.handler.ServeHTTP(rw, req)
}

// CloseIdleConnections closes the connections to the server that no request uses. Connections in use are kept, and stay
// open for 90 s after their use.
func (p *ReverseProxy) CloseIdleConnections() {
	p.transport.CloseIdleConnections()
}

func newProxy(target string, transport *transport) (*ReverseProxy, error) {
	server, err := url.Parse(target)
	if err != nil {
		return nil, err
	}
	if server.Host == "" || (server.Scheme != "http" && server.Scheme != "https" && server.Scheme != "h2c") {
		return nil, fmt.Errorf("not a URL of scheme http, https or h2c with a host: %q", target)
	}

	return &ReverseProxy{transport: transport, handler: &httputil.ReverseProxy{
		Rewrite:       func(proxied *httputil.ProxyRequest) { rewrite(proxied, server) },
		Transport:     transport,
		FlushInterval: flushInterval,
		BufferPool:    &buffers,
		// Traefik logs these at DEBUG.
		ErrorLog:     log.New(io.Discard, "", 0),
		ErrorHandler: answerError,
	}}, nil
}

func rewrite(proxied *httputil.ProxyRequest, server *url.URL) {
	out := proxied.Out
	keepForwarded(proxied)

	out.URL.Scheme, out.URL.Host = server.Scheme, server.Host
	// A middleware that changes the path changes RequestURI too, so that is what counts, not the URL.
	asked := out.URL
	if parsed, err := url.ParseRequestURI(out.RequestURI); err == nil {
		asked = parsed
	}
	out.URL.Path, out.URL.RawPath, out.URL.Opaque = asked.Path, asked.RawPath, ""
	out.URL.RawQuery = strings.ReplaceAll(asked.RawQuery, ";", "&")
	out.RequestURI = ""

	// Traefik announces the names of request trailers, and never sends their values.
	for name := range out.Trailer {
		out.Trailer[name] = nil
	}

	out.Proto, out.ProtoMajor, out.ProtoMinor = "HTTP/1.1", 1, 1
	out.Close = out.Close || out.Method == http.MethodConnect

	if isUpgrade(out) && strings.EqualFold(out.Header.Get("Upgrade"), "websocket") {
		spellWebSocket(out.Header)
	}
}

// keepForwarded puts back the forwarding headers that a reverse proxy with Rewrite drops, and adds the client to them.
func keepForwarded(proxied *httputil.ProxyRequest) {
	header := proxied.Out.Header
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if values, ok := proxied.In.Header[name]; ok {
			header[name] = values
		}
	}

	client, _, err := net.SplitHostPort(proxied.In.RemoteAddr)
	before, present := header["X-Forwarded-For"]
	// By the rule of httputil.ReverseProxy, a nil list means that a handler wants no such header.
	if err != nil || (present && before == nil) {
		return
	}
	header.Set("X-Forwarded-For", strings.Join(append(before[:len(before):len(before)], client), ", "))
}

// spellWebSocket restores the spelling of RFC 6455, which some servers insist on.
func spellWebSocket(header http.Header) {
	for _, name := range []string{"Key", "Extensions", "Accept", "Protocol", "Version"} {
		if values, ok := header["Sec-Websocket-"+name]; ok {
			header["Sec-WebSocket-"+name] = values
			delete(header, "Sec-Websocket-"+name)
		}
	}
}

func isUpgrade(req *http.Request) bool {
	return httpguts.HeaderValuesContainsToken(req.Header["Connection"], "Upgrade")
}

func answerError(rw http.ResponseWriter, _ *http.Request, err error) {
	status := statusOf(err)
	text := http.StatusText(status)
	if status == statusClientClosedRequest {
		text = "Client Closed Request"
	}
	rw.WriteHeader(status)
	_, _ = io.WriteString(rw, text)
}

func statusOf(err error) int {
	var network net.Error
	switch {
	case errors.Is(err, io.EOF):
		return http.StatusBadGateway
	case errors.Is(err, context.Canceled):
		return statusClientClosedRequest
	case !errors.As(err, &network):
		return http.StatusInternalServerError
	case network.Timeout():
		return http.StatusGatewayTimeout
	default:
		return http.StatusBadGateway
	}
}

// transport keeps upgrades on HTTP/1.1, speaks HTTP/2 with https servers that offer it, and HTTP/2 without TLS where the
// scheme is h2c.
type transport struct {
	http1, http2, h2c *http.Transport
}

func newTransport() *transport {
	var upgrades, negotiated, unencrypted http.Protocols
	upgrades.SetHTTP1(true)
	negotiated.SetHTTP1(true)
	negotiated.SetHTTP2(true)
	unencrypted.SetUnencryptedHTTP2(true)
	return &transport{
		http1: newHTTPTransport(&upgrades),
		http2: newHTTPTransport(&negotiated),
		h2c:   newHTTPTransport(&unencrypted),
	}
}

// newHTTPTransport has the values of Traefik's default serversTransport.
func newHTTPTransport(protocols *http.Protocols) *http.Transport {
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		MaxIdleConnsPerHost:   200,
		IdleConnTimeout:       90 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ExpectContinueTimeout: time.Second,
		ReadBufferSize:        64 << 10,
		WriteBufferSize:       64 << 10,
		Protocols:             protocols,
	}
}

func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	unencrypted := req.URL.Scheme == "h2c"
	if unencrypted {
		// The reverse proxy has made this request for us alone, and net/http knows no such scheme.
		req.URL.Scheme = "http"
	}

	switch {
	case isUpgrade(req):
		return t.http1.RoundTrip(req)
	case unencrypted:
		return t.h2c.RoundTrip(req)
	default:
		return t.http2.RoundTrip(req)
	}
}

func (t *transport) CloseIdleConnections() {
	t.http1.CloseIdleConnections()
	t.http2.CloseIdleConnections()
	t.h2c.CloseIdleConnections()
}

// buffers are for copying responses, 32 KiB each.
var buffers = bufferPool{sync.Pool{New: func() any { return new([32 << 10]byte) }}}

type bufferPool struct {
	pool sync.Pool
}

func (b *bufferPool) Get() []byte {
	return b.pool.Get().(*[32 << 10]byte)[:]
}

func (b *bufferPool) Put(buffer []byte) {
	b.pool.Put((*[32 << 10]byte)(buffer))
}
