package tap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"regexp"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxIdleConnections is how many connections to an endpoint are kept between records, so that as many
	// requests at a time do not dial anew.
	maxIdleConnections = 512
	// idleTimeout is how long a connection is kept. Node.js and Apache httpd close theirs after 5 s, most others later.
	idleTimeout = 4 * time.Second
	// maxAnswer is how many bytes of an answer are read, so that its connection can be used again. A longer answer costs its connection.
	maxAnswer = 64 << 10
	// logInterval is the least time between two lines in the log about one endpoint.
	logInterval = time.Second
)

// endpointSettings is all that makes one endpoint differ from another.
type endpointSettings struct {
	url     string
	headers http.Header
	timeout time.Duration
}

// headerName and headerValue are what may stand in an HTTP header: RFC 9110, sections 5.1 and 5.5.
var (
	headerName  = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")
	headerValue = regexp.MustCompile(`^[^\x00-\x08\x0a-\x1f\x7f]*$`)
)

// ownHeaders are set by the tap on every record.
var ownHeaders = []string{"Content-Type", "Content-Length", "Idempotency-Key", "Transfer-Encoding", "X-Tap-Id", "X-Tap-Record"}

// parseSettings reads what a kind of record says about its endpoint. Errors name the option, and nothing secret.
func parseSettings(name string, config *RecordConfig) (endpointSettings, error) {
	settings := endpointSettings{headers: http.Header{}}

	if len(config.Service) == 0 {
		return settings, fmt.Errorf("%s.service: the URL of the endpoint is missing", name)
	}
	if len(config.Service) > 1 {
		return settings, fmt.Errorf("%s.service: only one URL is supported", name)
	}
	target, err := parseURL(name, strings.TrimSpace(config.Service[0]), strings.TrimSpace(config.Path))
	if err != nil {
		return settings, err
	}
	for header, value := range config.Headers {
		if err := checkHeader(name+".headers", header, value); err != nil {
			return settings, err
		}
		settings.headers.Set(header, value)
	}
	if user := target.User; user != nil {
		password, _ := user.Password()
		basic := &http.Request{Header: settings.headers}
		basic.SetBasicAuth(user.Username(), password)
		target.User = nil
	}
	settings.url = target.String()
	settings.timeout, err = parseDuration(name+".timeout", config.Timeout, defaultTimeout)

	return settings, err
}

// parseURL returns the URL that records are POSTed to. What it says of a wrong one must not repeat it: there may be a password in it.
func parseURL(name, service, path string) (*url.URL, error) {
	base, err := url.Parse(service)
	if err != nil || base.Scheme != "http" && base.Scheme != "https" || base.Hostname() == "" {
		return nil, fmt.Errorf("%s.service: not an http or https URL with a host", name)
	}
	if base.RawQuery != "" || base.ForceQuery || base.Fragment != "" {
		return nil, fmt.Errorf("%s.service: a query string belongs into %s.path, and a fragment nowhere", name, name)
	}

	if path == "" {
		if base.Path == "" {
			base.Path = "/"
		}

		return base, nil
	}
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	// Joined as text: the query string, and what is escaped on either side, stay as they are.
	target, err := url.Parse(strings.TrimSuffix(service, "/") + path)
	if err != nil || target.Fragment != "" {
		return nil, fmt.Errorf("%s.path: not a path with an optional query string", name)
	}

	return target, nil
}

func checkHeader(option, name, value string) error {
	if !headerName.MatchString(name) {
		return fmt.Errorf("%s: %q is not the name of a header", option, name)
	}
	if !headerValue.MatchString(value) {
		return fmt.Errorf("%s: the value of %s has a character that a header cannot have", option, name)
	}
	for _, own := range ownHeaders {
		if strings.EqualFold(name, own) {
			return fmt.Errorf("%s: %s is set by the tap itself", option, name)
		}
	}

	return nil
}

// endpoint delivers records to one URL. All instances of the middleware with the same settings share one.
type endpoint struct {
	settings  endpointSettings
	header    http.Header
	host      string
	transport *http.Transport

	// holders counts the instances that use the endpoint; endpointsMu guards it.
	holders int
	// released says that no instance does any more. Traefik says so before the last requests have ended: they are still delivered.
	released atomic.Bool

	failures failures
}

// endpoints are those of the whole process by their settings. Their number is that of the settings in the configuration.
var (
	endpointsMu sync.Mutex
	endpoints   = map[string]*endpoint{}
)

// acquireEndpoint returns the endpoint with these settings, and holds it until ctx is done.
func acquireEndpoint(ctx context.Context, settings endpointSettings) *endpoint {
	key := endpointKey(settings)

	endpointsMu.Lock()
	e := endpoints[key]
	if e == nil {
		e = newEndpoint(settings)
		endpoints[key] = e
	}
	e.holders++
	endpointsMu.Unlock()

	context.AfterFunc(ctx, func() { releaseEndpoint(key, e) })

	return e
}

// releaseEndpoint lets go of an endpoint. The last to do so closes the connections that are not in use.
func releaseEndpoint(key string, e *endpoint) {
	endpointsMu.Lock()
	e.holders--
	last := e.holders == 0
	if last {
		delete(endpoints, key)
	}
	endpointsMu.Unlock()

	if last {
		e.released.Store(true)
		e.transport.CloseIdleConnections()
	}
}

// endpointKey is the same for the same settings, and for no others.
func endpointKey(settings endpointSettings) string {
	names := make([]string, 0, len(settings.headers))
	for name := range settings.headers {
		names = append(names, name)
	}
	sort.Strings(names)

	key := fmt.Sprintf("%q %d", settings.url, settings.timeout)
	for _, name := range names {
		key += fmt.Sprintf(" %q: %q", name, settings.headers[name])
	}

	return key
}

func newEndpoint(settings endpointSettings) *endpoint {
	header := settings.headers.Clone()
	header.Set("Content-Type", "application/json")

	// The default transport of Traefik's process: proxies from the environment, HTTP/2 over TLS.
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DisableCompression = true
	transport.MaxIdleConns = 0
	transport.MaxIdleConnsPerHost = maxIdleConnections
	transport.IdleConnTimeout = idleTimeout

	return &endpoint{settings: settings, header: header, host: header.Get("Host"), transport: transport}
}

// send delivers one record, and returns nil when the endpoint has accepted it: with a status below 400.
//
// The round trip is the transport's, not a client's, which would follow redirects. An Idempotency-Key tells the transport that it
// may send the record again when a connection turns out to be stale.
func send(e *endpoint, kind, id string, payload []byte) error {
	ctx, cancel := context.Background(), context.CancelFunc(nil)
	if e.settings.timeout > 0 {
		ctx, cancel = context.WithTimeout(ctx, e.settings.timeout)
		defer cancel()
	}

	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.settings.url, bytes.NewReader(payload))
	if err != nil {
		return err
	}
	req.Header = e.header.Clone()
	req.Header["X-Tap-Id"] = []string{id}
	req.Header["X-Tap-Record"] = []string{kind}
	req.Header["Idempotency-Key"] = []string{id + "-" + kind}
	if e.host != "" {
		req.Host = e.host
	}

	status, err := roundTrip(e, req)
	if e.released.Load() {
		e.transport.CloseIdleConnections()
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("tap service gave no answer within %s", e.settings.timeout)
	}
	if err != nil {
		return err
	}
	if status < 200 || status >= 400 {
		return fmt.Errorf("tap service returned %d", status)
	}

	return nil
}

// roundTrip returns the status of an answer. Once that has come, nothing that happens to the rest of the answer changes it.
func roundTrip(e *endpoint, req *http.Request) (int, error) {
	resp, err := e.transport.RoundTrip(req)
	if err != nil {
		return 0, err
	}

	if resp.ContentLength != 0 {
		_, _ = io.CopyN(io.Discard, resp.Body, maxAnswer)
	}
	_ = resp.Body.Close()

	return resp.StatusCode, nil
}

// failures tells the log about an endpoint's failures, once in a logInterval at most.
type failures struct {
	mu sync.Mutex
	// quiet says that a line was written within the last logInterval.
	quiet bool
	// suppressed counts the failures since then, and latest is the line about the last of them.
	suppressed int
	latest     string
}

// report writes a line about a failed record to Traefik's log. Within logInterval of the line before it is held back, and told
// of at the end of that time.
func report(e *endpoint, kind, middleware string, err error) {
	line := fmt.Sprintf("Unable to send the %s record error=%q middlewareName=%s middlewareType=Tap", kind, err.Error(), middleware)

	f := &e.failures
	f.mu.Lock()
	defer f.mu.Unlock()

	if f.quiet {
		f.suppressed++
		f.latest = line

		return
	}
	f.quiet = true
	time.AfterFunc(logInterval, func() { reportSuppressed(f) })
	writeLog(line)
}

// reportSuppressed writes the line about the failures that were held back. With none, the next failure is logged at once.
func reportSuppressed(f *failures) {
	f.mu.Lock()
	defer f.mu.Unlock()

	if f.suppressed == 0 {
		f.quiet = false

		return
	}
	// The line stands for one failure itself.
	if f.suppressed > 1 {
		f.latest += fmt.Sprintf(" suppressed=%d", f.suppressed-1)
	}
	writeLog(f.latest)
	f.suppressed = 0
	time.AfterFunc(logInterval, func() { reportSuppressed(f) })
}

// writeLog writes a line to Traefik's log, at ERROR: there Traefik's plugin loader sends what is written to log.Writer.
func writeLog(line string) {
	_, _ = io.WriteString(log.Writer(), line+"\n")
}
