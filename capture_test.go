package tap

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// of returns settings of one kind of record, with bodies up to a limit.
func of(kind, service string, limit int64, reject bool) *Config {
	config := &RecordConfig{Service: []string{service}, RecordBody: true, MaxRecordBodySize: &limit, RejectOnRecordError: reject}
	switch kind {
	case kindRequest:
		return &Config{Request: config}
	case kindResponse:
		return &Config{Response: config}
	default:
		return &Config{Exchange: config}
	}
}

// everyWay runs a test for the kinds that record a body of the given half, with and without reject.
func everyWay(t *testing.T, half string, test func(t *testing.T, kind string, reject bool)) {
	t.Helper()
	for _, kind := range []string{half, kindExchange} {
		for _, reject := range []bool{false, true} {
			t.Run(kind+" reject="+strconv.FormatBool(reject), func(t *testing.T) { test(t, kind, reject) })
		}
	}
}

// givenBody is the body that a server gave, or a middleware in front.
type givenBody struct {
	io.Reader
	closed int
	err    error
}

func (b *givenBody) Close() error {
	b.closed++

	return b.err
}

func TestRequestBody_IsAFaithfulReader(t *testing.T) {
	content := strings.Repeat("0123456789", 100)
	readers := map[string]func() io.Reader{
		"as it comes": func() io.Reader { return strings.NewReader(content) },
		"bytes":       func() io.Reader { return iotest.OneByteReader(strings.NewReader(content)) },
		"halves":      func() io.Reader { return iotest.HalfReader(strings.NewReader(content)) },
		// iotest.DataErrReader does not return from a read of no bytes.
		"end with bytes": func() io.Reader { return endsWithBytes{strings.NewReader(content)} },
	}
	everyWay(t, kindRequest, func(t *testing.T, kind string, reject bool) {
		endpoint := newRecorder(t)
		for _, limit := range []int64{0, 1, 999, 1000, 1001, -1} {
			handler := newHandler(t, of(kind, endpoint.url, limit, reject), func(_ http.ResponseWriter, req *http.Request) {
				assert.NoError(t, iotest.TestReader(onlyReader{req.Body}, []byte(content)))
			})
			for name, reader := range readers {
				for _, length := range []int64{-1, 1000} {
					req := httptest.NewRequest(http.MethodPost, "/", reader())
					req.ContentLength = length
					handler.ServeHTTP(httptest.NewRecorder(), req)

					want := content
					if limit >= 0 && limit < 1000 {
						want = content[:limit]
					}
					got := endpoint.next(t).Request
					assert.Equal(t, want, string(got.Body), "%s, limit %d", name, limit)
					// With a limit of 0 nothing of the body is recorded, cut or not.
					assert.Equal(t, limit > 0 && limit < 1000, got.BodyTruncated, "%s, limit %d", name, limit)
				}
			}
		}
	})
}

// endsWithBytes returns the end together with the last bytes.
type endsWithBytes struct {
	left *strings.Reader
}

func (r endsWithBytes) Read(p []byte) (int, error) {
	n, err := r.left.Read(p)
	if r.left.Len() == 0 {
		err = io.EOF
	}

	return n, err
}

// onlyReader hides what a reader can besides.
type onlyReader struct {
	io.Reader
}

func TestRequestBody_PassesAnErrorOnAsItIs(t *testing.T) {
	broken := errors.New("broken")
	for _, kind := range []string{kindRequest, kindExchange} {
		endpoint := newRecorder(t)
		body := &givenBody{Reader: io.MultiReader(strings.NewReader("half"), iotest.ErrReader(broken)), err: errors.New("closed badly")}
		handler := newHandler(t, of(kind, endpoint.url, 100, false), func(_ http.ResponseWriter, req *http.Request) {
			for i := 0; i < 2; i++ { // The second time too.
				_, err := io.ReadAll(req.Body)
				assert.Same(t, broken, err)
			}
			assert.Same(t, body.err, req.Body.Close())
		})
		req := httptest.NewRequest(http.MethodPost, "/", http.NoBody)
		req.Body, req.ContentLength = body, 8

		handler.ServeHTTP(httptest.NewRecorder(), req)
		got := endpoint.next(t).Request
		assert.Equal(t, "half", string(got.Body))
		assert.True(t, got.BodyTruncated)
		assert.Equal(t, 1, body.closed)
	}
}

func TestRequestBody_IsNotReadAheadWithoutReject(t *testing.T) {
	for _, kind := range []string{kindRequest, kindExchange} {
		endpoint := newRecorder(t)
		body := &givenBody{Reader: iotest.ErrReader(errors.New("it was read"))}
		handler := newHandler(t, of(kind, endpoint.url, 100, false), func(rw http.ResponseWriter, req *http.Request) {
			n, err := req.Body.Read(nil)
			assert.Zero(t, n)
			assert.EqualError(t, err, "it was read", "only when it is asked for")
			rw.WriteHeader(http.StatusAccepted)
		})
		req := httptest.NewRequest(http.MethodPost, "/", http.NoBody)
		req.Body, req.ContentLength = body, -1

		rw := httptest.NewRecorder()
		handler.ServeHTTP(rw, req)
		assert.Equal(t, http.StatusAccepted, rw.Code)
		got := endpoint.next(t).Request
		assert.Empty(t, got.Body)
		assert.True(t, got.BodyTruncated)
	}
}

// A transport may read on in a goroutine of its own.
func TestRequestBody_IsFrozenWhenTheHandlerReturns(t *testing.T) {
	everyWay(t, kindRequest, func(t *testing.T, kind string, reject bool) {
		endpoint := newRecorder(t)
		begun, over := make(chan struct{}), make(chan struct{})
		var reading sync.WaitGroup
		handler := newHandler(t, of(kind, endpoint.url, 1<<20, reject), func(_ http.ResponseWriter, req *http.Request) {
			body := req.Body
			reading.Add(1)
			go func() {
				defer reading.Done()
				piece := make([]byte, 10)
				_, err := io.ReadFull(body, piece)
				assert.NoError(t, err)
				close(begun)
				for done := false; !done; {
					_, err := body.Read(piece)
					assert.NoError(t, err)
					select {
					case <-over:
						done = true
					default:
					}
				}
				assert.NoError(t, body.Close())
			}()
			<-begun
		})
		given := &givenBody{Reader: endless{}}
		if reject {
			// It is read ahead up to the limit and one byte more.
			given.Reader = io.MultiReader(io.LimitReader(endless{}, 1<<21), endless{})
		}
		req := httptest.NewRequest(http.MethodPost, "/", http.NoBody)
		req.Body, req.ContentLength = given, -1

		handler.ServeHTTP(httptest.NewRecorder(), req)
		close(over)
		reading.Wait()
		got := endpoint.next(t).Request
		assert.GreaterOrEqual(t, len(got.Body), 10)
		assert.Equal(t, strings.Repeat("x", len(got.Body)), string(got.Body))
		assert.True(t, got.BodyTruncated)
		assert.Equal(t, 1, given.closed)
		assert.Empty(t, endpoint.posts)
	})
}

// endless is a reader of which there is always more.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}

	return len(p), nil
}

func TestRequestBody_IsLeftAloneWhereThereIsNone(t *testing.T) {
	empty := &givenBody{Reader: strings.NewReader("")}
	everyWay(t, kindRequest, func(t *testing.T, kind string, reject bool) {
		for name, c := range map[string]struct {
			body   io.ReadCloser
			length int64
		}{
			"nil":                           {nil, 0},
			"nil of unknown length":         {nil, -1},
			"http.NoBody":                   {http.NoBody, 0},
			"http.NoBody of unknown length": {http.NoBody, -1},
			"a length of 0":                 {empty, 0},
		} {
			endpoint := newRecorder(t)
			handler := newHandler(t, of(kind, endpoint.url, 100, reject), func(_ http.ResponseWriter, req *http.Request) {
				assert.Equal(t, c.body, req.Body, name)
				assert.Equal(t, c.length, req.ContentLength, name)
				assert.Equal(t, "100-continue", req.Header.Get("Expect"), name)
			})
			req := httptest.NewRequest(http.MethodPost, "/", nil)
			req.Body, req.ContentLength = c.body, c.length
			req.Header.Set("Expect", "100-continue")

			handler.ServeHTTP(httptest.NewRecorder(), req)
			assert.NotContains(t, endpoint.next(t).payload, `"body`, name)
		}
	})
	assert.Zero(t, empty.closed)
}

func TestRequestBody_KeepsItsLength(t *testing.T) {
	everyWay(t, kindRequest, func(t *testing.T, kind string, reject bool) {
		endpoint := newRecorder(t)
		handler := newHandler(t, of(kind, endpoint.url, 2, reject), func(_ http.ResponseWriter, req *http.Request) {
			assert.EqualValues(t, 4, req.ContentLength)
			assert.Equal(t, "4", req.Header.Get("Content-Length"))
			assert.Nil(t, req.TransferEncoding)
		})
		req := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("ping"))
		req.Header.Set("Content-Length", "4")

		handler.ServeHTTP(httptest.NewRecorder(), req)
		endpoint.next(t)
	})
}

// plainWriter is a writer that can do no more than it must, and notes what it is told.
type plainWriter struct {
	header   http.Header
	statuses []int
	body     strings.Builder
	// room is how many bytes it takes, err what it says of more.
	room int
	err  error
}

func newPlainWriter() *plainWriter {
	return &plainWriter{header: http.Header{}, room: 1 << 30}
}

// Header implements http.ResponseWriter.
func (w *plainWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *plainWriter) WriteHeader(status int) { w.statuses = append(w.statuses, status) }

// Write implements http.ResponseWriter.
func (w *plainWriter) Write(p []byte) (int, error) {
	if len(p) > w.room {
		n, _ := w.body.Write(p[:w.room])
		w.room = 0

		return n, w.err
	}
	w.room -= len(p)

	return w.body.Write(p)
}

func TestResponseWriter_TakesTheFirstFinalStatus(t *testing.T) {
	cases := map[string]struct {
		next http.HandlerFunc
		// passed are the statuses that reach the client: those of a held response without the informational ones.
		passed []int
		status int
		body   string
	}{
		"nothing":       {discard, nil, 200, ""},
		"a body alone":  {writes("a", "b"), []int{200}, 200, "ab"},
		"no bytes":      {writes(""), []int{200}, 200, ""},
		"two statuses":  {statuses(201, 500), []int{201}, 201, ""},
		"three":         {statuses(404, 404, 200), []int{404}, 404, ""},
		"informational": {statuses(100, 102, 103, 204), []int{100, 102, 103, 204}, 204, ""},
		"informational, too late": {func(rw http.ResponseWriter, _ *http.Request) {
			statuses(103, 200, 500)(rw, nil)
			writes("body")(rw, nil)
		}, []int{103, 200}, 200, "body"},
		"a status after the body": {func(rw http.ResponseWriter, _ *http.Request) {
			writes("body")(rw, nil)
			rw.WriteHeader(http.StatusInternalServerError)
		}, []int{200}, 200, "body"},
	}
	everyWay(t, kindResponse, func(t *testing.T, kind string, reject bool) {
		for name, c := range cases {
			endpoint := newRecorder(t)
			rw := newPlainWriter()
			newHandler(t, of(kind, endpoint.url, 100, reject), c.next).ServeHTTP(rw, httptest.NewRequest(http.MethodGet, "/", nil))

			passed := c.passed
			if reject {
				passed = finalOf(passed)
			}
			assert.Equal(t, passed, rw.statuses, name)
			assert.Equal(t, c.body, rw.body.String(), name)
			got := endpoint.next(t).Response
			assert.Equal(t, c.status, got.Status, name)
			assert.Equal(t, c.body, string(got.Body), name)
		}
	})
}

func statuses(all ...int) http.HandlerFunc {
	return func(rw http.ResponseWriter, _ *http.Request) {
		for _, status := range all {
			rw.WriteHeader(status)
		}
	}
}

func writes(pieces ...string) http.HandlerFunc {
	return func(rw http.ResponseWriter, _ *http.Request) {
		for _, piece := range pieces {
			_, _ = rw.Write([]byte(piece))
		}
	}
}

func finalOf(all []int) []int {
	var final []int
	for _, status := range all {
		if status >= 200 {
			final = append(final, status)
		}
	}

	return final
}

func TestResponseWriter_RecordsTheHeadersOfTheStatus(t *testing.T) {
	everyWay(t, kindResponse, func(t *testing.T, kind string, reject bool) {
		endpoint := newRecorder(t)
		rw := newPlainWriter()
		rw.header.Set("X-In-Front", "1")
		newHandler(t, of(kind, endpoint.url, 100, reject), func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("X-Set", "1")
			rw.WriteHeader(http.StatusOK)
			rw.Header().Set("X-Set", "2")
			rw.Header().Set("X-Late", "2")
			_, _ = rw.Write([]byte("body"))
		}).ServeHTTP(rw, httptest.NewRequest(http.MethodGet, "/", nil))

		assert.Equal(t, http.Header{"X-In-Front": {"1"}, "X-Set": {"1"}}, endpoint.next(t).Response.Headers)
	})
}

func TestResponseWriter_TellsTheHandlerWhatWasTaken(t *testing.T) {
	full := errors.New("the disk of the client is full")
	for _, kind := range []string{kindResponse, kindExchange} {
		for _, length := range []string{"", "8", "many"} {
			endpoint := newRecorder(t)
			rw := newPlainWriter()
			rw.room, rw.err = 6, full
			newHandler(t, of(kind, endpoint.url, 100, false), func(rw http.ResponseWriter, _ *http.Request) {
				if length != "" {
					rw.Header().Set("Content-Length", length)
				}
				n, err := rw.Write([]byte("0123"))
				assert.NoError(t, err)
				assert.Equal(t, 4, n)
				n, err = rw.Write([]byte("4567"))
				assert.Same(t, full, err)
				assert.Equal(t, 2, n)
			}).ServeHTTP(rw, httptest.NewRequest(http.MethodGet, "/", nil))

			assert.Equal(t, "012345", rw.body.String())
			assert.Equal(t, "012345", string(endpoint.next(t).Response.Body))
		}
	}
}

func TestResponseWriter_CutsTheRecordAndNotTheResponse(t *testing.T) {
	everyWay(t, kindResponse, func(t *testing.T, kind string, reject bool) {
		for limit, want := range map[int64]string{0: "", 1: "0", 4: "0123", 5: "01234", 8: "01234567", 9: "01234567", -1: "01234567"} {
			endpoint := newRecorder(t)
			rw := newPlainWriter()
			newHandler(t, of(kind, endpoint.url, limit, reject), writes("0123", "", "4567")).ServeHTTP(rw, httptest.NewRequest(http.MethodGet, "/", nil))

			assert.Equal(t, "01234567", rw.body.String())
			assert.Equal(t, []int{200}, rw.statuses)
			got := endpoint.next(t).Response
			assert.Equal(t, want, string(got.Body), limit)
			assert.Equal(t, limit > 0 && limit < 8, got.BodyTruncated, limit)
		}
	})
}

func TestResponseWriter_CannotHijackWhatCannotBeHijacked(t *testing.T) {
	everyWay(t, kindResponse, func(t *testing.T, kind string, reject bool) {
		endpoint := newRecorder(t)
		rw := newPlainWriter()
		newHandler(t, of(kind, endpoint.url, 100, reject), func(rw http.ResponseWriter, _ *http.Request) {
			_, _, err := http.NewResponseController(rw).Hijack()
			require.ErrorIs(t, err, http.ErrNotSupported)
			rw.WriteHeader(http.StatusNotImplemented)
		}).ServeHTTP(rw, httptest.NewRequest(http.MethodGet, "/", nil))

		assert.Equal(t, []int{http.StatusNotImplemented}, rw.statuses)
		assert.Equal(t, http.StatusNotImplemented, endpoint.next(t).Response.Status)
	})
}
