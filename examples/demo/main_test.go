package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/BurntSushi/toml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
	"go.uber.org/goleak"
	"gopkg.in/yaml.v3"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

func TestDemo_EndsWellWithoutColoursInAFile(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "page"))
	require.NoError(t, err)
	defer func() { _ = file.Close() }()

	runErr := start(t.Context(), false, file)

	shown, err := os.ReadFile(file.Name())
	require.NoError(t, err)
	text := string(shown)
	require.NoError(t, runErr, text)
	for _, x := range exchanges() {
		assert.Contains(t, text, x.title)
		assert.Contains(t, text, x.short)
	}
	assert.Contains(t, text, "20 clients at once")
	assert.Contains(t, text, "All was as promised")
	assert.NotContains(t, text, "✗")
	assert.NotContains(t, text, "\x1b", "colours are for terminals")
}

func TestDemo_FailsWhenAPromiseIsBroken(t *testing.T) {
	const record, wait = "Both records say", "While an endpoint answers nothing"
	cases := map[string]struct {
		plugin altered
		broken []string
	}{
		"a record is lost": {
			altered{settings: func(config map[string]any) { delete(config, "response") }},
			[]string{record},
		},
		"a body is recorded longer than promised": {
			altered{settings: func(config map[string]any) { setAll(config, "maxRecordBodySize", "-1") }},
			[]string{record, "The application got all"},
		},
		"secrets are recorded": {
			altered{settings: func(config map[string]any) { config["redactHeaders"] = []string{} }},
			[]string{"No record has the cookie", "No record has the token"},
		},
		"requests are served unrecorded": {
			altered{settings: func(config map[string]any) { setAll(config, "rejectOnRecordError", "false") }},
			[]string{"The client got a clean 500", "audit-strict calls"},
		},
		"an upload is cut": {
			altered{wrap: cutBody},
			[]string{record, "The application got all"},
		},
		"events are held back": {
			altered{wrap: holdBack("/events")},
			[]string{"The client gets its answer"},
		},
		"clients wait for the endpoint": {
			altered{wrap: holdBack("/products")},
			[]string{wait},
		},
		"records go one by one": {
			altered{settings: func(config map[string]any) { setAll(config, "maxBatchSize", "1") }},
			[]string{"All 20 clients"},
		},
		"no second endpoint is tried": {
			altered{settings: keepFirstService},
			[]string{"All 20 clients", "The first endpoint of the list"},
		},
	}
	log := &logLines{}
	interpreted, err := host.Interpret(host.Options{Stderr: log})
	require.NoError(t, err)

	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			c.plugin.Plugin = interpreted
			d := &demo{plugin: c.plugin, log: log, page: page{out: &out, width: widest}, rounds: 1, slowRounds: 1, patience: 2 * time.Second}

			require.Error(t, d.run(t.Context()))

			text := escapes.ReplaceAllString(out.String(), "")
			for _, promise := range c.broken {
				assert.Contains(t, text, "✗ "+promise)
			}
			assert.NotContains(t, text, "All was as promised")
		})
	}
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;]*m")

// altered is a plugin that does not do what dynamic.yml asks for.
type altered struct {
	host.Plugin
	settings func(config map[string]any)
	wrap     func(next http.Handler) http.Handler
}

func (a altered) New(ctx context.Context, next http.Handler, config map[string]any, name string) (http.Handler, error) {
	// Another middleware would fail for want of a record.
	if a.settings != nil && (name == "audit@file" || config["response"] == nil) {
		if a.settings(config); len(config) == 0 {
			return next, nil
		}
	}
	handler, err := a.Plugin.New(ctx, next, config, name)
	if err == nil && a.wrap != nil {
		handler = a.wrap(handler)
	}

	return handler, err
}

// setAll sets an option of all kinds of records.
func setAll(config map[string]any, option, value string) {
	for _, kind := range []string{"request", "response", "exchange"} {
		if settings, ok := config[kind].(map[string]any); ok {
			settings[option] = value
		}
	}
}

// keepFirstService takes the other endpoints out of a list.
func keepFirstService(config map[string]any) {
	settings, _ := config["exchange"].(map[string]any)
	if services, ok := settings["service"].([]any); ok {
		settings["service"] = services[0]
	}
}

// holdBack keeps a response until the tap has delivered its records.
func holdBack(path string) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			if !strings.HasPrefix(req.URL.Path, path) {
				next.ServeHTTP(rw, req)
				return
			}
			held := httptest.NewRecorder()
			next.ServeHTTP(held, req)
			for name, values := range held.Header() {
				rw.Header()[name] = values
			}
			rw.WriteHeader(held.Code)
			_, _ = rw.Write(held.Body.Bytes())
		})
	}
}

// cutBody loses the end of a large upload.
func cutBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		if req.ContentLength > recordedBytes {
			req.ContentLength = recordedBytes
			req.Body = io.NopCloser(io.LimitReader(req.Body, recordedBytes))
		}
		next.ServeHTTP(rw, req)
	})
}

func TestServe_PrintsRecordsUntilInterrupted(t *testing.T) {
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	defer func() { _ = reader.Close() }()
	ctx, interrupt := context.WithTimeout(t.Context(), 30*time.Second)
	ended := make(chan error, 1)
	go func() {
		ended <- start(ctx, true, writer)
		_ = writer.Close()
	}()

	lines := bufio.NewScanner(reader)
	require.True(t, lines.Scan())
	url, _, _ := strings.Cut(lines.Text(), " ")
	response, err := http.Get(url + "/products/42")
	require.NoError(t, err)
	_, _ = io.Copy(io.Discard, response.Body)
	_ = response.Body.Close()
	http.DefaultClient.CloseIdleConnections()

	// The two records are delivered side by side.
	printed := ""
	wanted := []string{"request record", "GET /products/42", "response record", `{"id":42,"name":"teapot","price":18}`}
	for slices.ContainsFunc(wanted, func(want string) bool { return !strings.Contains(printed, want) }) {
		require.True(t, lines.Scan(), "printed was only: %s", printed)
		printed += lines.Text() + "\n"
	}
	interrupt()
	_, _ = io.Copy(io.Discard, reader)
	assert.NoError(t, <-ended)
}

func TestFileProvider_IsTheSameInYAMLAndTOML(t *testing.T) {
	folder := filepath.Join(host.Root(), "examples", "file-provider")

	fromYAML, err := host.ReadDynamic(filepath.Join(folder, "dynamic.yml"))
	require.NoError(t, err)
	fromTOML, err := host.ReadDynamic(filepath.Join(folder, "dynamic.toml"))
	require.NoError(t, err)
	assert.Equal(t, fromYAML, fromTOML)

	var inYAML, inTOML map[string]any
	text, err := os.ReadFile(filepath.Join(folder, "static.yml"))
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, &inYAML))
	_, err = toml.DecodeFile(filepath.Join(folder, "static.toml"), &inTOML)
	require.NoError(t, err)
	inYAML["providers"].(map[string]any)["file"].(map[string]any)["filename"] = "dynamic.toml"
	assert.Equal(t, inYAML, inTOML)
}
