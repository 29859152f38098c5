package yaegi_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/klauspost/compress/gzhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// compressing is a middleware in front of the tap, made of what Traefik's own is made of: it announces by Vary that it
// negotiates, decides by the size, and keeps a length if nobody flushes.
func compressing(t *testing.T) func(http.Handler) http.Handler {
	t.Helper()
	wrap, err := gzhttp.NewWrapper(gzhttp.MinSize(1024))
	require.NoError(t, err)

	return func(next http.Handler) http.Handler { return wrap(next) }
}

// sized answers with as many bytes as the path says, compressible ones, and their length.
func sized(rw http.ResponseWriter, req *http.Request) {
	size, _ := strconv.Atoi(strings.TrimPrefix(req.URL.Path, "/"))
	rw.Header().Set("Content-Type", "application/json")
	rw.Header().Set("Content-Length", strconv.Itoa(size))
	_, _ = rw.Write(text(size))
}

// text is compressible, but not to nothing.
func text(size int) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, `{"number":%d,"square":%d},`, i, i*i)
	}

	return b.Bytes()[:size]
}

func TestTap_LeavesCompressionInFrontOfItAlone(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(sized))
	t.Cleanup(backend.Close)
	// Without the reverse proxy too, which flushes by the clock.
	plain := serve(t, withoutTap, nil, http.HandlerFunc(sized), compressing(t), nil)

	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject, "maxRecordBodySize": 100_000}),
				newProxy(t, backend.URL), compressing(t), nil)
			for size, encoding := range map[int]string{100: "", 2_000: "gzip", 200_000: "gzip"} {
				t.Run(strconv.Itoa(size), func(t *testing.T) {
					path := fmt.Sprintf("/%d", size)
					want, wantBody := plain.do(t, http.MethodGet, path, nil, "Accept-Encoding", "gzip")
					got, gotBody := s.do(t, http.MethodGet, path, nil, "Accept-Encoding", "gzip")
					require.Nil(t, s.done(t))
					endpoint.kinds(t, 3)

					require.Equal(t, encoding, want.Header.Get("Content-Encoding"), "the middleware in front is not what it is taken for")
					want.Header.Del("Date")
					got.Header.Del("Date")
					assert.Equal(t, want.Header, got.Header)
					assert.Equal(t, want.ContentLength, got.ContentLength)
					assert.Equal(t, want.TransferEncoding, got.TransferEncoding)
					assert.Len(t, gotBody, len(wantBody))
					if encoding == "gzip" {
						reader, err := gzip.NewReader(bytes.NewReader(gotBody))
						require.NoError(t, err)
						gotBody, err = io.ReadAll(reader)
						require.NoError(t, err)
					}
					assert.Equal(t, text(size), gotBody)
				})
			}
		})
	})
}

func TestTap_StreamsThroughCompressionInFrontOfIt(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			backend := newEventSource(t, streamCase{contentType: "text/plain"})
			// With the body recorded, a stream that is rejected would be held for as long as it is short.
			config := settings{"response": one(endpoint.URL, settings{"rejectOnRecordError": reject, "recordBody": !reject})}
			s := serve(t, e, config, newProxy(t, backend.URL), compressing(t), nil)

			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			req := newRequest(ctx, t, http.MethodGet, s.URL, nil)
			req.Header.Set("Accept-Encoding", "gzip")
			go func() { backend.next <- true }()
			resp, err := s.Client.Do(req)
			require.NoError(t, err)
			defer func() { _ = resp.Body.Close() }()
			require.Equal(t, "gzip", resp.Header.Get("Content-Encoding"))
			reader, err := gzip.NewReader(resp.Body)
			require.NoError(t, err)

			got := make([]byte, len(event))
			for range 5 {
				_, err := io.ReadFull(reader, got)
				require.NoError(t, err, "the event did not come")
				assert.Equal(t, event, string(got))
				backend.next <- true
			}
			backend.next <- false
			_, err = io.Copy(io.Discard, reader)
			require.NoError(t, err)
			require.Nil(t, s.done(t))
			endpoint.kinds(t, 1)
		})
	})
}

func TestTap_FlushesAsAReverseProxyAndNoMore(t *testing.T) {
	cases := map[string]struct {
		vary   string
		length int
		status int
		writes []int
		want   int64
	}{
		"no length: the header and each write":          {"", -1, http.StatusOK, []int{10, 8_000, 10}, 4},
		"no length, an error: each write":               {"", -1, http.StatusBadGateway, []int{10, 8_000}, 2},
		"a length, large writes: the last":              {"", 24_000, http.StatusOK, []int{8_000, 8_000, 8_000}, 1},
		"a length, a trickle: each write":               {"", 30, http.StatusOK, []int{10, 10, 10}, 3},
		"a length, written at once: this":               {"", 8_000, http.StatusOK, []int{8_000}, 1},
		"negotiated, a length: never":                   {"Accept-Encoding", 24_010, http.StatusOK, []int{8_000, 8_000, 8_000, 10}, 0},
		"negotiated in other letters, a length: never":  {"origin, accept-encoding", 10, http.StatusOK, []int{10}, 0},
		"negotiated, no length: the header, each write": {"Accept-Encoding", -1, http.StatusOK, []int{10, 8_000}, 3},
		"negotiated otherwise, a length: the last":      {"Origin", 8_000, http.StatusOK, []int{8_000}, 1},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				// Held, if at all, for its header alone: so that each write of the backend is one of the tap.
				for _, options := range []settings{nil, {"rejectOnRecordError": true, "recordBody": false}} {
					endpoint := newReceiver(t, nil)
					var begun atomic.Bool
					var flushes atomic.Int64
					watching := watch(&begun, &flushes)
					announcing := func(next http.Handler) http.Handler {
						return watching(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
							if c.vary != "" {
								rw.Header().Set("Vary", c.vary)
							}
							next.ServeHTTP(rw, req)
						}))
					}
					s := serve(t, e, settings{"response": one(endpoint.URL, options)}, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
						if c.length >= 0 {
							rw.Header().Set("Content-Length", strconv.Itoa(c.length))
						}
						// What the backend says of Vary is no announcement of something in front.
						rw.Header().Add("Vary", "Accept-Encoding")
						rw.WriteHeader(c.status)
						for _, size := range c.writes {
							_, _ = rw.Write(make([]byte, size))
						}
					}), announcing, nil)

					s.do(t, http.MethodGet, "/", nil)
					require.Nil(t, s.done(t))
					endpoint.kinds(t, 1)
					assert.Equal(t, c.want, flushes.Load())
				}
			})
		})
	}
}
