package tap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"strconv"
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
	// dialTimeout is how long it may take to connect.
	dialTimeout = 10 * time.Second
	// forever is the timeout where there is none.
	forever = 10 * 365 * 24 * time.Hour
	// maxAnswer is how many bytes of an answer are read, so that its connection can be used again. A longer answer costs its connection.
	maxAnswer = 64 << 10

	// shortestPause and longestDialPause bound the time in which nobody dials a target that is down.
	shortestPause    = 50 * time.Millisecond
	longestDialPause = time.Second
	// longestPause is the most time between two attempts, and for which a target that has failed is passed over while another one is up.
	longestPause = 30 * time.Second
	// cutsUntilDown is how many records in a row a target may leave without an answer by cutting their connections: then it counts as down.
	cutsUntilDown = 5
)

// endpoint delivers records to one URL, or to one of several. All instances of the middleware with the same settings share one.
type endpoint struct {
	settings endpointSettings
	targets  []*target
	// client makes POSTs that are tried once at one target, and that is all. Nil where there is more to it.
	client *http.Client
	// timeout bounds a delivery; very long where the user wants no limit.
	timeout time.Duration

	// holders counts the instances that use the endpoint; endpointsMu guards it.
	holders int
	// released says that no instance does any more. Traefik says so before the last requests have ended: they are still delivered.
	released atomic.Bool

	// mu guards the order of the targets.
	mu sync.Mutex
	// preferred is the target that worked last.
	preferred int

	queue    queue
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
		for _, t := range e.targets {
			abandonGate(&t.gate)
		}
		closeIdle(e)
	}
}

func closeIdle(e *endpoint) {
	for _, t := range e.targets {
		t.transport.CloseIdleConnections()
	}
}

func newEndpoint(settings endpointSettings) *endpoint {
	e := &endpoint{
		settings: settings,
		timeout:  settings.timeout,
	}
	if e.timeout == 0 {
		e.timeout = forever
	}
	e.queue.slots = slotsFor(settings)
	for _, s := range settings.targets {
		e.targets = append(e.targets, newTarget(s, settings))
	}
	if settings.attempts == 1 && len(settings.targets) == 1 && !e.targets[0].adapts {
		e.client = &http.Client{Transport: e.targets[0].transport, Timeout: settings.timeout, CheckRedirect: followNone}
	}

	return e
}

// source is one kind of record of one middleware, and the endpoint it goes to.
type source struct {
	middleware, kind string
	endpoint         *endpoint
	counters         *counters
	// header stands on every POST, and suffix ends its Idempotency-Key.
	header http.Header
	suffix string
	// What follows is of the endpoint, at hand: the interpreter pays for each step of the way there.

	// maxPending is how many records may be pending, batches says that several go in one POST.
	maxPending int
	batches    bool
	// client is the endpoint's, or nil. With it there is one URL, and the gate of that.
	client *http.Client
	url    string
	gate   *gate
}

func newSource(middleware, kind string, e *endpoint) *source {
	s := &source{
		middleware: middleware,
		kind:       kind,
		endpoint:   e,
		counters:   countersFor(middleware, kind),
		header:     e.settings.headers.Clone(),
		suffix:     "-" + kind,
		maxPending: e.settings.maxPending,
		batches:    e.settings.maxBatch > 1,
	}
	s.header["Content-Type"] = []string{"application/json"}
	s.header["X-Tap-Record"] = []string{kind}
	if s.batches {
		s.suffix += "-batch"
		s.header["Content-Type"] = []string{"application/x-ndjson"}
		s.header["X-Tap-Record"] = []string{"batch"}
	}
	if e.client != nil {
		s.client = e.client
		s.url = e.targets[0].settings.url
		s.gate = &e.targets[0].gate
	}

	return s
}

// delivery is a record on its way to an endpoint, or a batch of them.
type delivery struct {
	// source and id are the record's, or those of the first one.
	source  *source
	id      string
	payload []byte
	// rejects says that something is not served when the record is not accepted.
	rejects bool

	// started is when the delivery began. The answer must have come within the endpoint's timeout.
	started time.Time
	// turn tells a record that waits for a slot whether it is its turn to send, or it was sent with another. Waited says that it was its
	// turn, and that some of the timeout is over.
	turn   chan bool
	waited bool
	// header is that of the POST. It is the same however often it is tried.
	header http.Header
	// err is nil when the record was accepted, or handed over.
	err error
}

// send delivers a record, and counts what came of it.
func send(d *delivery) {
	d.started = time.Now()
	d.header = d.source.header.Clone()
	d.header["X-Tap-Id"] = []string{d.id}
	post(d)
	account(d, nil, d.err)
}

// post makes a POST, and sets err: to nil when the endpoint has accepted, with a status below 400. Redirects are not followed.
//
// What is done by default stands here in one piece, for the interpreter's sake: one attempt, which is answered by 2xx without a body.
func post(d *delivery) {
	// The endpoint can tell by the key that a record comes twice. The transport takes it for the permission to send again when a
	// connection turns out to be stale.
	s := d.source
	d.header["Idempotency-Key"] = []string{d.id + s.suffix}
	if s.client == nil || d.waited {
		persist(d)

		return
	}

	// The URL is a valid one: New has seen to that. The client has a timeout.
	req, _ := http.NewRequest(http.MethodPost, s.url, bytes.NewReader(d.payload)) //nolint:noctx // See above.
	req.Header = d.header
	resp, err := s.client.Do(req) //nolint:bodyclose // Here, or by takeAnswer.
	if err != nil || resp.ContentLength != 0 || resp.StatusCode/100 != 2 || s.gate.alert.Load() {
		concludePost(d, req, resp, err)
	} else {
		_ = resp.Body.Close()
	}
}

// followNone makes a client return redirects as they are.
func followNone(*http.Request, []*http.Request) error {
	return http.ErrUseLastResponse
}

// concludePost is for an only attempt that has failed, or was answered by more than a good status.
func concludePost(d *delivery, req *http.Request, resp *http.Response, err error) {
	e := d.source.endpoint
	t := e.targets[0]
	if err != nil {
		ctx, cancel := withDeadline(d)
		defer cancel()
		// What the client says is the transport's error behind the URL.
		resp, err = sendAgain(t, req.WithContext(ctx), errors.Unwrap(err)) //nolint:bodyclose // takeAnswer closes it.
	}
	d.err = verdict(e, takeAnswer(t, resp, err))
}

// answer is what came of an attempt: a status and perhaps the time to wait before the next one, or an error.
type answer struct {
	status     int
	retryAfter string
	err        error
}

// persist makes a POST at one target after the other, and again after a while, as the user wants it.
func persist(d *delivery) {
	ctx, cancel := withDeadline(d)
	defer cancel()

	e := d.source.endpoint
	pause := e.settings.interval
	for left := e.settings.attempts - 1; ; left-- {
		a := tryTargets(ctx, e, d)
		if left <= 0 || !isTemporary(a) || !sleepUntilRetry(e, d, a, pause) {
			d.err = verdict(e, a)

			return
		}
		if pause *= 2; pause > longestPause {
			pause = longestPause
		}
	}
}

// withDeadline returns a context that ends when the answer must have come.
func withDeadline(d *delivery) (context.Context, context.CancelFunc) {
	return context.WithDeadline(context.Background(), d.started.Add(d.source.endpoint.timeout))
}

// verdict tells why a record was not accepted, or nil if it was. It lets go of the connections of an endpoint that was released.
func verdict(e *endpoint, a answer) error {
	if e.released.Load() {
		closeIdle(e)
	}
	if errors.Is(a.err, context.DeadlineExceeded) {
		return fmt.Errorf("tap service gave no answer within %s", e.settings.timeout)
	}
	if a.err == nil && (a.status < 200 || a.status >= 400) {
		return fmt.Errorf("tap service returned %d", a.status)
	}

	return a.err
}

// attempt makes one POST to one target. The round trip is the transport's, not a client's, which would follow redirects.
func attempt(ctx context.Context, t *target, d *delivery) answer {
	// The URL is a valid one: New has seen to that.
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, t.settings.url, bytes.NewReader(d.payload))
	req.Header = d.header
	if t.adapts {
		adapt(t, req)
	}

	resp, err := t.transport.RoundTrip(req) //nolint:bodyclose // takeAnswer closes it.
	if err != nil {
		resp, err = sendAgain(t, req, err) //nolint:bodyclose // takeAnswer closes it.
	}

	return takeAnswer(t, resp, err)
}

// takeAnswer takes what came of an attempt.
func takeAnswer(t *target, resp *http.Response, err error) answer {
	if err != nil {
		return answer{err: err}
	}
	if t.gate.alert.Load() {
		openGate(&t.gate)
	}

	// The status has come: nothing that happens to the rest of the answer changes it.
	if resp.ContentLength != 0 {
		_, _ = io.CopyN(io.Discard, resp.Body, maxAnswer)
	}
	_ = resp.Body.Close()
	if resp.StatusCode >= 400 {
		return answer{status: resp.StatusCode, retryAfter: resp.Header.Get("Retry-After")}
	}

	return answer{status: resp.StatusCode}
}

// sendAgain sends a POST once more whose connection ended before the answer: one that was kept may be gone, which shows only when it is
// used. The transport does so itself, but not for a request of which a part was written. Where one kept connection is gone others
// are, so this time it is a new one.
func sendAgain(t *target, req *http.Request, err error) (*http.Response, error) {
	if !isCut(&t.gate, err) {
		return nil, err
	}

	// A copy of the transport has no connections, and this one keeps none.
	fresh := t.transport.Clone()
	fresh.MaxIdleConnsPerHost = -1
	again := req.Clone(req.Context())
	again.Body, _ = req.GetBody()
	resp, err := fresh.RoundTrip(again)
	if err != nil && isCut(&t.gate, err) {
		noteCut(&t.gate, err)
	}

	return resp, err
}

// adapt gives a POST the credentials of the target's URL, unless `headers` has some, and the Host header that `headers` asks for.
func adapt(t *target, req *http.Request) {
	if t.settings.authorization != "" && req.Header["Authorization"] == nil {
		req.Header = req.Header.Clone()
		req.Header["Authorization"] = []string{t.settings.authorization}
	}
	if host := req.Header.Get("Host"); host != "" {
		req.Host = host
	}
}

// tryTargets tries one target after the other until one has answered for good.
func tryTargets(ctx context.Context, e *endpoint, d *delivery) answer {
	if len(e.targets) == 1 {
		return attempt(ctx, e.targets[0], d)
	}

	var a answer
	targets := inOrder(e)
	for i, t := range targets {
		a = tryTarget(ctx, t, d, len(targets)-i)
		noteResult(e, t, a)
		if !isTemporary(a) {
			break
		}
	}

	return a
}

// tryTarget leaves enough of the time for the targets that are left: one that takes all connections and answers none must not
// keep a record from the others.
func tryTarget(ctx context.Context, t *target, d *delivery, left int) answer {
	if deadline, _ := ctx.Deadline(); left > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(deadline)/time.Duration(left))
		defer cancel()
	}

	return attempt(ctx, t, d)
}

// isTemporary says that another attempt may have another outcome. The statuses are those that say so themselves: RFC 9110, sections
// 15.5.9 and 15.6, RFC 8470 and RFC 6585.
func isTemporary(a answer) bool {
	switch a.status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return true
	}

	return a.err != nil || a.status >= 500
}

// sleepUntilRetry waits before another attempt: as long as the endpoint asks for, at least the pause, with jitter, and not while
// nobody may dial. It returns false at once when the deadline would have passed.
func sleepUntilRetry(e *endpoint, d *delivery, a answer, pause time.Duration) bool {
	wait := pause/2 + time.Duration(rand.Int63n(int64(pause/2)+1)) //nolint:gosec // Jitter.
	if asked := parseRetryAfter(a.retryAfter); asked > wait {
		wait = asked
	}
	if len(e.targets) == 1 {
		if closed := closedFor(&e.targets[0].gate); closed > wait {
			wait = closed
		}
	}
	if time.Until(d.started.Add(e.timeout)) <= wait {
		return false
	}
	time.Sleep(wait)

	return true
}

// parseRetryAfter takes a number of seconds or a date: RFC 9110, section 10.2.3. 0 for anything else.
func parseRetryAfter(text string) time.Duration {
	if seconds, err := strconv.ParseInt(text, 10, 32); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if date, err := http.ParseTime(text); err == nil {
		return time.Until(date)
	}

	return 0
}

// target is one of the URLs of an endpoint.
type target struct {
	settings  targetSettings
	transport *http.Transport
	gate      gate
	// adapts says that a POST to this target differs from what others get.
	adapts bool

	// What follows is guarded by the endpoint's mu.

	// pause is how long the target is passed over after a failure, 0 when its last answer was good.
	pause time.Duration
	// again is when it is to be tried again.
	again time.Time
}

func newTarget(s targetSettings, settings endpointSettings) *target {
	// The default transport of Traefik's process: proxies from the environment, HTTP/2 over TLS.
	transport := http.DefaultTransport.(*http.Transport).Clone() //nolint:errcheck // It is one, by net/http's documentation.
	transport.DisableCompression = true
	transport.MaxIdleConns = 0
	transport.MaxIdleConnsPerHost = maxIdleConnections
	transport.IdleConnTimeout = idleTimeout
	if settings.tls != nil {
		transport.TLSClientConfig = settings.tls.Clone()
	}

	t := &target{settings: s, transport: transport, adapts: s.authorization != "" || settings.headers.Get("Host") != ""}
	dialer := &net.Dialer{Timeout: dialTimeout}
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		return dial(ctx, &t.gate, dialer, network, address)
	}

	return t
}

// inOrder returns the targets as they are to be tried: the one that worked last, those that have not failed, and those that have. A
// failed one whose pause is over comes first, for this one record.
func inOrder(e *endpoint) []*target {
	e.mu.Lock()
	defer e.mu.Unlock()

	now := time.Now()
	var probed, working, failed []*target
	for i := range e.targets {
		t := e.targets[(e.preferred+i)%len(e.targets)]
		switch {
		case t.pause == 0:
			working = append(working, t)
		case len(probed) == 0 && now.After(t.again):
			probed = append(probed, t)
			t.again = now.Add(t.pause)
		default:
			failed = append(failed, t)
		}
	}

	return append(append(probed, working...), failed...)
}

// noteResult remembers whether a target works.
func noteResult(e *endpoint, t *target, a answer) {
	e.mu.Lock()
	defer e.mu.Unlock()

	if isTemporary(a) {
		t.pause = longer(t.pause, longestPause)
		t.again = time.Now().Add(t.pause)

		return
	}
	t.pause = 0
	for i := range e.targets {
		if e.targets[i] == t {
			e.preferred = i
		}
	}
}

// longer returns the pause that follows a pause.
func longer(pause, longest time.Duration) time.Duration {
	if pause *= 2; pause < shortestPause {
		return shortestPause
	}
	if pause > longest {
		return longest
	}

	return pause
}

// gate keeps the records of a target that is down from dialling it one by one: while it is closed one connection is tried at a time,
// after pauses that grow to longestDialPause, and all other dialling fails at once. Connections that live go on.
type gate struct {
	// alert says that something has gone wrong since the last answer, or that the endpoint was released. Without it nobody needs to look.
	alert atomic.Bool

	mu sync.Mutex
	// abandoned says that the endpoint was released.
	abandoned bool
	// cuts counts the records in a row for which no connection lasted until the answer.
	cuts int
	// closed says that the target is down, and err why.
	closed bool
	err    error
	pause  time.Duration
	again  time.Time
}

// dial connects to a target, unless its gate is closed.
func dial(ctx context.Context, g *gate, dialer *net.Dialer, network, address string) (net.Conn, error) {
	if g.alert.Load() {
		if err := passGate(g); err != nil {
			return nil, err
		}
	}

	started := time.Now()
	conn, err := dialer.DialContext(ctx, network, address)
	// A dial that was given up early, since its record was, says nothing about the target.
	if err != nil && (ctx.Err() == nil || time.Since(started) > longestDialPause) {
		closeGate(g, err)
	}

	return conn, err
}

// passGate returns why the gate is closed, or nil to the one that may try a connection now.
func passGate(g *gate) error {
	g.mu.Lock()
	defer g.mu.Unlock()

	now := time.Now()
	if g.closed && now.Before(g.again) {
		return g.err
	}
	g.pause = longer(g.pause, longestDialPause)
	g.again = now.Add(g.pause)

	return nil
}

// closedFor returns for how long nobody may dial.
func closedFor(g *gate) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()

	return time.Until(g.again)
}

func closeGate(g *gate, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()

	// Many connections may fail at the same time: together they are one failure.
	if !g.closed {
		g.closed = true
		g.pause = shortestPause
		g.again = time.Now().Add(g.pause)
	}
	g.err = err
	g.alert.Store(true)
}

func openGate(g *gate) {
	g.mu.Lock()
	defer g.mu.Unlock()

	g.cuts = 0
	g.closed = false
	g.err = nil
	g.again = time.Time{}
	g.alert.Store(g.abandoned)
}

// abandonGate is for a target that will not be used for long any more.
func abandonGate(g *gate) {
	g.mu.Lock()
	defer g.mu.Unlock()

	g.abandoned = true
	g.alert.Store(true)
}

// isCut says that an attempt failed because its connection ended, rather than for want of time or of a connection.
func isCut(g *gate, err error) bool {
	g.mu.Lock()
	defer g.mu.Unlock()

	return !g.closed && !errors.Is(err, context.DeadlineExceeded)
}

// noteCut counts the records for which no connection lasted until the answer.
func noteCut(g *gate, err error) {
	g.mu.Lock()
	g.cuts++
	g.alert.Store(true)
	down := g.cuts >= cutsUntilDown
	g.mu.Unlock()

	if down {
		closeGate(g, err)
	}
}
