package yaegi_test

import (
	"context"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

// format is one of the ways in which a user writes settings.
type format struct {
	name string
	text string
	// read returns the settings of the middleware called audit.
	read func(t *testing.T, text string, replace ...string) settings
}

func fromFile(extension string) func(t *testing.T, text string, replace ...string) settings {
	return func(t *testing.T, text string, replace ...string) settings {
		t.Helper()
		name := filepath.Join(t.TempDir(), "dynamic"+extension)
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
		dynamic, err := host.ReadDynamic(name, replace...)
		require.NoError(t, err)

		return audit(t, dynamic)
	}
}

// fromLabels reads labels that stand one a line. As keys of a map they have no order.
func fromLabels(t *testing.T, text string, replace ...string) settings {
	t.Helper()
	labels := map[string]string{}
	for line := range strings.Lines(strings.NewReplacer(replace...).Replace(text)) {
		name, value, found := strings.Cut(strings.TrimSpace(line), "=")
		require.True(t, found, line)
		labels["traefik.http.middlewares.audit.plugin.tap."+name] = value
	}
	dynamic, err := host.FromLabels(labels)
	require.NoError(t, err)

	return audit(t, dynamic)
}

func fromKubernetes(t *testing.T, text string, replace ...string) settings {
	t.Helper()
	dynamic, err := host.FromKubernetes([]byte(strings.NewReplacer(replace...).Replace(text)))
	require.NoError(t, err)

	return audit(t, dynamic)
}

func audit(t *testing.T, dynamic *host.Dynamic) settings {
	t.Helper()
	config, err := dynamic.PluginConfig("audit")
	require.NoError(t, err)

	return config
}

// down is the URL of an endpoint that is not there: no server that a test starts gets a port as low as this.
const down = "http://127.0.0.1:1"

// sameLabels are sameSettings as labels, without what all names start with.
const sameLabels = `redactHeaders=X-Secret, x-other
metricsPath=/metrics
request.service=http://endpoint/base
request.path=records/requests?tenant=a
request.headers.Authorization=Bearer token
request.headers.X-Tenant=1
request.recordBody=true
request.maxRecordBodySize=4
request.timeout=5s
request.retry.attempts=2
request.retry.initialInterval=1ms
response.service=http://down, http://endpoint
response.recordBody=true
response.maxBodySize=3
response.maxBatchSize=10
response.maxPending=5
response.requestHeaders=X-Request-Id,X-Secret
response.timeout=30
exchange.service=https://endpoint
exchange.path=/exchanges
exchange.rejectOnRecordError=true
exchange.recordBody=false
exchange.tls.insecureSkipVerify=true`

// namesInLowerCase changes labels into what is left of them where the names of labels have no case.
func namesInLowerCase(labels string) string {
	return regexp.MustCompile(`(?m)^[^=]+`).ReplaceAllStringFunc(labels, strings.ToLower)
}

// sameSettings are the same settings in every format.
var sameSettings = []format{
	{"YAML", `
http:
  middlewares:
    audit:
      plugin:
        tap:
          redactHeaders: [X-Secret, x-other]
          metricsPath: /metrics
          request:
            service: http://endpoint/base
            path: records/requests?tenant=a
            headers:
              Authorization: Bearer token
              X-Tenant: 1
            recordBody: true
            maxRecordBodySize: 4
            timeout: 5s
            retry:
              attempts: 2
              initialInterval: 1ms
          response:
            service:
              - http://down
              - http://endpoint
            recordBody: true
            maxBodySize: 3
            maxBatchSize: 10
            maxPending: 5
            requestHeaders: [X-Request-Id, X-Secret]
            timeout: 30
          exchange:
            service: https://endpoint
            path: /exchanges
            rejectOnRecordError: true
            recordBody: false
            tls:
              insecureSkipVerify: true
`, fromFile(".yml")},
	{"TOML", `
[http.middlewares.audit.plugin.tap]
  redactHeaders = ["X-Secret", "x-other"]
  metricsPath = "/metrics"
  [http.middlewares.audit.plugin.tap.request]
    service = "http://endpoint/base"
    path = "records/requests?tenant=a"
    recordBody = true
    maxRecordBodySize = 4
    timeout = "5s"
    [http.middlewares.audit.plugin.tap.request.headers]
      Authorization = "Bearer token"
      X-Tenant = "1"
    [http.middlewares.audit.plugin.tap.request.retry]
      attempts = 2
      initialInterval = "1ms"
  [http.middlewares.audit.plugin.tap.response]
    service = ["http://down", "http://endpoint"]
    recordBody = true
    maxBodySize = 3
    maxBatchSize = 10
    maxPending = 5
    requestHeaders = ["X-Request-Id", "X-Secret"]
    timeout = 30
  [http.middlewares.audit.plugin.tap.exchange]
    service = "https://endpoint"
    path = "/exchanges"
    rejectOnRecordError = true
    recordBody = false
    [http.middlewares.audit.plugin.tap.exchange.tls]
      insecureSkipVerify = true
`, fromFile(".toml")},
	{"labels", sameLabels, fromLabels},
	{"labels in lower case", namesInLowerCase(sameLabels), fromLabels},
	{"Kubernetes", `{
  "apiVersion": "traefik.io/v1alpha1",
  "kind": "Middleware",
  "metadata": {"name": "audit"},
  "spec": {"plugin": {"tap": {
    "redactHeaders": ["X-Secret", "x-other"],
    "metricsPath": "/metrics",
    "request": {
      "service": "http://endpoint/base",
      "path": "records/requests?tenant=a",
      "headers": {"Authorization": "Bearer token", "X-Tenant": "1"},
      "recordBody": true,
      "maxRecordBodySize": 4,
      "timeout": "5s",
      "retry": {"attempts": 2, "initialInterval": "1ms"}
    },
    "response": {
      "service": ["http://down", "http://endpoint"],
      "recordBody": true,
      "maxBodySize": 3,
      "maxBatchSize": 10,
      "maxPending": 5,
      "requestHeaders": ["X-Request-Id", "X-Secret"],
      "timeout": 30
    },
    "exchange": {
      "service": "https://endpoint",
      "path": "/exchanges",
      "rejectOnRecordError": true,
      "recordBody": false,
      "tls": {"insecureSkipVerify": true}
    }
  }}}
}`, fromKubernetes},
}

// strictEndpoint is an endpoint that does not accept everything at once.
type strictEndpoint struct {
	*receiver
	// failures counts down the records that are answered by 503, for each kind.
	failures map[string]*atomic.Int64
	// hang is closed when the answers to responses are to come.
	hang chan struct{}
}

func newStrictEndpoint(t *testing.T) *strictEndpoint {
	t.Helper()
	e := &strictEndpoint{failures: map[string]*atomic.Int64{"request": {}, "exchange": {}}, hang: make(chan struct{})}
	e.receiver = newReceiver(t, func(rw http.ResponseWriter, req *http.Request) {
		if failures := e.failures[req.Header.Get("X-Tap-Record")]; failures == nil {
			<-e.hang
		} else if failures.Add(-1) >= 0 {
			rw.WriteHeader(http.StatusServiceUnavailable)
		}
	})

	return e
}

func TestTap_MeansTheSameInEveryFormat(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, format := range sameSettings {
			t.Run(format.name, func(t *testing.T) {
				endpoint := newStrictEndpoint(t)
				overTLS := httptest.NewTLSServer(endpoint.Config.Handler)
				t.Cleanup(overTLS.Close)

				config := format.read(t, format.text, "http://endpoint", endpoint.URL, "https://endpoint", overTLS.URL, "http://down", down)
				s := newTap(t, e, config, func(rw http.ResponseWriter, _ *http.Request) {
					rw.Header().Set("X-Other", "s3cret")
					_, _ = rw.Write([]byte("answer"))
				})
				// The last cleanup is the first to run: nothing ends while the endpoint hangs.
				t.Cleanup(func() { close(endpoint.hang) })

				requireEffect(t, s, endpoint)
			})
		}
	})
}

// requireEffect fails unless a tap does what sameSettings say.
func requireEffect(t *testing.T, s *tapped, endpoint *strictEndpoint) {
	t.Helper()
	send := func() int {
		resp, _ := s.do(t, http.MethodPost, "/p?a=1", []byte("request"), "Authorization", "plain", "X-Secret", "s3cret", "X-Request-Id", "1", "X-Request-Id", "2")
		// The answer to the response record is still to come: that one is left pending.
		require.Nil(t, s.done(t))

		return resp.StatusCode
	}

	// The request record is tried twice.
	endpoint.failures["request"].Store(1)
	require.Equal(t, http.StatusOK, send())
	posts := map[string][]received{}
	for range 4 {
		got := endpoint.next(t)
		posts[got.Kind] = append(posts[got.Kind], got)
	}
	require.Len(t, posts["request"], 2)
	require.Len(t, posts["response"], 1)
	require.Len(t, posts["exchange"], 1)
	request, response, exchange := posts["request"][1], posts["response"][0], posts["exchange"][0]
	assert.Equal(t, posts["request"][0].Payload, request.Payload)
	assert.Equal(t, posts["request"][0].Header["Idempotency-Key"], request.Header["Idempotency-Key"])

	assert.Equal(t, "/base/records/requests?tenant=a", request.URI)
	assert.Equal(t, "Bearer token", request.Header.Get("Authorization"))
	assert.Equal(t, "1", request.Header.Get("X-Tenant"))
	assert.Equal(t, "application/json", request.Header.Get("Content-Type"))
	assert.Equal(t, "requ", string(request.Request.Body))
	assert.True(t, request.Request.BodyTruncated)
	assert.Equal(t, []string{"plain"}, request.Request.Headers["Authorization"])
	assert.Equal(t, []string{"REDACTED"}, request.Request.Headers["X-Secret"])

	assert.Equal(t, "/", response.URI)
	assert.Equal(t, "application/x-ndjson", response.Header.Get("Content-Type"))
	assert.Empty(t, response.Header.Get("Authorization"))
	assert.Equal(t, "ans", string(response.Response.Body))
	assert.True(t, response.Response.BodyTruncated)
	assert.Equal(t, []string{"REDACTED"}, response.Response.Headers["X-Other"])
	assert.Equal(t, http.Header{"X-Request-Id": {"1", "2"}, "X-Secret": {"REDACTED"}}, response.Record.Request.Headers)

	assert.Equal(t, "/exchanges", exchange.URI)
	assert.Empty(t, exchange.Record.Request.Body)
	assert.Empty(t, exchange.Response.Body)
	assert.Equal(t, []string{"REDACTED"}, exchange.Record.Request.Headers["X-Secret"])

	// The exchange record is tried once, and without it nothing is served.
	endpoint.failures["exchange"].Store(1)
	assert.Equal(t, http.StatusInternalServerError, send())

	_, metrics := s.do(t, http.MethodGet, "/metrics", nil)
	require.Nil(t, s.done(t))
	assert.Contains(t, string(metrics), "tap_records_total")
}

func TestTap_CanBeToldToRedactNothingInEveryFormat(t *testing.T) {
	formats := []format{
		{"YAML", "http: {middlewares: {audit: {plugin: {tap: {redactHeaders: [], exchange: {service: http://endpoint}}}}}}", fromFile(".yml")},
		{"TOML", "[http.middlewares.audit.plugin.tap]\nredactHeaders = []\nexchange = {service = \"http://endpoint\"}", fromFile(".toml")},
		{"labels", "redactHeaders=\nexchange.service=http://endpoint", fromLabels},
		{
			"Kubernetes", "kind: Middleware\nmetadata: {name: audit}\nspec: {plugin: {tap: {redactHeaders: [], exchange: {service: http://endpoint}}}}",
			fromKubernetes,
		},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, format := range formats {
			t.Run(format.name, func(t *testing.T) {
				endpoint := newReceiver(t, nil)
				s := newTap(t, e, format.read(t, format.text, "http://endpoint", endpoint.URL), func(http.ResponseWriter, *http.Request) {})
				s.do(t, http.MethodGet, "/", nil, "Authorization", "verbatim")
				require.Nil(t, s.done(t))
				assert.Equal(t, []string{"verbatim"}, endpoint.next(t).Record.Request.Headers["Authorization"])
			})
		}
	})
}

// withSecrets are settings of one kind that are right, and full of what must not be told.
func withSecrets(service string) settings {
	return settings{"service": strings.Replace(service, "://", "://user:s3cret@", 1), "headers": settings{"X-Token": "s3cret"}}
}

func TestTap_NamesTheSettingThatIsWrong(t *testing.T) {
	in := func(kind, option string, value any) settings {
		config := withSecrets(down)
		config[option] = value

		return settings{kind: config}
	}
	cases := []struct {
		name   string
		config settings
		// want are the option, as the user typed it, and what else must be told.
		want []string
	}{
		{"nothing at all", settings{}, []string{"request", "response", "exchange"}},
		{"no direction", settings{"redactHeaders": "Cookie"}, []string{"request", "response", "exchange"}},
		{"unknown option", settings{"reqest": settings{}, "exchange": withSecrets(down)}, []string{"reqest"}},
		{"unknown options", settings{"b": "1", "a": "2", "exchange": withSecrets(down)}, []string{"a", "b"}},
		{"unknown option of a kind", in("request", "maxRecordBodysize1", "1"), []string{"request.maxRecordBodysize1"}},
		{"unknown option of retry", in("request", "retry", settings{"attempt": "1"}), []string{"request.retry.attempt"}},
		{"unknown option of tls", in("exchange", "tls", settings{"ca": "1"}), []string{"exchange.tls.ca"}},

		{"an empty kind", settings{"request": settings{}}, []string{"request.service"}},
		{"a label without a value", settings{"response": ""}, []string{"response"}},
		{"a kind that is no map", settings{"response": "true"}, []string{"response"}},
		{"no service", in("exchange", "service", nil), []string{"exchange.service"}},
		{"empty service", in("exchange", "service", ""), []string{"exchange.service"}},
		{"empty services", in("exchange", "service", []any{"", " "}), []string{"exchange.service"}},
		{"service of another scheme", in("request", "service", "ftp://user:s3cret@audit"), []string{"request.service"}},
		{"service without a scheme", in("request", "service", "user:s3cret@audit:9000"), []string{"request.service"}},
		{"service without a host", in("request", "service", "http://user:s3cret@/path"), []string{"request.service"}},
		{"service with a port alone", in("request", "service", "http://:9000"), []string{"request.service"}},
		{"service that is no URL", in("request", "service", "http://user:s3cret@audit:%zz"), []string{"request.service"}},
		{"service with a bad port", in("request", "service", "http://user:s3cret@audit:port"), []string{"request.service"}},
		{"service with a space", in("request", "service", "http://user:s3cret@au dit"), []string{"request.service"}},
		{"service with a query", in("request", "service", "http://user:s3cret@audit?token=s3cret"), []string{"request.service"}},
		{"service with a fragment", in("request", "service", "http://user:s3cret@audit/#s3cret"), []string{"request.service"}},
		{"a wrong one of two services", in("request", "service", "http://audit, audit:9000"), []string{"request.service"}},
		{"http and https together", in("request", "service", "http://a,https://b"), []string{"request.service"}},
		{"path with a fragment", in("response", "path", "/records#s3cret"), []string{"response.path"}},
		{"path that is none", in("response", "path", "/%zz?token=s3cret"), []string{"response.path"}},

		{"bad name of a header", in("request", "headers", settings{"X Token": "s3cret"}), []string{"request.headers", "X Token"}},
		{"bad value of a header", in("request", "headers", settings{"X-Token": "s3cret\r\nX-Other: 1"}), []string{"request.headers", "X-Token"}},
		{"header of the tap", in("request", "headers", settings{"x-tap-id": "s3cret"}), []string{"request.headers", "x-tap-id"}},
		{"headers that are no map", in("request", "headers", "Authorization: Bearer s3cret"), []string{"request.headers"}},
		{"header in a missing file", in("request", "headers", settings{"X-Token": "file:/no/such/file"}), []string{"request.headers", "X-Token", "/no/such/file"}},

		{"bad duration", in("request", "timeout", "5 apples"), []string{"request.timeout", "5 apples"}},
		{"negative duration", in("request", "timeout", "-1s"), []string{"request.timeout", "-1s"}},
		{"negative seconds", in("request", "timeout", -1), []string{"request.timeout", "-1"}},
		{"broken seconds", in("request", "timeout", "1.5"), []string{"request.timeout", "1.5"}},
		{"negative size", in("request", "maxRecordBodySize", "-2"), []string{"request.maxRecordBodySize", "-2"}},
		{"negative size of the body", in("response", "maxBodySize", -100), []string{"response.maxBodySize", "-100"}},
		{"size that is no number", in("exchange", "maxBodySize", "1MB"), []string{"exchange.maxBodySize"}},
		{"flag that is none", in("exchange", "recordBody", "sometimes"), []string{"exchange.recordBody"}},
		{"requestHeaders of requests", in("request", "requestHeaders", "X-Request-Id"), []string{"request.requestHeaders"}},
		{"requestHeaders of exchanges", in("exchange", "requestHeaders", []any{"X-Request-Id"}), []string{"exchange.requestHeaders"}},

		{"no attempt", in("request", "retry", settings{"attempts": "0"}), []string{"request.retry.attempts", "0"}},
		{"bad pause", in("request", "retry", settings{"attempts": 2, "initialInterval": "soon"}), []string{"request.retry.initialInterval", "soon"}},
		{"no record in a batch", in("request", "maxBatchSize", "0"), []string{"request.maxBatchSize", "0"}},
		{"fewer than none pending", in("request", "maxPending", -1), []string{"request.maxPending", "-1"}},
		{
			"pending and rejecting",
			settings{"request": settings{"service": "http://audit", "maxPending": 1, "rejectOnRecordError": true}},
			[]string{"request.maxPending", "request.rejectOnRecordError"},
		},
		{"tls without https", in("request", "tls", settings{}), []string{"request.tls", "https"}},
		{"authority that is none", secure(settings{"rootCAs": "-----BEGIN s3cret"}), []string{"request.tls.rootCAs"}},
		{"authority in a missing file", secure(settings{"rootCAs": "/no/such/file"}), []string{"request.tls.rootCAs"}},
		{"certificate without a key", secure(settings{"cert": "-----BEGIN s3cret"}), []string{"request.tls"}},
		{
			"key that is none", secure(settings{"cert": "-----BEGIN s3cret", "key": "-----BEGIN s3cret"}),
			[]string{"request.tls"},
		},
	}

	onBothEngines(t, func(t *testing.T, e engine) {
		for _, test := range cases {
			t.Run(test.name, func(t *testing.T) {
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()

				_, err := e.plugin.New(ctx, http.NotFoundHandler(), test.config, "audit@file")
				require.Error(t, err)
				for _, want := range test.want {
					// What cannot be decoded is found by Traefik, which writes Request.Timeout.
					if strings.Contains(err.Error(), "failed to decode configuration") {
						assert.Contains(t, strings.ToLower(err.Error()), strings.ToLower(want))
					} else {
						assert.Contains(t, err.Error(), want)
					}
				}
				assert.NotContains(t, err.Error(), "s3cret")
			})
		}
	})
}

// secure returns settings of requests with the given TLS settings.
func secure(config settings) settings {
	kind := withSecrets("https://127.0.0.1:1")
	kind["tls"] = config

	return settings{"request": kind}
}

func TestTap_TakesEverySettingThatIsRight(t *testing.T) {
	const service = "http://127.0.0.1:1"
	cases := []struct {
		name string
		kind settings
	}{
		{"service alone", settings{}},
		{"services with spaces and a comma too many", settings{"service": " http://a , http://b:9000/path/,"}},
		{"service with an IPv6 address", settings{"service": "https://[::1]:9000"}},
		{"scheme in capitals", settings{"service": "HTTP://audit"}},
		{"empty options", settings{"path": "", "timeout": "", "headers": settings{}, "retry": settings{}}},
		{"no limit of time", settings{"timeout": "0"}},
		{"no limit of time in numbers", settings{"timeout": 0.0}},
		{"seconds", settings{"timeout": 10}},
		{"minutes and seconds", settings{"timeout": "1m30s"}},
		{"no limits of size", settings{"recordBody": "true", "maxRecordBodySize": "-1", "maxBodySize": -1}},
		{"no bodies", settings{"recordBody": true, "maxRecordBodySize": 0.0, "maxBodySize": "0"}},
		{"empty value of a header", settings{"headers": settings{"X-Empty": ""}}},
		{"rejecting", settings{"rejectOnRecordError": "true"}},
		{"tls of the system", settings{"service": "https://audit", "tls": settings{}}},
		{"nothing pending and rejecting", settings{"rejectOnRecordError": true, "maxPending": "0"}},
	}

	onBothEngines(t, func(t *testing.T, e engine) {
		for _, test := range cases {
			t.Run(test.name, func(t *testing.T) {
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()

				kind := settings{"service": service}
				for name, value := range test.kind {
					kind[name] = value
				}
				handler, err := e.plugin.New(ctx, http.NotFoundHandler(), settings{"exchange": kind}, "audit@file")
				require.NoError(t, err)
				require.NotNil(t, handler)
			})
		}
	})
}

func TestTap_TakesANumberForSeconds(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		hang := make(chan struct{})
		endpoint := newReceiver(t, func(http.ResponseWriter, *http.Request) { <-hang })
		// Each has a path of its own, and so an endpoint of its own: not two lines are told of one within a second.
		taps := []*tapped{}
		for path, timeout := range map[string]any{"/text": "1", "/number": 1, "/float": 1.0, "/duration": "250ms"} {
			config := settings{"exchange": one(endpoint.URL, settings{"path": path, "timeout": timeout})}
			taps = append(taps, newTap(t, e, config, func(http.ResponseWriter, *http.Request) {}))
		}
		t.Cleanup(func() { close(hang) })

		pluginLog.take()
		for _, s := range taps {
			s.do(t, http.MethodGet, "/", nil)
		}
		for _, s := range taps {
			require.Nil(t, s.done(t))
		}
		told := strings.Join(pluginLog.take(), "\n")
		assert.Equal(t, 3, strings.Count(told, "within 1s"), told)
		assert.Equal(t, 1, strings.Count(told, "within 250ms"), told)
	})
}

func TestTap_KeepsSecretsOutOfTheLog(t *testing.T) {
	cut := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	t.Cleanup(cut.Close)
	refusing := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		http.Redirect(rw, &http.Request{}, "http://user:s3cret@127.0.0.1:1/", http.StatusServiceUnavailable)
	}))
	t.Cleanup(refusing.Close)
	unknown := httptest.NewUnstartedServer(nil)
	unknown.Config.ErrorLog = log.New(io.Discard, "", 0)
	unknown.StartTLS()
	t.Cleanup(unknown.Close)

	onBothEngines(t, func(t *testing.T, e engine) {
		for name, service := range map[string]string{"down": down, "cut": cut.URL, "refusing": refusing.URL, "of an unknown authority": unknown.URL} {
			t.Run(name, func(t *testing.T) {
				config := settings{"exchange": withSecrets(service)}
				config["exchange"].(settings)["path"] = "/" + e.name + "?token=s3cret"
				s := newTap(t, e, config, func(http.ResponseWriter, *http.Request) {})

				pluginLog.take()
				s.do(t, http.MethodGet, "/", nil, "Authorization", "s3cret")
				require.Nil(t, s.done(t))
				told := strings.Join(pluginLog.take(), "\n")
				assert.Contains(t, told, "Unable to send the exchange record")
				assert.Contains(t, told, "middlewareName=audit@file")
				assert.Contains(t, told, "middlewareType=Tap")
				assert.NotContains(t, told, "s3cret")
			})
		}
	})
}

func TestTap_MakesBasicAuthenticationOfTheUserInAURL(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newReceiver(t, nil)
		service := strings.Replace(endpoint.URL, "://", "://user%40x:p%3As3cret@", 1)
		s := newTap(t, e, settings{"exchange": one(service, nil)}, func(http.ResponseWriter, *http.Request) {})

		s.do(t, http.MethodGet, "/", nil)
		require.Nil(t, s.done(t))
		user, password, ok := (&http.Request{Header: endpoint.next(t).Header}).BasicAuth()
		assert.True(t, ok)
		assert.Equal(t, "user@x", user)
		assert.Equal(t, "p:s3cret", password)
	})
}
