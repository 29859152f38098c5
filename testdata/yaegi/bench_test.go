package yaegi_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/cost"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

// allocations is how many the interpreted plugin takes for one exchange without a body, by the kinds that are recorded: with the
// delivery stubbed out, and with a POST for each record, in which those of net/http and of the endpoint are counted too. To renew
// them, take what this prints, without -race:
//
//	go test -run=TestCost -v .
var allocations = map[string]struct{ stubbed, delivered float64 }{
	"exchange":         {424, 658},
	"request+response": {506, 974},
}

// The compiled plugin has a guard of its own, in the plugin's package: its delivery can be stubbed out from there alone.
func TestCost_AllocationsForEachExchange(t *testing.T) {
	plugin := interpretStubbed(t)
	for kinds, want := range allocations {
		t.Run(kinds+"/stubbed", func(t *testing.T) {
			x := cost.NewExchange(0)
			handler := newStubbed(t, plugin, kinds, false, x)

			cost.CheckAllocations(t, want.stubbed, func() error { return x.Happen(handler) })
		})
		t.Run(kinds+"/delivered", func(t *testing.T) {
			endpoint := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				_, _ = io.Copy(io.Discard, req.Body)
				rw.WriteHeader(http.StatusNoContent)
			}))
			t.Cleanup(endpoint.Close)
			x := cost.NewExchange(0)
			handler := newWarm(t, interpretedPlugin, cost.Settings(kinds, endpoint.URL, nil), x)

			cost.CheckAllocations(t, want.delivered, func() error { return x.Happen(handler) })
		})
	}
}

// BenchmarkRecords measures the whole plugin with the delivery stubbed out: what it takes to copy and to describe an exchange, and
// to make JSON of it. Engine none is the handler behind the tap alone.
//
// The delivery of the compiled plugin is stubbed out when the go command is told so, as `make bench` does; otherwise it is left out.
func BenchmarkRecords(b *testing.B) {
	engines := []engine{{"none", nil}, {"interpreted", interpretStubbed(b)}}
	if compiled := host.Compiled(); deliversNothing(b, compiled) {
		engines = append(engines, engine{"compiled", compiled})
	}
	for _, size := range cost.Sizes() {
		for _, kinds := range cost.Kinds() {
			for _, e := range engines {
				b.Run("kind="+kinds+"/body="+size.Name+"/engine="+e.name, func(b *testing.B) {
					x := cost.NewExchange(size.Bytes)
					var handler http.Handler = x
					if e.plugin != nil {
						handler = newStubbed(b, e.plugin, kinds, size.Bytes > 0, x)
					}

					b.ReportAllocs()
					for b.Loop() {
						if err := x.Happen(handler); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

// interpretStubbed returns the interpreted plugin with the delivery stubbed out.
func interpretStubbed(tb testing.TB) host.Plugin {
	tb.Helper()
	name, text, err := cost.StubDelivery(host.Root())
	require.NoError(tb, err)
	plugin, err := host.Interpret(host.Options{Stderr: pluginLog, Overlay: map[string]string{name: text}})
	require.NoError(tb, err)
	require.True(tb, deliversNothing(tb, plugin))

	return plugin
}

// deliversNothing says whether the delivery of a plugin is stubbed out.
func deliversNothing(tb testing.TB, plugin host.Plugin) bool {
	tb.Helper()
	var delivered atomic.Bool
	endpoint := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { delivered.Store(true) }))
	defer endpoint.Close()

	x := cost.NewExchange(0)
	require.NoError(tb, x.Happen(newBare(tb, plugin, cost.Settings("exchange", endpoint.URL, nil), x)))

	return !delivered.Load()
}

// newStubbed puts a tap that delivers nothing in front of an exchange.
func newStubbed(tb testing.TB, plugin host.Plugin, kinds string, recordBody bool, x *cost.Exchange) http.Handler {
	tb.Helper()

	return newWarm(tb, plugin, cost.Settings(kinds, "http://endpoint.example", settings{"recordBody": recordBody}), x)
}

// newWarm puts a tap in front of an exchange, and lets it see that there is no tracing: it looks for that in its first requests alone.
func newWarm(tb testing.TB, plugin host.Plugin, config settings, x *cost.Exchange) http.Handler {
	tb.Helper()
	handler := newBare(tb, plugin, config, x)
	for range 20 {
		require.NoError(tb, x.Happen(handler))
	}

	return handler
}

// newBare puts a tap in front of a handler.
func newBare(tb testing.TB, plugin host.Plugin, config settings, next http.Handler) http.Handler {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	tb.Cleanup(cancel)
	handler, err := plugin.New(ctx, next, config, "audit@file")
	require.NoError(tb, err)

	return handler
}
