package traefik_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik/traefik/v3/pkg/plugins"
)

// traefikLog is what Traefik would write to its log.
var traefikLog = &jsonLines{}

// logLine is a line of Traefik's log, by the names of its fields.
type logLine map[string]any

// jsonLines keeps the lines of a log in JSON. Every line is one write.
type jsonLines struct {
	mu    sync.Mutex
	lines []logLine
}

func (l *jsonLines) Write(p []byte) (int, error) {
	var line logLine
	if err := json.Unmarshal(p, &line); err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)

	return len(p), nil
}

// take returns the lines since the last take.
func (l *jsonLines) take() []logLine {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := l.lines
	l.lines = nil

	return lines
}

// ofPlugin returns the lines of the plugin since the last take.
func (l *jsonLines) ofPlugin() []logLine {
	return slices.DeleteFunc(l.take(), func(line logLine) bool { return line["plugin"] == nil })
}

// errors returns the errors since the last take.
func (l *jsonLines) errors() []error {
	var found []error
	for _, line := range l.take() {
		if line["level"] == zerolog.LevelErrorValue {
			found = append(found, fmt.Errorf("logged: %v: %v", line["message"], line["error"]))
		}
	}

	return found
}

func TestTap_LogsAFailedDeliveryAsAnErrorAtEachLevelThatShowsErrors(t *testing.T) {
	endpoint := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(http.StatusTeapot)
	}))
	t.Cleanup(endpoint.Close)
	config := settings{"exchange": settings{"service": endpoint.URL}}

	// ERROR is what Traefik logs without log.level.
	for level, want := range map[zerolog.Level]int{zerolog.DebugLevel: 1, zerolog.InfoLevel: 1, zerolog.ErrorLevel: 1, zerolog.FatalLevel: 0} {
		t.Run(level.String(), func(t *testing.T) {
			setLogLevel(t, level)
			started, err := load(map[string]plugins.LocalDescriptor{alias: {ModuleName: moduleName}})
			require.NoError(t, err)
			constructor, err := started.Build(alias, config, "audit@file")
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			handler, err := constructor(ctx, http.NotFoundHandler())
			require.NoError(t, err)
			traefikLog.take()

			answer := httptest.NewRecorder()
			handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/orders", nil))
			require.Equal(t, http.StatusNotFound, answer.Code)

			lines := traefikLog.ofPlugin()
			require.Len(t, lines, want)
			for _, line := range lines {
				assert.Equal(t, zerolog.LevelErrorValue, line["level"])
				assert.Equal(t, "plugin-"+alias, line["plugin"])
				assert.Equal(t, moduleName, line["module"])
				assert.Contains(t, line["message"], "audit@file")
				assert.Contains(t, line["message"], "tap service returned 418")
			}
		})
	}
}

// setLogLevel starts the log of a Traefik with another log.level, until the test ends.
func setLogLevel(t *testing.T, level zerolog.Level) {
	t.Helper()
	t.Cleanup(func() { setupLogger(zerolog.DebugLevel) })
	setupLogger(level)
}

func TestTap_LogsNothingWhenAllIsWell(t *testing.T) {
	endpoint := newEndpoint(t)
	handler := newTap(t, http.NotFoundHandler(), settings{"exchange": settings{"service": endpoint.URL}})
	traefikLog.ofPlugin()

	handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/orders", nil))

	endpoint.next(t)
	assert.Empty(t, traefikLog.ofPlugin())
}
