package yaegi_test

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

const (
	clientTraceID     = "4bf92f3577b34da6a3ce929d0e0e4736"
	clientTraceparent = "00-" + clientTraceID + "-00f067aa0ba902b7-01"
)

// withContext puts a context into the place of a request's, as a tracing middleware in front of the tap does.
func withContext(change func(ctx context.Context) context.Context) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			next.ServeHTTP(rw, req.WithContext(change(req.Context())))
		})
	}
}

// traced is a tap whose records tell the trace id.
type traced struct {
	*tapped
	endpoint *receiver
}

func newTraced(t *testing.T, e engine, change func(ctx context.Context) context.Context) *traced {
	t.Helper()
	endpoint := newReceiver(t, nil)
	next := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	s := serve(t, e, every(endpoint.URL, nil), next, withContext(change), nil)

	return &traced{tapped: s, endpoint: endpoint}
}

// traceID makes an exchange, and returns the trace id that all its records have.
func (s *traced) traceID(t *testing.T, header ...string) string {
	t.Helper()
	s.do(t, http.MethodGet, "/", nil, header...)
	require.Nil(t, s.done(t))
	records := s.endpoint.kinds(t, 3)
	id := records["exchange"].TraceID
	assert.Equal(t, id, records["request"].TraceID)
	assert.Equal(t, id, records["response"].TraceID)
	if id == "" {
		assert.NotContains(t, string(records["exchange"].Payload), "traceId")
	}

	return id
}

// newTracer returns a tracer of the SDK, with which spans are sampled or not.
func newTracer(t *testing.T, sampler sdktrace.Sampler) trace.Tracer {
	t.Helper()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSampler(sampler))
	t.Cleanup(func() { require.NoError(t, provider.Shutdown(context.Background())) })

	return provider.Tracer("router")
}

// withSpan returns a context with a span. It need not last longer to have an id.
func withSpan(ctx context.Context, tracer trace.Tracer) context.Context {
	ctx, span := tracer.Start(ctx, "router")
	span.End()

	return ctx
}

func remoteParent(t *testing.T) trace.SpanContext {
	t.Helper()
	id, err := trace.TraceIDFromHex("0af7651916cd43dd8448eb211c80319c")
	require.NoError(t, err)
	span, err := trace.SpanIDFromHex("b7ad6b7169203331")
	require.NoError(t, err)

	return trace.NewSpanContext(trace.SpanContextConfig{TraceID: id, SpanID: span, TraceFlags: trace.FlagsSampled, Remote: true})
}

func TestTap_RecordsTheTraceOfTheSpanInTheContext(t *testing.T) {
	sampled := newTracer(t, sdktrace.AlwaysSample())
	unsampled := newTracer(t, sdktrace.NeverSample())
	remote := remoteParent(t)
	type key string

	cases := []struct {
		name   string
		change func(ctx context.Context) context.Context
	}{
		{"a span", func(ctx context.Context) context.Context { return withSpan(ctx, sampled) }},
		{"a span with a remote parent", func(ctx context.Context) context.Context {
			return withSpan(trace.ContextWithRemoteSpanContext(ctx, remote), sampled)
		}},
		{"a remote parent alone", func(ctx context.Context) context.Context { return trace.ContextWithRemoteSpanContext(ctx, remote) }},
		{"a span that is not sampled", func(ctx context.Context) context.Context { return withSpan(ctx, unsampled) }},
		{"a span that does not record", func(ctx context.Context) context.Context { return trace.ContextWithSpanContext(ctx, remote) }},
		{"a span in a span", func(ctx context.Context) context.Context { return withSpan(withSpan(ctx, sampled), sampled) }},
		{"a span below other contexts", func(ctx context.Context) context.Context {
			ctx = context.WithValue(withSpan(ctx, sampled), key("a"), "b")
			ctx, cancel := context.WithTimeout(ctx, time.Hour)
			context.AfterFunc(ctx, cancel)
			ctx, cancelCause := context.WithCancelCause(context.WithValue(ctx, key("c"), nil))
			context.AfterFunc(ctx, func() { cancelCause(nil) })

			return ctx
		}},
		{"a span below a context that is not cancelled", func(ctx context.Context) context.Context {
			return context.WithValue(context.WithoutCancel(withSpan(ctx, sampled)), key("a"), "b")
		}},
	}

	onBothEngines(t, func(t *testing.T, e engine) {
		for _, test := range cases {
			t.Run(test.name, func(t *testing.T) {
				want := make(chan string, 1)
				s := newTraced(t, e, func(ctx context.Context) context.Context {
					ctx = test.change(ctx)
					want <- trace.SpanContextFromContext(ctx).TraceID().String()

					return ctx
				})

				for _, header := range [][]string{nil, {"Traceparent", clientTraceparent}} {
					id := s.traceID(t, header...)
					assert.Equal(t, <-want, id)
					assert.NotEqual(t, clientTraceID, id)
				}
			})
		}
	})
}

func TestTap_FallsBackToTheClientsTraceparent(t *testing.T) {
	cases := []struct {
		name   string
		change func(ctx context.Context) context.Context
	}{
		{"no span", func(ctx context.Context) context.Context { return ctx }},
		{"a span that does nothing", func(ctx context.Context) context.Context {
			ctx, _ = noop.NewTracerProvider().Tracer("router").Start(ctx, "router")

			return ctx
		}},
		{"a span without an id", func(ctx context.Context) context.Context { return trace.ContextWithSpan(ctx, noop.Span{}) }},
		{"no value for the span", func(ctx context.Context) context.Context { return trace.ContextWithSpan(ctx, nil) }},
		{"a context of another make", func(ctx context.Context) context.Context { return &ownContext{ctx} }},
	}
	tracer := newTracer(t, sdktrace.AlwaysSample())

	onBothEngines(t, func(t *testing.T, e engine) {
		// With the key of the span unknown, where this test runs alone, and known.
		for _, known := range []string{"at first", "after a span"} {
			for _, test := range cases {
				t.Run(test.name+" "+known, func(t *testing.T) {
					s := newTraced(t, e, test.change)
					assert.Empty(t, s.traceID(t))
					assert.Equal(t, clientTraceID, s.traceID(t, "Traceparent", clientTraceparent))
				})
			}
			s := newTraced(t, e, func(ctx context.Context) context.Context { return withSpan(ctx, tracer) })
			assert.NotEmpty(t, s.traceID(t))
		}
	})
}

// ownContext is a context that embeds another one, as gin's and others' do.
type ownContext struct {
	context.Context //nolint:containedctx // That is what is tried.
}

// One router may switch tracing off for itself: its instance stops to look for spans, and no other one does.
func TestTap_StopsToLookForSpansWhereThereAreNone(t *testing.T) {
	tracer := newTracer(t, sdktrace.AlwaysSample())
	newSwitched := func(t *testing.T, e engine) (s *traced, on *atomic.Bool) {
		t.Helper()
		on = &atomic.Bool{}
		s = newTraced(t, e, func(ctx context.Context) context.Context {
			if !on.Load() {
				return ctx
			}

			return withSpan(ctx, tracer)
		})

		return s, on
	}

	onBothEngines(t, func(t *testing.T, e engine) {
		t.Run("not before 16 requests", func(t *testing.T) {
			s, on := newSwitched(t, e)
			for range 15 {
				require.Empty(t, s.traceID(t))
			}
			on.Store(true)
			require.NotEmpty(t, s.traceID(t))

			// A span has been seen: there will be others, however long it takes.
			on.Store(false)
			for range 40 {
				require.Empty(t, s.traceID(t))
			}
			require.Equal(t, clientTraceID, s.traceID(t, "Traceparent", clientTraceparent))
			on.Store(true)
			require.NotEmpty(t, s.traceID(t))
		})
		t.Run("after 16 requests, for itself alone", func(t *testing.T) {
			s, on := newSwitched(t, e)
			for range 16 {
				require.Empty(t, s.traceID(t))
			}
			on.Store(true)
			assert.Empty(t, s.traceID(t))
			assert.Equal(t, clientTraceID, s.traceID(t, "Traceparent", clientTraceparent))

			other, otherOn := newSwitched(t, e)
			otherOn.Store(true)
			assert.NotEmpty(t, other.traceID(t))
		})
	})
}

func TestTap_TakesNoTraceIDFromAnInvalidTraceparent(t *testing.T) {
	const (
		parent  = "00f067aa0ba902b7"
		noTrace = "00000000000000000000000000000000"
	)
	cases := []struct {
		name    string
		headers []string
		valid   bool
	}{
		{"sampled", []string{clientTraceparent}, true},
		{"not sampled", []string{"00-" + clientTraceID + "-" + parent + "-00"}, true},
		{"unknown flags", []string{"00-" + clientTraceID + "-" + parent + "-ff"}, true},
		{"white space around it", []string{" \t" + clientTraceparent + "\t "}, true},
		{"a later version", []string{"01-" + clientTraceID + "-" + parent + "-01"}, true},
		{"the last version", []string{"fe-" + clientTraceID + "-" + parent + "-01"}, true},
		{"a later version with more", []string{"cc-" + clientTraceID + "-" + parent + "-01-what the future will be like"}, true},
		{"a later version with a dash", []string{"cc-" + clientTraceID + "-" + parent + "-01-"}, true},

		{"empty", []string{""}, false},
		{"two headers", []string{clientTraceparent, clientTraceparent}, false},
		{"two in one header", []string{clientTraceparent + "," + clientTraceparent}, false},
		{"version ff", []string{"ff-" + clientTraceID + "-" + parent + "-01"}, false},
		{"version 00 with more", []string{clientTraceparent + "-01"}, false},
		{"version 00 with a dash", []string{clientTraceparent + "-"}, false},
		{"a later version with more and no dash", []string{"cc-" + clientTraceID + "-" + parent + "-01.what"}, false},
		{"version in capitals", []string{"CC-" + clientTraceID + "-" + parent + "-01"}, false},
		{"version of one digit", []string{"0-" + clientTraceID + "-" + parent + "-01"}, false},
		{"version that is no number", []string{"xx-" + clientTraceID + "-" + parent + "-01"}, false},
		{"trace id of zeros", []string{"00-" + noTrace + "-" + parent + "-01"}, false},
		{"parent id of zeros", []string{"00-" + clientTraceID + "-0000000000000000-01"}, false},
		{"trace id in capitals", []string{"00-" + strings.ToUpper(clientTraceID) + "-" + parent + "-01"}, false},
		{"parent id in capitals", []string{"00-" + clientTraceID + "-" + strings.ToUpper(parent) + "-01"}, false},
		{"trace id too short", []string{"00-" + clientTraceID[1:] + "-" + parent + "-01"}, false},
		{"trace id too long", []string{"00-0" + clientTraceID + "-" + parent + "-01"}, false},
		{"parent id too short", []string{"00-" + clientTraceID + "-" + parent[1:] + "-01"}, false},
		{"no hex digits", []string{"00-" + clientTraceID[1:] + "g-" + parent + "-01"}, false},
		{"flags too short", []string{"00-" + clientTraceID + "-" + parent + "-1"}, false},
		{"flags in capitals", []string{"00-" + clientTraceID + "-" + parent + "-0A"}, false},
		{"flags that are no number", []string{"00-" + clientTraceID + "-" + parent + "-0x"}, false},
		{"no flags", []string{"00-" + clientTraceID + "-" + parent}, false},
		{"no dashes", []string{"00" + clientTraceID + parent + "01"}, false},
		{"another letter in front", []string{"x" + clientTraceparent}, false},
		{"bytes of no UTF-8", []string{"00-" + clientTraceID + "-" + parent + "-\xff\xff"}, false},
	}

	onBothEngines(t, func(t *testing.T, e engine) {
		s := newTraced(t, e, func(ctx context.Context) context.Context { return ctx })
		for _, test := range cases {
			t.Run(test.name, func(t *testing.T) {
				var header []string
				for _, value := range test.headers {
					header = append(header, "traceparent", value)
				}
				want := ""
				if test.valid {
					want = clientTraceID
				}
				assert.Equal(t, want, s.traceID(t, header...))
			})
		}
	})
}
