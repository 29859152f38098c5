package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// plugin stands in for the checkout, so that these tests depend on the host alone.
const plugin = `package tap

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"strings"
)

type Direction struct {
	Service string
	Limit   *int64
	Reject  bool
	Headers map[string]string
	Unknown map[string]interface{} ` + "`mapstructure:\",remain\"`" + `
}

type Config struct {
	RedactHeaders []string
	Request       *Direction
	Response      *Direction
}

func CreateConfig() *Config { return &Config{} }

func New(_ context.Context, next http.Handler, config *Config, name string) (http.Handler, error) {
	for _, direction := range []*Direction{config.Request, config.Response} {
		if direction != nil && len(direction.Unknown) > 0 {
			return nil, errors.New("unknown option")
		}
	}
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		fmt.Println("to stdout", req.URL.Path)
		log.Println("to stderr", req.URL.Path)
		rw.Header().Add("Chain", name+":"+mark()+":"+describe(config))
		next.ServeHTTP(rw, req)
	}), nil
}

func describe(config *Config) string {
	return strings.Join(config.RedactHeaders, "+") + describeDirection(config.Request) + describeDirection(config.Response)
}

func describeDirection(direction *Direction) string {
	if direction == nil {
		return "|none"
	}
	limit := int64(-99)
	if direction.Limit != nil {
		limit = *direction.Limit
	}
	return fmt.Sprintf("|%s,%d,%v,%v", direction.Service, limit, direction.Reject, direction.Headers)
}
`

const pluginMark = `package tap

func mark() string { return "original" }
`

const pluginManifest = `displayName: Tap
type: middleware
import: github.com/traefik-tap/tap
summary: Stands in for the plugin.
testData: {}
`

func writePlugin(t *testing.T, manifest string) string {
	t.Helper()

	root := t.TempDir()
	for name, text := range map[string]string{
		"tap.go":       plugin,
		"mark.go":      pluginMark,
		"mark_test.go": "package tap\n\nthis is never read\n",
		".traefik.yml": manifest,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(root, name), []byte(text), 0o600))
	}
	return root
}

func interpretPlugin(t *testing.T, options Options) *Interpreted {
	t.Helper()

	interpreted, err := interpret(writePlugin(t, pluginManifest), options)
	require.NoError(t, err)
	return interpreted
}

const settingsYAML = `
http:
  routers:
    shop:
      rule: PathPrefix(` + "`/`" + `)
      middlewares: [audit]
      service: shop
  middlewares:
    audit:
      plugin:
        tap:
          redactHeaders: [Authorization, Cookie]
          request:
            service: http://audit:9000
            limit: -1
            reject: true
            headers:
              X-Key: "1"
          response:
            limit: 5
  services:
    shop:
      loadBalancer:
        servers:
          - url: http://shop:80
`

const settingsTOML = `
[http.routers.shop]
  rule = "PathPrefix(` + "`/`" + `)"
  middlewares = ["audit"]
  service = "shop"

[http.middlewares.audit.plugin.tap]
  redactHeaders = ["Authorization", "Cookie"]
  [http.middlewares.audit.plugin.tap.request]
    service = "http://audit:9000"
    limit = -1
    reject = true
    [http.middlewares.audit.plugin.tap.request.headers]
      X-Key = "1"
  [http.middlewares.audit.plugin.tap.response]
    limit = 5

[[http.services.shop.loadBalancer.servers]]
  url = "http://shop:80"
`

const settingsKubernetes = `
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: traefik.io/v1alpha1
kind: Middleware
metadata:
  name: audit
spec:
  plugin:
    tap:
      redactHeaders: [Authorization, Cookie]
      request:
        service: http://audit:9000
        limit: -1
        reject: true
        headers: {X-Key: "1"}
      response: {limit: 5}
`

const settingsJSON = `{"apiVersion": "traefik.io/v1alpha1", "kind": "Middleware", "metadata": {"name": "audit"}, "spec": {"plugin": {"tap": {
	"redactHeaders": ["Authorization", "Cookie"], "response": {"limit": 5},
	"request": {"service": "http://audit:9000", "limit": -1, "reject": true, "headers": {"X-Key": "1"}}}}}}`

var settingsLabels = map[string]string{
	"com.example.other": "ignored",
	"traefik.enable":    "true",
	"traefik.http.middlewares.audit.plugin.tap.redactHeaders":         "Authorization,Cookie",
	"traefik.http.middlewares.audit.plugin.tap.request.service":       "http://audit:9000",
	"traefik.http.middlewares.audit.plugin.tap.request.limit":         "-1",
	"traefik.http.middlewares.audit.plugin.tap.request.reject":        "true",
	"traefik.http.middlewares.audit.plugin.tap.request.headers.X-Key": "1",
	"traefik.http.middlewares.audit.plugin.tap.response.limit":        "5",
	"traefik.http.routers.shop.rule":                                  "PathPrefix(`/`)",
	"traefik.http.routers.shop.middlewares":                           "audit",
	"traefik.http.services.shop.loadbalancer.server.port":             "80",
}

func write(t *testing.T, name, text string) string {
	t.Helper()

	file := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

func TestDynamic_GivesTheSameSettingsFromEveryFormat(t *testing.T) {
	interpreted := interpretPlugin(t, Options{})

	formats := map[string]func() (*Dynamic, error){
		"YAML":            func() (*Dynamic, error) { return ReadDynamic(write(t, "dynamic.yml", settingsYAML)) },
		"TOML":            func() (*Dynamic, error) { return ReadDynamic(write(t, "dynamic.toml", settingsTOML)) },
		"labels":          func() (*Dynamic, error) { return FromLabels(settingsLabels) },
		"Kubernetes":      func() (*Dynamic, error) { return FromKubernetes([]byte(settingsKubernetes)) },
		"Kubernetes JSON": func() (*Dynamic, error) { return FromKubernetes([]byte(settingsJSON)) },
	}
	for name, read := range formats {
		t.Run(name, func(t *testing.T) {
			dynamic, err := read()
			require.NoError(t, err)
			config, err := dynamic.PluginConfig("audit")
			require.NoError(t, err)

			handler, err := interpreted.New(t.Context(), http.NotFoundHandler(), config, "audit@test")
			require.NoError(t, err)
			recorder := httptest.NewRecorder()
			handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/", nil))

			assert.Equal(t,
				"audit@test:original:Authorization+Cookie|http://audit:9000,-1,true,map[X-Key:1]|,5,false,map[]",
				recorder.Header().Get("Chain"))
		})
	}
}

// An empty block reaches the decoder of plugins as an empty string, from any provider but Kubernetes.
func TestReadDynamic_MakesAnEmptyBlockAString(t *testing.T) {
	empty := strings.Replace(settingsYAML, "response:\n            limit: 5", "response: {}", 1)
	dynamic, err := ReadDynamic(write(t, "dynamic.yml", empty))
	require.NoError(t, err)
	config, err := dynamic.PluginConfig("audit")
	require.NoError(t, err)

	assert.Empty(t, config["response"])
	assert.IsType(t, "", config["response"])
	_, err = interpretPlugin(t, Options{}).New(t.Context(), http.NotFoundHandler(), config, "audit@file")
	require.ErrorContains(t, err, "'Response' expected a map, got 'string'")
}

func TestReadDynamic_ReplacesTextAndRunsTemplates(t *testing.T) {
	t.Setenv("TAP_TEST_SERVICE", "http://from-environment:1")
	text := strings.Replace(settingsYAML, "http://audit:9000", `{{ env "TAP_TEST_SERVICE" }}`, 1)

	dynamic, err := ReadDynamic(write(t, "dynamic.yaml", text), "http://shop:80", "http://127.0.0.1:8080")
	require.NoError(t, err)

	assert.Equal(t, "http://127.0.0.1:8080", dynamic.HTTP.Services["shop"].LoadBalancer.Servers[0].URL)
	config, err := dynamic.PluginConfig("audit@file")
	require.NoError(t, err)
	assert.Equal(t, "http://from-environment:1", config["request"].(map[string]any)["service"])
}

func TestReadDynamic_RefusesWhatTheHostDoesNotKnow(t *testing.T) {
	_, err := ReadDynamic(write(t, "dynamic.yml", "http:\n  middlewares:\n    zip:\n      compress: {excludedContentTypes: [a]}\n"))
	require.ErrorContains(t, err, "compress")

	_, err = ReadDynamic(write(t, "dynamic.ini", settingsYAML))
	require.ErrorContains(t, err, ".ini")

	_, err = FromKubernetes([]byte("kind: Secret"))
	require.ErrorContains(t, err, "no resource of kind Middleware")
}

func TestInterpret_SplitsStandardOutputFromErrors(t *testing.T) {
	var stdout, stderr bytes.Buffer
	interpreted := interpretPlugin(t, Options{Stdout: &stdout, Stderr: &stderr})

	handler, err := interpreted.New(t.Context(), http.NotFoundHandler(), nil, "audit@file")
	require.NoError(t, err)
	handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/path", nil))

	assert.Equal(t, "to stdout /path\n", stdout.String())
	assert.Contains(t, stderr.String(), "to stderr /path\n")
	assert.NotContains(t, stderr.String(), "to stdout")
}

func TestInterpret_TakesOverlaysAndLeavesNoFiles(t *testing.T) {
	folder := t.TempDir()
	t.Setenv("TMPDIR", folder)
	interpreted := interpretPlugin(t, Options{Overlay: map[string]string{
		"mark.go":  "package tap\n\nfunc mark() string { return marked }\n",
		"added.go": "package tap\n\nvar marked string\n\nfunc init() { marked = \"overlaid\" }\n",
	}})

	handler, err := interpreted.New(t.Context(), http.NotFoundHandler(), nil, "audit@file")
	require.NoError(t, err)
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/", nil))

	assert.Contains(t, recorder.Header().Get("Chain"), "audit@file:overlaid:")
	assert.Empty(t, entriesWith(t, folder, "tap-gopath-"))
}

func entriesWith(t *testing.T, folder, prefix string) []string {
	t.Helper()

	found, err := filepath.Glob(filepath.Join(folder, prefix+"*"))
	require.NoError(t, err)
	return found
}

func TestInterpret_RefusesWhatTraefikRefuses(t *testing.T) {
	for removed, want := range map[string]string{
		"displayName: Tap":                   "displayName is missing",
		"type: middleware":                   `unsupported type ""`,
		"import: github.com/traefik-tap/tap": "import is missing",
		"summary: Stands in for the plugin.": "summary is missing",
		"testData: {}":                       "testData is missing",
	} {
		_, err := interpret(writePlugin(t, strings.Replace(pluginManifest, removed, "", 1)), Options{})
		assert.ErrorContains(t, err, want)
	}

	_, err := interpret(writePlugin(t, pluginManifest), Options{Overlay: map[string]string{"mark.go": "package tap\n\nfunc mark( {\n"}})
	require.ErrorContains(t, err, "importing")
}

func TestInterpreted_ReportsWrongSettings(t *testing.T) {
	interpreted := interpretPlugin(t, Options{})

	_, err := interpreted.New(t.Context(), http.NotFoundHandler(), map[string]any{"request": map[string]any{"limit": "many"}}, "audit@file")
	require.ErrorContains(t, err, "Limit")

	_, err = interpreted.New(t.Context(), http.NotFoundHandler(), map[string]any{"request": map[string]any{"typo": "1"}}, "audit@file")
	require.EqualError(t, err, "unknown option")
}

func TestBuild_RoutesByRuleThroughTheChainInOrder(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		_, _ = io.WriteString(rw, req.Header.Get("X-Forwarded-For")+" "+req.RequestURI)
	}))
	defer backend.Close()

	dynamic, err := ReadDynamic(write(t, "dynamic.yml", `
http:
  routers:
    all: {rule: "PathPrefix(`+"`/`"+`)", service: backend, middlewares: [one, two@file]}
    exact: {rule: "Path(`+"`/exact-path`"+`)", service: backend, middlewares: [two]}
    first: {rule: "Path(`+"`/first`"+`)", service: backend, priority: 100}
    never: {rule: "PathPrefix(`+"`/first`"+`)", service: backend, middlewares: [one]}
  middlewares:
    one: {plugin: {tap: {redactHeaders: [one]}}}
    two: {plugin: {tap: {redactHeaders: [two]}}}
  services:
    backend: {loadBalancer: {servers: [{url: "http://backend:80"}]}}
`), "http://backend:80", backend.URL)
	require.NoError(t, err)

	handler, err := dynamic.Build(t.Context(), interpretPlugin(t, Options{}))
	require.NoError(t, err)
	defer handler.CloseIdleConnections()

	for path, want := range map[string][]string{
		"/exact-path/not?a=1;b=%ff": {"one@file:original:one|none|none", "two@file:original:two|none|none"},
		"/exact-path":               {"two@file:original:two|none|none"},
		"/first":                    nil,
	} {
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))

		assert.Equal(t, want, recorder.Header()["Chain"], path)
		assert.Equal(t, "192.0.2.1 "+strings.ReplaceAll(path, ";", "&"), recorder.Body.String())
	}
}

func TestBuild_NamesWhatItCannotBuild(t *testing.T) {
	for changed, want := range map[[2]string]string{
		{"PathPrefix(`/`)", "Host(`shop`)"}:                   "router \"shop\": rule \"Host(`shop`)\": only Path(`/x`) and PathPrefix(`/x`) are supported here",
		{"middlewares: [audit]", "middlewares: [typo]"}:       `router "shop": middleware "typo@file" does not exist`,
		{"middlewares: [audit]", "middlewares: [audit@else]"}: `router "shop": middleware "audit@else" does not exist`,
		{"service: shop", "service: typo"}:                    `router "shop": service "typo" does not exist`,
		{"url: http://shop:80", `url: "shop:80"`}:             `router "shop": service "shop": not a URL of scheme http, https or h2c with a host: "shop:80"`,
		{"        tap:", "        other:"}:                    `router "shop": middleware "audit@file": its plugin is not called "tap"`,
		{"limit: -1", "typo: -1"}:                             `router "shop": middleware "audit@file": unknown option`,
	} {
		dynamic, err := ReadDynamic(write(t, "dynamic.yml", settingsYAML), changed[0], changed[1])
		require.NoError(t, err)

		_, err = dynamic.Build(t.Context(), interpretPlugin(t, Options{}))
		assert.EqualError(t, err, want)
	}
}

func TestProxy_AnswersByTheKindOfError(t *testing.T) {
	for want, err := range map[int]error{
		http.StatusBadGateway:          fmt.Errorf("reading the header: %w", io.EOF),
		http.StatusGatewayTimeout:      context.DeadlineExceeded,
		statusClientClosedRequest:      context.Canceled,
		http.StatusInternalServerError: errors.New("anything else"),
	} {
		recorder := httptest.NewRecorder()
		answerError(recorder, nil, err)
		assert.Equal(t, want, recorder.Code)
		assert.NotEmpty(t, recorder.Body.String())
	}
	assert.Equal(t, http.StatusBadGateway, statusOf(&net.OpError{Op: "dial", Err: errors.New("refused")}))
}

func TestProxy_TreatsRequestsLikeTraefik(t *testing.T) {
	received := make(chan *http.Request, 1)
	backend := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		received <- req
	}))
	backend.Config.Protocols = new(http.Protocols)
	backend.Config.Protocols.SetHTTP1(true)
	backend.Config.Protocols.SetUnencryptedHTTP2(true)
	backend.Start()
	defer backend.Close()

	for scheme, proto := range map[string]string{"http": "HTTP/1.1", "h2c": "HTTP/2.0"} {
		proxy, err := Proxy(strings.Replace(backend.URL, "http", scheme, 1) + "/ignored")
		require.NoError(t, err)

		req := httptest.NewRequest(http.MethodPost, "/a%2Fb?x=%20", io.MultiReader(strings.NewReader("body")))
		req.Host = "shop.example"
		req.Header.Set("X-Forwarded-For", "10.0.0.1")
		req.Header.Set("X-Forwarded-Proto", "https")
		req.Trailer = http.Header{"Checksum": {"1"}}
		proxy.ServeHTTP(httptest.NewRecorder(), req)
		proxy.CloseIdleConnections()

		// The server has answered after it had received the request, so there is nothing to wait for.
		require.Len(t, received, 1)
		got := <-received
		assert.Equal(t, proto, got.Proto)
		assert.Equal(t, "/a%2Fb?x=%20", got.RequestURI)
		assert.Equal(t, "shop.example", got.Host)
		assert.Equal(t, []string{"10.0.0.1, 192.0.2.1"}, got.Header["X-Forwarded-For"])
		assert.Equal(t, []string{"https"}, got.Header["X-Forwarded-Proto"])
		assert.Empty(t, got.Trailer.Get("Checksum"))
	}

	_, err := Proxy("ftp://example")
	require.ErrorContains(t, err, "ftp://example")
}

// The test data of the manifest is what Traefik's catalog builds the plugin with.
func TestCheckout_BuildsFromItsTestDataInBothEngines(t *testing.T) {
	manifest, err := readManifest(Root())
	require.NoError(t, err)
	interpreted, err := Interpret(Options{})
	require.NoError(t, err)

	for name, plugin := range map[string]Plugin{"compiled": Compiled(), "interpreted": interpreted} {
		t.Run(name, func(t *testing.T) {
			handler, err := plugin.New(t.Context(), http.NotFoundHandler(), manifest.TestData, "audit@file")
			require.NoError(t, err)
			assert.NotNil(t, handler)

			_, err = plugin.New(t.Context(), http.NotFoundHandler(), map[string]any{"typo": "1"}, "audit@file")
			assert.Error(t, err)
		})
	}
}
