package tap

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// patience is how long a test waits for what must come. It is never waited out when all is well.
const patience = 20 * time.Second

// posted is one record that an endpoint got.
type posted struct {
	Record
	// payload is the record as it was sent.
	payload string
	header  http.Header
	uri     string
	host    string
}

// recorder is an endpoint that accepts everything.
type recorder struct {
	url   string
	posts chan posted
}

func newRecorder(t *testing.T) *recorder {
	t.Helper()
	r := &recorder{posts: make(chan posted, 100)}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		payload, err := io.ReadAll(req.Body)
		assert.NoError(t, err)
		got := posted{payload: string(payload), header: req.Header, uri: req.RequestURI, host: req.Host}
		assert.NoError(t, json.Unmarshal(payload, &got.Record))
		r.posts <- got
	}))
	t.Cleanup(server.Close)
	r.url = server.URL

	return r
}

// next waits for a record.
func (r *recorder) next(t *testing.T) posted {
	t.Helper()
	select {
	case got := <-r.posts:
		return got
	case <-time.After(patience):
		require.FailNow(t, "no record came")

		return posted{}
	}
}

// newHandler returns a tap in front of next, which ends with the test.
func newHandler(t *testing.T, config *Config, next http.HandlerFunc) http.Handler {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	handler, err := New(ctx, next, config, "audit@file")
	require.NoError(t, err)

	return handler
}

func discard(http.ResponseWriter, *http.Request) {}

// pointer returns a pointer to a value.
func pointer[T any](value T) *T {
	return &value
}

func TestCreateConfig_LeavesTheDefaultsToNew(t *testing.T) {
	assert.Equal(t, &Config{}, CreateConfig(), "the decoder would merge the user's lists into them")
}

// changed are settings of one kind of record that are right and have a secret in them, with a change.
func changed(change func(config *RecordConfig)) *RecordConfig {
	config := &RecordConfig{Service: []string{"http://user:s3cret@127.0.0.1:1"}, Headers: map[string]string{"X-Token": "s3cret"}}
	change(config)

	return config
}

func TestNew_NamesTheOptionThatIsWrong(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	unknown := map[string]interface{}{"typo": "s3cret"}
	services := func(services ...string) func(*RecordConfig) {
		return func(config *RecordConfig) { config.Service = services }
	}
	headers := func(name, value string) func(*RecordConfig) {
		return func(config *RecordConfig) { config.Headers = map[string]string{name: value} }
	}
	retry := func(retry RetryConfig) func(*RecordConfig) {
		return func(config *RecordConfig) { config.Retry = &retry }
	}
	overTLS := func(tls TLSConfig) func(*RecordConfig) {
		return func(config *RecordConfig) {
			config.Service = []string{"https://user:s3cret@127.0.0.1:1"}
			config.TLS = &tls
		}
	}
	// The option stands behind the name of the kind.
	cases := []struct {
		name, option string
		change       func(config *RecordConfig)
	}{
		{"an unknown option", "typo", func(config *RecordConfig) { config.Unknown = unknown }},

		{"no service", "service", services()},
		{"empty services", "service", services("", " ")},
		{"a service of another scheme", "service", services("ftp://user:s3cret@audit")},
		{"a service without a scheme", "service", services("user:s3cret@audit")},
		{"a service without a host", "service", services("http://user:s3cret@")},
		{"a service that is no URL", "service", services("http://user:s3cret@audit:port")},
		{"a service with a query string", "service", services("http://audit?token=s3cret")},
		{"a service with an empty query string", "service", services("http://audit?")},
		{"a service with a fragment", "service", services("http://audit#s3cret")},
		{"the second service", "service", services("http://audit", "audit")},
		{"http and https", "service", services("https://audit", "http://audit")},
		{"a path with a fragment", "path", func(config *RecordConfig) { config.Path = "/records#s3cret" }},
		{"a path that is none", "path", func(config *RecordConfig) { config.Path = "/%zz?token=s3cret" }},

		{"a header without a name", "headers", headers("", "s3cret")},
		{"a header name with a space", "headers", headers("X Token", "s3cret")},
		{"a header name with a colon", "headers", headers("X-Token:", "s3cret")},
		{"a header name that is not ASCII", "headers", headers("X-Tökén", "s3cret")},
		{"a header value with a line feed", "headers", headers("X-Token", "s3cret\nX-Other: 1")},
		{"a header value with a carriage return", "headers", headers("X-Token", "s3cret\r")},
		{"a header value with a NUL", "headers", headers("X-Token", "\x00s3cret")},
		{"a header value with a DEL", "headers", headers("X-Token", "s3cret\x7f")},
		{"a header that is there twice", "headers", func(c *RecordConfig) { c.Headers = map[string]string{"X-Token": "s3cret", "x-token": "s3cret"} }},
		{"a header in a missing file", "headers", headers("X-Token", "file:"+missing)},
		{"a header in a folder", "headers", headers("X-Token", "file:"+filepath.Dir(missing))},
		{"the id", "headers", headers("x-tap-id", "s3cret")},
		{"the kind", "headers", headers("X-Tap-Record", "s3cret")},
		{"the key", "headers", headers("Idempotency-Key", "s3cret")},
		{"the type", "headers", headers("content-type", "s3cret")},
		{"the length", "headers", headers("Content-Length", "s3cret")},
		{"the framing", "headers", headers("TRANSFER-ENCODING", "s3cret")},

		{"a timeout that is none", "timeout", func(config *RecordConfig) { config.Timeout = "soon" }},
		{"a negative timeout", "timeout", func(config *RecordConfig) { config.Timeout = "-1ns" }},
		{"negative seconds", "timeout", func(config *RecordConfig) { config.Timeout = "-1" }},
		{"a negative limit of records", "maxRecordBodySize", func(config *RecordConfig) { config.MaxRecordBodySize = pointer(int64(-2)) }},
		{"a negative limit of bodies", "maxBodySize", func(config *RecordConfig) { config.MaxBodySize = pointer(int64(-2)) }},

		{"no attempt", "retry.attempts", retry(RetryConfig{Attempts: pointer(0)})},
		{"a pause that is none", "retry.initialInterval", retry(RetryConfig{InitialInterval: "1 s"})},
		{"an unknown option of retry", "retry.typo", retry(RetryConfig{Unknown: unknown})},

		{"TLS without https", "tls", func(config *RecordConfig) { config.TLS = &TLSConfig{} }},
		{"an unknown option of TLS", "tls.typo", overTLS(TLSConfig{Unknown: unknown})},
		{"an authority that is none", "tls.rootCAs", overTLS(TLSConfig{RootCAs: []string{"-----BEGIN s3cret"}})},
		{"an authority in a missing file", "tls.rootCAs", overTLS(TLSConfig{RootCAs: []string{missing}})},
		{"a certificate without a key", "tls", overTLS(TLSConfig{Cert: "-----BEGIN s3cret"})},
		{"a key without a certificate", "tls", overTLS(TLSConfig{Key: "-----BEGIN s3cret"})},
		{"a certificate in a missing file", "tls.cert", overTLS(TLSConfig{Cert: missing, Key: "-----BEGIN s3cret"})},
		{"a key in a missing file", "tls.key", overTLS(TLSConfig{Cert: "-----BEGIN s3cret", Key: missing})},
		{"a certificate that is none", "tls", overTLS(TLSConfig{Cert: "-----BEGIN s3cret", Key: "-----BEGIN s3cret"})},

		{"an empty batch", "maxBatchSize", func(config *RecordConfig) { config.MaxBatchSize = pointer(0) }},
		{"fewer than none pending", "maxPending", func(config *RecordConfig) { config.MaxPending = pointer(-1) }},
		{"pending and rejecting", "maxPending", func(config *RecordConfig) {
			config.MaxPending = pointer(1)
			config.RejectOnRecordError = true
		}},
	}
	for _, test := range cases {
		t.Run(test.name, func(t *testing.T) {
			for kind, config := range map[string]*Config{
				"request":  {Request: changed(test.change)},
				"response": {Response: changed(test.change)},
				"exchange": {Request: changed(func(*RecordConfig) {}), Exchange: changed(test.change)},
			} {
				assertRefuses(t, config, kind+"."+test.option)
			}
		})
	}

	ofRequests := func(config *RecordConfig) { config.RequestHeaders = []string{"X-Request-Id"} }
	for name, test := range map[string]struct {
		config *Config
		option string
	}{
		"nothing at all":              {&Config{}, "request, response and exchange"},
		"nothing but where to count":  {&Config{MetricsPath: "/metrics", RedactHeaders: []string{"Cookie"}}, "request, response and exchange"},
		"an unknown option":           {&Config{Unknown: unknown, Exchange: changed(func(*RecordConfig) {})}, "typo"},
		"an unknown option alone":     {&Config{Unknown: unknown}, "typo"},
		"unknown options":             {&Config{Unknown: map[string]interface{}{"b": 1, "a": 2}}, "a, b"},
		"requestHeaders of requests":  {&Config{Request: changed(ofRequests)}, "request.requestHeaders"},
		"requestHeaders of exchanges": {&Config{Exchange: changed(ofRequests)}, "exchange.requestHeaders"},
	} {
		t.Run(name, func(t *testing.T) { assertRefuses(t, test.config, test.option) })
	}
}

// assertRefuses fails unless New names the option, and nothing secret.
func assertRefuses(t *testing.T, config *Config, option string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	handler, err := New(ctx, http.HandlerFunc(discard), config, "audit@file")
	assert.Nil(t, handler)
	if assert.Error(t, err) {
		assert.Regexp(t, `(^|[ :])`+option+`($|[ :,])`, err.Error())
		assert.NotContains(t, err.Error(), "s3cret")
		assert.NotContains(t, err.Error(), "user:")
	}
}

func TestNew_TakesWhatIsRight(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("token\n"), 0o600))
	for name, change := range map[string]func(config *RecordConfig){
		"no option but service": func(*RecordConfig) {},
		"spaces":                func(config *RecordConfig) { config.Service = []string{" http://audit ", "", "http://[::1]:9000/base/"} },
		"capitals":              func(config *RecordConfig) { config.Service = []string{"HTTPS://AUDIT"} },
		"no limits": func(config *RecordConfig) {
			config.Timeout = "0"
			config.MaxRecordBodySize, config.MaxBodySize = pointer(int64(-1)), pointer(int64(-1))
		},
		"nothing": func(config *RecordConfig) {
			config.MaxRecordBodySize, config.MaxBodySize, config.MaxPending = pointer(int64(0)), pointer(int64(0)), pointer(0)
			config.RejectOnRecordError = true
		},
		"the largest numbers": func(config *RecordConfig) {
			config.MaxRecordBodySize, config.MaxBodySize = pointer(int64(1<<63-1)), pointer(int64(1<<63-1))
			config.MaxBatchSize, config.MaxPending = pointer(1<<31-1), pointer(1<<31-1)
			config.Timeout = "87600h"
		},
		"headers": func(config *RecordConfig) {
			config.Headers = map[string]string{"!#$%&'*+.^_`|~09azAZ-": "", "X-Tab": "a\tb", "X-Latin": "caf\xe9", "X-UTF-8": "café", "X-Token": "file:" + file}
		},
		"empty options": func(config *RecordConfig) {
			config.Path, config.Timeout, config.Headers = " ", " ", map[string]string{}
			config.Retry = &RetryConfig{}
			config.RequestHeaders = []string{}
			config.Unknown = map[string]interface{}{}
		},
		"the TLS settings of the system": func(config *RecordConfig) {
			config.Service = []string{"https://audit"}
			config.TLS = &TLSConfig{}
		},
	} {
		t.Run(name, func(t *testing.T) {
			newHandler(t, &Config{Request: changed(change), Response: changed(change), Exchange: changed(change)}, discard)
		})
	}
}

func TestNew_NeitherDialsNorStartsGoroutines(t *testing.T) {
	var dialled atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(discard))
	server.Config.ConnState = func(net.Conn, http.ConnState) { dialled.Add(1) }
	server.Start()
	defer server.Close()

	before := runtime.NumGoroutine()
	service := []string{server.URL}
	newHandler(t, &Config{Request: &RecordConfig{Service: service}, Exchange: &RecordConfig{Service: service, MaxPending: pointer(10), MaxBatchSize: pointer(10)}}, discard)
	assert.LessOrEqual(t, runtime.NumGoroutine(), before)
	assert.Zero(t, dialled.Load())
}

// What is not written in the settings.
func TestNew_Defaults(t *testing.T) {
	endpoint := newRecorder(t)
	handler := newHandler(t, &Config{
		Request:  &RecordConfig{Service: []string{endpoint.url}},
		Exchange: &RecordConfig{Service: []string{endpoint.url}, RecordBody: true},
	}, func(rw http.ResponseWriter, req *http.Request) {
		_, err := io.Copy(rw, req.Body)
		assert.NoError(t, err)
	})
	const limit = 65536
	for size, truncated := range map[int]bool{limit: false, limit + 1: true} {
		body := strings.Repeat("x", size)
		req := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
		for _, name := range []string{"Authorization", "Proxy-Authorization", "Cookie", "Set-Cookie", "X-Api-Key"} {
			req.Header.Set(name, "secret")
		}
		rw := httptest.NewRecorder()
		handler.ServeHTTP(rw, req)
		assert.Equal(t, body, rw.Body.String())

		for i := 0; i < 2; i++ {
			got := endpoint.next(t)
			assert.Equal(t, "/", got.uri)
			assert.Equal(t, http.Header{
				"Authorization": {redacted}, "Proxy-Authorization": {redacted}, "Cookie": {redacted}, "Set-Cookie": {redacted}, "X-Api-Key": {"secret"},
			}, got.Request.Headers)
			if got.Kind == kindRequest {
				assert.NotContains(t, got.payload, `"body`)

				continue
			}
			assert.Len(t, got.Request.Body, limit)
			assert.Equal(t, truncated, got.Request.BodyTruncated)
			assert.Len(t, got.Response.Body, limit)
			assert.Equal(t, truncated, got.Response.BodyTruncated)
		}
	}
	assert.Empty(t, endpoint.posts)
}

func TestNew_ServesWhatIsNotRecordedByDefault(t *testing.T) {
	endpoint := httptest.NewServer(http.NotFoundHandler())
	defer endpoint.Close()
	handler := newHandler(t, &Config{Response: &RecordConfig{Service: []string{endpoint.URL}}}, func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(http.StatusTeapot)
	})

	rw := httptest.NewRecorder()
	handler.ServeHTTP(rw, httptest.NewRequest(http.MethodGet, "/", nil))
	assert.Equal(t, http.StatusTeapot, rw.Code)
}

func TestNew_TakesNothingOfAnEmptyRedactList(t *testing.T) {
	endpoint := newRecorder(t)
	handler := newHandler(t, &Config{RedactHeaders: []string{}, Exchange: &RecordConfig{Service: []string{endpoint.url}}}, discard)

	req := httptest.NewRequest(http.MethodGet, "/", nil)
	req.Header.Set("Authorization", "verbatim")
	handler.ServeHTTP(httptest.NewRecorder(), req)
	assert.Equal(t, []string{"verbatim"}, endpoint.next(t).Request.Headers["Authorization"])
}
