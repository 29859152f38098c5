package tap

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/cost"
)

// allocations is how many one exchange without a body takes, by the kinds that are recorded: those of the compiled plugin, the POST
// included, but not those of net/http's transport. To renew them, take what this prints, without -race:
//
//	go test -run=TestCost -v .
var allocations = map[string]float64{
	"exchange":         72,
	"request+response": 98,
}

func TestCost_AllocationsForEachExchange(t *testing.T) {
	for kinds, want := range allocations {
		t.Run(kinds, func(t *testing.T) {
			x := cost.NewExchange(0)
			handler := newStubbed(t, kinds, false, x)

			cost.CheckAllocations(t, want, func() error { return x.Happen(handler) })
		})
	}
}

// BenchmarkTap measures the compiled plugin as a whole, from the request to the answer to its records, with net/http's transport
// stubbed out: nothing is sent. Kind none is the handler behind the tap alone.
func BenchmarkTap(b *testing.B) {
	for _, size := range cost.Sizes() {
		for _, kinds := range append([]string{"none"}, cost.Kinds()...) {
			b.Run("kind="+kinds+"/body="+size.Name, func(b *testing.B) {
				x := cost.NewExchange(size.Bytes)
				var handler http.Handler = x
				if kinds != "none" {
					handler = newStubbed(b, kinds, size.Bytes > 0, x)
				}

				b.ReportAllocs()
				b.ResetTimer()
				for i := 0; i < b.N; i++ {
					if err := x.Happen(handler); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// stubs counts the endpoints of newStubbed.
var stubs int

// newStubbed returns a tap in front of next, whose transports accept all that they are given at once.
func newStubbed(tb testing.TB, kinds string, recordBody bool, next http.Handler) http.Handler {
	tb.Helper()

	// One endpoint for each tap: those of the same settings share it, and the last one may not have been released yet.
	stubs++
	text, err := json.Marshal(cost.Settings(kinds, fmt.Sprintf("http://endpoint.example/%d", stubs), map[string]any{"recordBody": recordBody}))
	require.NoError(tb, err)
	config := CreateConfig()
	require.NoError(tb, json.Unmarshal(text, config))

	ctx, cancel := context.WithCancel(context.Background())
	tb.Cleanup(cancel)
	h, err := New(ctx, next, config, "audit@file")
	require.NoError(tb, err)

	// All kinds have the same settings, and so the same endpoint.
	for _, k := range []*kind{h.(*handler).request, h.(*handler).response, h.(*handler).exchange} {
		if k != nil {
			e := k.source.endpoint
			e.targets[0].transport.RegisterProtocol("http", accepting{})
			// A client starts a goroutine for the timeout of a transport that it does not know.
			e.client.Timeout = 0

			break
		}
	}

	return h
}

// accepting is a transport whose endpoint accepts everything.
type accepting struct{}

// RoundTrip implements http.RoundTripper.
func (accepting) RoundTrip(req *http.Request) (*http.Response, error) {
	_, _ = io.Copy(io.Discard, req.Body)
	_ = req.Body.Close()

	return &http.Response{StatusCode: http.StatusNoContent, Body: http.NoBody, Request: req}, nil
}
