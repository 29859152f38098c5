package yaegi_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTap_RecordsCompressedBodiesAsTheyAre(t *testing.T) {
	var compressed bytes.Buffer
	writer := gzip.NewWriter(&compressed)
	for i := range 2_000 {
		_, err := fmt.Fprintf(writer, `{"number":%d}`, i)
		require.NoError(t, err)
	}
	require.NoError(t, writer.Close())

	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			s := newTap(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Type", "application/json")
				rw.Header().Set("Content-Encoding", "gzip")
				_, _ = rw.Write(compressed.Bytes())
			})

			// Asking for gzip by hand keeps the client from undoing it.
			_, body := s.do(t, http.MethodPost, "/", compressed.Bytes(), "Content-Encoding", "gzip", "Accept-Encoding", "gzip")
			require.Nil(t, s.done(t))
			assert.Equal(t, compressed.Bytes(), body)

			records := endpoint.kinds(t, 3)
			for _, kind := range []string{"request", "exchange"} {
				assert.Equal(t, compressed.Bytes(), records[kind].Request.Body, kind)
				assert.Equal(t, []string{"gzip"}, records[kind].Request.Headers["Content-Encoding"], kind)
				assert.False(t, records[kind].Request.BodyTruncated, kind)
			}
			for _, kind := range []string{"response", "exchange"} {
				assert.Equal(t, compressed.Bytes(), records[kind].Response.Body, kind)
				assert.Equal(t, []string{"gzip"}, records[kind].Response.Headers["Content-Encoding"], kind)
				assert.False(t, records[kind].Response.BodyTruncated, kind)
			}
		})
	})
}

func TestTap_RecordsAnyBytesAsValidJSON(t *testing.T) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}

	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			s := newTap(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), func(rw http.ResponseWriter, req *http.Request) {
				body, _ := io.ReadAll(req.Body)
				rw.Header().Set("X-Raw", "\xff")
				_, _ = rw.Write(body)
			})

			resp, body := exchangeRaw(t, s, "POST /\xfe?a=%ff&b=\xff HTTP/1.1\r\nHost: tap\r\nX-Raw: a\xffb\r\nContent-Length: 256\r\n\r\n"+string(all))
			require.Nil(t, s.done(t))
			assert.Equal(t, http.StatusOK, resp.StatusCode)
			assert.Equal(t, "\xff", resp.Header.Get("X-Raw"))
			assert.Equal(t, all, body)

			records := endpoint.kinds(t, 3)
			for kind, record := range records {
				assert.True(t, json.Valid(record.Payload), "%s: %q", kind, record.Payload)
				assert.True(t, utf8.Valid(record.Payload), "%s: %q", kind, record.Payload)
			}
			assert.Equal(t, all, records["request"].Request.Body)
			assert.Equal(t, all, records["response"].Response.Body)
			assert.Equal(t, "/\ufffd?a=%ff&b=\ufffd", records["exchange"].Request.URL)
			assert.Equal(t, []string{"a\ufffdb"}, records["exchange"].Request.Headers["X-Raw"])
			assert.Equal(t, []string{"\ufffd"}, records["exchange"].Response.Headers["X-Raw"])
		})
	})
}

func TestTap_TellsWhatIsTruncated(t *testing.T) {
	const limit = 1_000
	cases := []struct {
		name   string
		pieces []int
		sizes  []int
	}{
		{"in one piece", nil, []int{0, 999, 1_000, 1_001, 10_000_000}},
		{"in single bytes", singleBytes(limit + 1), []int{999, 1_000, 1_001}},
		{"in 999 and 2", []int{999, 2}, []int{1_001}},
	}
	all := distinctBytes(10_000_000)

	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			config := every(endpoint.URL, settings{"rejectOnRecordError": reject, "maxRecordBodySize": limit})
			for _, test := range cases {
				s := newTapInFrontOf(t, e, config, echoInPieces(test.pieces))
				for _, size := range test.sizes {
					for _, chunked := range []bool{false, true} {
						t.Run(fmt.Sprintf("%d bytes %s, chunked=%t", size, test.name, chunked), func(t *testing.T) {
							sent := all[:size]
							assert.True(t, bytes.Equal(sent, s.echo(t, sent, chunked)))
							require.Nil(t, s.done(t))

							want := sent[:min(size, limit)]
							records := endpoint.kinds(t, 3)
							for _, kind := range []string{"request", "exchange"} {
								assert.True(t, bytes.Equal(want, records[kind].Request.Body), kind)
								assert.Equal(t, size > limit, records[kind].Request.BodyTruncated, kind)
							}
							for _, kind := range []string{"response", "exchange"} {
								assert.True(t, bytes.Equal(want, records[kind].Response.Body), kind)
								assert.Equal(t, size > limit, records[kind].Response.BodyTruncated, kind)
							}
							for kind, record := range records {
								assert.Equal(t, size > limit, bytes.Contains(record.Payload, []byte(`"bodyTruncated"`)), kind)
								assert.Equal(t, size > 0, bytes.Contains(record.Payload, []byte(`"body"`)), kind)
							}
						})
					}
				}
			}
			endpoint.none(t)
		})
	})
}

// singleBytes returns n pieces of one byte.
func singleBytes(n int) []int {
	pieces := make([]int, n)
	for i := range pieces {
		pieces[i] = 1
	}

	return pieces
}

// distinctBytes returns bytes of which no two thousand in a row are repeated.
func distinctBytes(size int) []byte {
	body := make([]byte, size)
	for i := range body {
		body[i] = byte(i ^ i>>8 ^ i>>16)
	}

	return body
}

// echoInPieces answers with the request's body, announced where the request's is. It reads and writes pieces of the given sizes,
// and the rest at once.
func echoInPieces(pieces []int) http.HandlerFunc {
	return func(rw http.ResponseWriter, req *http.Request) {
		if req.ContentLength >= 0 {
			rw.Header().Set("Content-Length", strconv.FormatInt(req.ContentLength, 10))
		}

		var read [][]byte
		for _, size := range pieces {
			piece := make([]byte, size)
			n, err := io.ReadFull(req.Body, piece)
			read = append(read, piece[:n])
			if err != nil {
				break
			}
		}
		rest, _ := io.ReadAll(req.Body)
		for _, piece := range append(read, rest) {
			if len(piece) > 0 {
				_, _ = rw.Write(piece)
			}
		}
	}
}

// echo sends a body, and returns the one that comes back.
func (s *tapped) echo(t *testing.T, body []byte, chunked bool) []byte {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, bytes.NewReader(body))
	require.NoError(t, err)
	if chunked {
		// A body whose length the client cannot see.
		req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(body)), -1
	}
	_, answer := s.send(t, req)

	return answer
}

func TestTap_RejectPassesOnABodyThatIsOneByteOverTheLimit(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, chunked := range []bool{false, true} {
			t.Run(fmt.Sprintf("chunked=%t", chunked), func(t *testing.T) {
				lengths := make(chan int64, 1)
				endpoint := newReceiver(t, nil)
				config := settings{"request": one(endpoint.URL, settings{"rejectOnRecordError": true, "maxRecordBodySize": 1_000})}
				s := newTap(t, e, config, func(rw http.ResponseWriter, req *http.Request) {
					lengths <- req.ContentLength
					echoInPieces(nil)(rw, req)
				})

				sent := distinctBytes(1_001)
				assert.Equal(t, sent, s.echo(t, sent, chunked))
				want := int64(1_001)
				if chunked {
					want = -1
				}
				assert.Equal(t, want, <-lengths)

				record := endpoint.next(t)
				assert.Equal(t, sent[:1_000], record.Request.Body)
				assert.True(t, record.Request.BodyTruncated)
			})
		}
	})
}

// The transport of a reverse proxy reads on after the end of a body, to see that nothing follows. A server that is writing the
// response by then has closed the body, and the error that it answers would cut the response. The tap knows the end by itself.
func TestTap_AsksNothingMoreOfABodyThatHasEnded(t *testing.T) {
	const reads = 3
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			ends := make(chan error, reads)
			next := http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				body, err := io.ReadAll(req.Body)
				assert.NoError(t, err)
				assert.Equal(t, "ping", string(body))
				for range reads {
					_, err := req.Body.Read(make([]byte, 10))
					ends <- err
				}
			})
			original := func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
					req.Body = &closedAtItsEnd{ReadCloser: req.Body}
					next.ServeHTTP(rw, req)
				})
			}
			config := every(endpoint.URL, settings{"rejectOnRecordError": reject})
			s := serve(t, e, config, next, original, nil)

			s.do(t, http.MethodPost, "/", []byte("ping"))
			require.Nil(t, s.done(t))
			for range reads {
				assert.Equal(t, io.EOF, <-ends)
			}
			assert.Equal(t, "ping", string(endpoint.kinds(t, 3)["request"].Request.Body))
		})
	})
}

// closedAtItsEnd is a body that a server closes as soon as it has been read.
type closedAtItsEnd struct {
	io.ReadCloser
	ended bool
}

func (b *closedAtItsEnd) Read(p []byte) (int, error) {
	if b.ended {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.ReadCloser.Read(p)
	b.ended = err == io.EOF

	return n, err
}

func TestTap_SpendsNothingOnABodyThatIsNotRecorded(t *testing.T) {
	const size = 200_000_000
	piece := distinctBytes(64 << 10)

	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			config := settings{
				"request":  one(endpoint.URL, settings{"maxRecordBodySize": -1}),
				"response": one(endpoint.URL, settings{"maxRecordBodySize": -1, "recordBody": false, "rejectOnRecordError": reject}),
			}
			s := newTapInFrontOf(t, e, config, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				_, _ = io.Copy(io.Discard, req.Body)
				rw.Header().Set("Content-Length", strconv.Itoa(size))
				for left := size; left > 0; left -= len(piece) {
					_, _ = rw.Write(piece[:min(left, len(piece))])
				}
			}))

			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, strings.NewReader("ping"))
			require.NoError(t, err)
			var got int64
			spent := allocatedBy(func() {
				resp, err := s.Client.Do(req)
				require.NoError(t, err)
				defer resp.Body.Close()
				got, err = io.Copy(io.Discard, resp.Body)
				require.NoError(t, err)
			})
			require.Nil(t, s.done(t))
			assert.EqualValues(t, size, got)
			// Whoever keeps the body spends as much as it has bytes.
			assert.Less(t, spent, uint64(size/2))

			records := endpoint.kinds(t, 2)
			assert.Equal(t, "ping", string(records["request"].Request.Body))
			var response struct{ Response map[string]any }
			require.NoError(t, json.Unmarshal(records["response"].Payload, &response))
			assert.NotContains(t, response.Response, "body")
			assert.NotContains(t, response.Response, "bodyTruncated")
		})
	})
}

// allocatedBy returns how many bytes the process sets aside while f runs.
func allocatedBy(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)

	return after.TotalAlloc - before.TotalAlloc
}

func TestTap_SetsNoMoreAsideForABodyThanItHas(t *testing.T) {
	const rounds = 20
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			for _, chunked := range []bool{false, true} {
				t.Run(fmt.Sprintf("chunked=%t", chunked), func(t *testing.T) {
					endpoint := newReceiver(t, nil)
					s := newTap(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject, "maxRecordBodySize": 10_485_760}), echoInPieces(nil))
					round := func() {
						require.Equal(t, "abc", string(s.echo(t, []byte("abc"), chunked)))
						require.Nil(t, s.done(t))
						endpoint.kinds(t, 3)
					}

					round() // Sets up connections and pools.
					spent := allocatedBy(func() {
						for range rounds {
							round()
						}
					})
					assert.Less(t, spent/rounds, uint64(5<<20))
				})
			}
		})
	})
}

// A response is announced as large, and no byte of it comes: a client or a backend must not make the tap set memory aside.
func TestTap_SetsNothingAsideForAnAnnouncedLength(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newReceiver(t, nil)
		config := settings{"exchange": one(endpoint.URL, settings{"maxRecordBodySize": -1})}
		s := newTap(t, e, config, func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Length", "1000000000")
			_, _ = rw.Write([]byte("x"))
		})

		spent := allocatedBy(func() {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL, nil)
			require.NoError(t, err)
			resp, err := s.Client.Do(req)
			require.NoError(t, err)
			_, err = io.ReadAll(resp.Body)
			require.Error(t, err)
			_ = resp.Body.Close()
			require.NotNil(t, s.done(t))
		})
		assert.Less(t, spent, uint64(100_000_000))
		assert.Equal(t, "x", string(endpoint.next(t).Response.Body))
	})
}

func TestTap_CopiesSmallWritesOnce(t *testing.T) {
	const writes, long = 10_000, 100
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			config := settings{"response": one(endpoint.URL, settings{"rejectOnRecordError": reject, "maxRecordBodySize": -1})}
			spent := func(size int) uint64 {
				var within uint64
				piece := distinctBytes(size)
				next := http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
					within = allocatedBy(func() {
						for range writes {
							_, _ = rw.Write(piece)
						}
					})
				})
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				handler, err := e.plugin.New(ctx, next, config, "audit@file")
				require.NoError(t, err)
				handler.ServeHTTP(discarding{}, httptest.NewRequest(http.MethodGet, "/", nil))
				require.Len(t, endpoint.next(t).Response.Body, writes*size)

				return within
			}

			// The interpreter spends on every call, whatever its bytes; what more bytes cost is the difference. A slice that
			// grows as it is appended to costs about five times its length in all, one that is copied at every write thousands.
			cost := int64(spent(long)) - int64(spent(1))
			assert.Less(t, cost, int64(writes*long*10))
		})
	})
}

// discarding is a response writer that keeps nothing of the body.
type discarding http.Header

func (d discarding) Header() http.Header         { return http.Header(d) }
func (d discarding) Write(p []byte) (int, error) { return len(p), nil }
func (d discarding) WriteHeader(int)             {}

func TestTap_ASlowClientKeepsNobodyElsesRecordWaiting(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			reading := make(chan struct{})
			endpoint := newReceiver(t, nil)
			server := httptest.NewServer(echoInPieces(nil))
			t.Cleanup(server.Close)
			noticeReading := func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
					if req.URL.Path == "/slow" {
						req.Body = &noticedBody{ReadCloser: req.Body, reading: reading}
					}
					next.ServeHTTP(rw, req)
				})
			}
			config := every(endpoint.URL, settings{"rejectOnRecordError": reject})
			s := serve(t, e, config, newProxy(t, server.URL), noticeReading, nil)

			reader, writer := io.Pipe()
			slow, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/slow", reader)
			require.NoError(t, err)
			answered := make(chan string, 1)
			go func() {
				defer close(answered)
				resp, err := s.Client.Do(slow)
				if !assert.NoError(t, err) {
					return
				}
				defer resp.Body.Close()
				body, err := io.ReadAll(resp.Body)
				assert.NoError(t, err)
				answered <- string(body)
			}()
			_, err = writer.Write([]byte("sl"))
			require.NoError(t, err)
			<-reading

			_, body := s.do(t, http.MethodPost, "/quick", []byte("quick"))
			assert.Equal(t, "quick", string(body))
			require.Nil(t, s.done(t))
			for kind, record := range endpoint.kinds(t, 3) {
				if record.Request != nil {
					assert.Equal(t, "/quick", record.Request.URL, kind)
				}
			}
			endpoint.none(t)

			_, err = writer.Write([]byte("ow"))
			require.NoError(t, err)
			require.NoError(t, writer.Close())
			assert.Equal(t, "slow", <-answered)
			require.Nil(t, s.done(t))
			assert.Equal(t, "slow", string(endpoint.kinds(t, 3)["request"].Request.Body))
		})
	})
}

// noticedBody closes reading when it is read for the first time.
type noticedBody struct {
	io.ReadCloser
	reading chan struct{}
	once    sync.Once
}

func (b *noticedBody) Read(p []byte) (int, error) {
	b.once.Do(func() { close(b.reading) })

	return b.ReadCloser.Read(p)
}
