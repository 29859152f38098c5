package tap

import (
	"net/http"
	"reflect"
	"regexp"
	"strings"
	"sync/atomic"
)

// spanlessLimit is after how many requests without a span an instance stops to look for one. Tracing is fixed for the life of
// the process, but a router can switch it off for itself.
const spanlessLimit = 16

// spanKey is the key under which OpenTelemetry keeps the span in a context, once a context with one has been seen. Its type is
// not exported, so it can only be found in a context that has it. It is the same for the whole process.
var spanKey atomic.Value

// traceparent is the header of W3C Trace Context, level 1: version ff is not valid, version 00 ends after the flags, and a later
// one may go on after another dash.
var traceparent = regexp.MustCompile(`^(?:00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}|(?:0[1-9a-f]|[1-9a-e][0-9a-f]|f[0-9a-e])-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?)$`)

// findTrace finds the id of the trace that a request belongs to: Traefik's own where there is one, else the client's.
// Traefik puts a traceparent on the request only on its way to the backend, so its own is in the context alone.
func findTrace(x *exchange, req *http.Request) {
	if x.handler.seeksSpans.Load() {
		x.traceID = spanTraceID(x.handler, req)
	}
	if x.traceID == "" {
		x.traceID = traceparentID(req.Header["Traceparent"])
	}
}

// traceparentID returns the trace id of a valid traceparent header, else "". None is not valid, nor are two.
func traceparentID(header []string) string {
	if len(header) != 1 {
		return ""
	}

	match := traceparent.FindStringSubmatch(header[0])
	if match == nil {
		return ""
	}

	trace, parent := match[1]+match[3], match[2]+match[4]
	if strings.Trim(trace, "0") == "" || strings.Trim(parent, "0") == "" {
		return ""
	}

	return trace
}

// spanTraceID returns the trace id of the span in the request's context, else "".
func spanTraceID(h *handler, req *http.Request) string {
	ctx := req.Context()
	key := spanKey.Load()
	if key == nil {
		if key = findSpanKey(reflect.ValueOf(ctx)); key != nil {
			spanKey.Store(key)
		}
	}

	id := ""
	if key != nil {
		id = idOfSpan(ctx.Value(key))
	}
	noteSpan(h, id != "")

	return id
}

// noteSpan remembers whether a request had a span.
func noteSpan(h *handler, found bool) {
	h.mu.Lock()
	defer h.mu.Unlock()

	if found {
		h.tracing = true
	} else {
		h.spanless++
	}
	h.seeksSpans.Store(h.tracing || h.spanless < spanlessLimit)
}

// findSpanKey follows a chain of contexts to the one that holds an OpenTelemetry span, and returns a key equal to its key, or nil.
// The fields of the standard library's contexts are not exported, but reflection may read them.
func findSpanKey(ctx reflect.Value) interface{} {
	for ctx.IsValid() {
		for ctx.Kind() == reflect.Interface || ctx.Kind() == reflect.Pointer {
			ctx = ctx.Elem()
		}
		if ctx.Kind() != reflect.Struct {
			return nil
		}

		if key := ctx.FieldByName("key"); key.Kind() == reflect.Interface && !key.IsNil() {
			if key = key.Elem(); key.Kind() == reflect.Int && strings.HasSuffix(key.Type().PkgPath(), "go.opentelemetry.io/otel/trace") {
				equal := reflect.New(key.Type()).Elem()
				equal.SetInt(key.Int())

				return equal.Interface()
			}
		}

		parent := ctx.FieldByName("Context")
		if !parent.IsValid() {
			// context.WithoutCancel names its parent so.
			parent = ctx.FieldByName("c")
		}
		ctx = parent
	}

	return nil
}

// idOfSpan returns the trace id of an OpenTelemetry span, else "". Its methods are called by reflection, and only those that are
// there: nothing else is known of its type.
func idOfSpan(span interface{}) string {
	spanContext := call(reflect.ValueOf(span), "SpanContext")
	if valid := call(spanContext, "HasTraceID"); valid.Kind() != reflect.Bool || !valid.Bool() {
		return ""
	}
	if id := call(call(spanContext, "TraceID"), "String"); id.Kind() == reflect.String {
		return id.String()
	}

	return ""
}

// call calls a method without parameters and returns its only result; the zero Value when there is no such method.
func call(value reflect.Value, name string) reflect.Value {
	if !value.IsValid() {
		return reflect.Value{}
	}

	method := value.MethodByName(name)
	if !method.IsValid() || method.Type().NumIn() != 0 || method.Type().NumOut() != 1 {
		return reflect.Value{}
	}

	return method.Call(nil)[0]
}
