package yaegi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/records"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

// The compiled plugin is held against the same golden records by TestRecord_EqualsTheGoldenRecord of the plugin's own package:
// only there can its id and time be fixed. `go test -run TestRecord -update .` in that folder writes them anew.
func TestTap_InterpretedMakesTheGoldenRecords(t *testing.T) {
	fixed := fmt.Sprintf(`package tap

import "time"

func init() {
	at := time.Unix(0, %d).In(time.FixedZone("", 2*60*60))
	now = func() time.Time { return at }
	since = func(started time.Time) time.Duration { return at.Sub(started) }
	newIDs = func() string { return %q }
}
`, records.Time.UnixNano(), records.ID)
	plugin, err := host.Interpret(host.Options{Stderr: pluginLog, Overlay: map[string]string{"fixed.go": fixed}})
	require.NoError(t, err)
	exchanges, err := records.Read("../records")
	require.NoError(t, err)

	for _, x := range exchanges {
		t.Run(x.Name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()

			got, err := x.Record(func(text []byte, next http.Handler) (http.Handler, error) {
				config := settings{}
				if err := json.Unmarshal(text, &config); err != nil {
					return nil, err
				}

				return plugin.New(ctx, next, config, "audit@file")
			})
			require.NoError(t, err)

			want, err := os.ReadFile(x.Golden)
			require.NoError(t, err)
			assert.Equal(t, string(want), string(got))
		})
	}
}

// Without servers in front and behind, which would only make it slower.
func TestTap_MixesNothingUpUnderLoad(t *testing.T) {
	const clients = 32

	onBothEngines(t, func(t *testing.T, e engine) {
		// It is the interpreter that has mixed up goroutines before.
		exchanges := 10_000
		if e.name == "compiled" {
			exchanges = 2_000
		}
		endpoint := newReceiver(t, nil)
		proxy := &httputil.ReverseProxy{Rewrite: func(*httputil.ProxyRequest) {}, Transport: answering{}}
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		handler, err := e.plugin.New(ctx, proxy, settings{"exchange": one(endpoint.URL, nil)}, "audit@file")
		require.NoError(t, err)

		var last atomic.Int64
		var working sync.WaitGroup
		for range clients {
			working.Go(func() {
				for n := last.Add(1); n <= int64(exchanges) && !t.Failed(); n = last.Add(1) {
					body := numberedBody(n)
					req := httptest.NewRequest(http.MethodPost, fmt.Sprintf("/%d", n), bytes.NewReader(body))
					answer := httptest.NewRecorder()
					handler.ServeHTTP(answer, req)
					assert.Equal(t, "answer to "+string(body), answer.Body.String())
				}
			})
		}
		working.Wait()
		require.False(t, t.Failed())

		ids, urls := map[string]bool{}, map[string]bool{}
		for range exchanges {
			record := endpoint.next(t)
			n, err := strconv.ParseInt(record.Request.URL[1:], 10, 64)
			require.NoError(t, err)
			require.Equal(t, string(numberedBody(n)), string(record.Request.Body))
			require.Equal(t, "answer to "+string(record.Request.Body), string(record.Response.Body))
			ids[record.ID], urls[record.Request.URL] = true, true
		}
		assert.Len(t, ids, exchanges)
		assert.Len(t, urls, exchanges)
		endpoint.none(t)
	})
}

// answering is a backend in the place of a transport.
type answering struct{}

func (answering) RoundTrip(req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	answer := append([]byte("answer to "), body...)

	return &http.Response{StatusCode: http.StatusOK, ContentLength: int64(len(answer)), Body: io.NopCloser(bytes.NewReader(answer))}, nil
}

// numberedBody returns a body that no other number has. Its length differs from that of its neighbours.
func numberedBody(n int64) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "<%d>", n), 1+int(n%50))
}
