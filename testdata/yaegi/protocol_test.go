package yaegi_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

func TestTap_PassesWebSocketsOn(t *testing.T) {
	cases := map[string]struct {
		reject bool
		// refuse is the kind of record that the endpoint does not accept.
		refuse string
	}{
		"reject off":                              {false, ""},
		"reject on":                               {true, ""},
		"reject on, the response's record fails":  {true, "response"},
		"reject off, the request's record fails":  {false, "request"},
		"reject on, the exchange's record fails":  {true, "exchange"},
		"reject off, the exchange's record fails": {false, "exchange"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				endpoint := newReceiver(t, func(rw http.ResponseWriter, req *http.Request) {
					if req.Header.Get("X-Tap-Record") == c.refuse {
						rw.WriteHeader(http.StatusServiceUnavailable)
					}
				})
				s := newTap(t, e, every(endpoint.URL, settings{"rejectOnRecordError": c.reject}), echoWebSocket)

				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				conn, resp, err := websocket.Dial(ctx, s.URL, &websocket.DialOptions{HTTPClient: s.Client})
				require.NoError(t, err)
				defer conn.CloseNow() //nolint:errcheck // For a test that fails early.
				assert.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)

				request := endpoint.next(t)
				assert.Equal(t, "request", request.Kind)
				assert.Equal(t, []string{"websocket"}, request.Request.Headers["Upgrade"])
				for i := range 3 {
					message := fmt.Sprintf("message %d", i)
					require.NoError(t, conn.Write(ctx, websocket.MessageText, []byte(message)))
					_, echo, err := conn.Read(ctx)
					require.NoError(t, err)
					assert.Equal(t, message, string(echo))
				}
				endpoint.none(t)

				assert.NoError(t, conn.Close(websocket.StatusNormalClosure, ""))
				require.Nil(t, s.done(t))
				for kind, got := range endpoint.kinds(t, 2) {
					assert.Equal(t, http.StatusSwitchingProtocols, got.Response.Status, kind)
					assert.Empty(t, got.Response.Body, kind)
					assert.Equal(t, request.ID, got.ID, kind)
				}
				endpoint.none(t)
			})
		})
	}
}

// echoWebSocket sends each message back until the client closes.
func echoWebSocket(rw http.ResponseWriter, req *http.Request) {
	conn, err := websocket.Accept(rw, req, nil)
	if err != nil {
		return
	}
	defer conn.CloseNow() //nolint:errcheck // The client has closed it.
	for {
		kind, message, err := conn.Read(req.Context())
		if err != nil || conn.Write(req.Context(), kind, message) != nil {
			return
		}
	}
}

func TestTap_RefusesAWebSocketWhoseRequestIsNotAccepted(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		s := newTap(t, e, settings{"request": one(closedEndpoint(t), settings{"rejectOnRecordError": true})}, func(http.ResponseWriter, *http.Request) {
			t.Error("the backend was called")
		})
		resp, body := s.do(t, http.MethodGet, "/", nil, "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13",
			"Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA==")
		require.Nil(t, s.done(t))
		assertRefused(t, resp, body)
	})
}

// trailing answers with trailers in the way and with the status that its path names: /unannounced/200.
func trailing(rw http.ResponseWriter, req *http.Request) {
	parts := strings.Split(req.URL.Path, "/")
	status, _ := strconv.Atoi(parts[2])
	switch parts[1] {
	case "announced":
		rw.Header().Set("Trailer", "Grpc-Status, Grpc-Message")
		rw.WriteHeader(status)
		_, _ = io.WriteString(rw, "body")
		rw.Header().Set("Grpc-Status", "0")
		rw.Header().Set("Grpc-Message", "fine")
	case "unannounced":
		rw.WriteHeader(status)
		_, _ = io.WriteString(rw, "body")
		// Or net/http counts the body, and no trailer can follow what has a length.
		_ = http.NewResponseController(rw).Flush()
		rw.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
		rw.Header().Set(http.TrailerPrefix+"Grpc-Message", "fine")
	case "both":
		rw.Header().Set("Trailer", "Grpc-Status")
		rw.WriteHeader(status)
		_, _ = io.WriteString(rw, "body")
		rw.Header().Set("Grpc-Status", "0")
		rw.Header().Set(http.TrailerPrefix+"Grpc-Message", "fine")
	case "early":
		// The prefix may stand before the status is written.
		rw.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
		rw.Header().Set(http.TrailerPrefix+"Grpc-Message", "fine")
		rw.WriteHeader(status)
		_, _ = io.WriteString(rw, "body")
	case "only":
		rw.Header().Set("Trailer", "Grpc-Status, Grpc-Message")
		rw.WriteHeader(status)
		rw.Header().Set("Grpc-Status", "0")
		rw.Header().Set("Grpc-Message", "fine")
	case "only-unannounced":
		rw.WriteHeader(status)
		_ = http.NewResponseController(rw).Flush()
		rw.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
		rw.Header().Set(http.TrailerPrefix+"Grpc-Message", "fine")
	}
}

func TestTap_PassesTrailersOn(t *testing.T) {
	want := http.Header{"Grpc-Status": {"0"}, "Grpc-Message": {"fine"}}
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			onBothProtocols(t, func(t *testing.T, prepare func(*httptest.Server)) {
				chains := map[string]http.Handler{
					"behind a reverse proxy": newProxy(t, newBackend(t, prepare, trailing)),
					"made next to the tap":   http.HandlerFunc(trailing),
				}
				for name, next := range chains {
					t.Run(name, func(t *testing.T) {
						endpoint := newReceiver(t, nil)
						s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), next, inFrontNothing, prepare)
						for _, way := range []string{"announced", "unannounced", "both", "early", "only", "only-unannounced"} {
							for _, status := range []int{http.StatusOK, http.StatusBadRequest} {
								path := fmt.Sprintf("/%s/%d", way, status)
								resp, body := s.do(t, http.MethodGet, path, nil)
								require.Nil(t, s.done(t))
								assert.Equal(t, status, resp.StatusCode, path)
								assert.Equal(t, !strings.HasPrefix(way, "only"), string(body) == "body", path)
								assert.Equal(t, want, resp.Trailer, path)
								assert.NotContains(t, resp.Header, "Grpc-Status", path)

								for kind, got := range endpoint.kinds(t, 3) {
									assert.NotContains(t, string(got.Payload), `Grpc-Status":`, "%s, %s", path, kind)
								}
							}
						}
					})
				}
			})
		})
	})
}

func TestTap_PassesAStatusOfGRPCOnThatStandsInTheHeader(t *testing.T) {
	grpcError := func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "application/grpc")
		rw.Header().Set("Grpc-Status", "12")
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), newProxy(t, newBackend(t, overHTTP2, grpcError)), inFrontNothing, overHTTP2)

			resp, body := s.do(t, http.MethodPost, "/service/Method", []byte("message"), "Content-Type", "application/grpc", "TE", "trailers")
			require.Nil(t, s.done(t))
			assert.Equal(t, 2, resp.ProtoMajor)
			assert.Equal(t, "12", resp.Header.Get("Grpc-Status"))
			assert.Empty(t, resp.Trailer)
			assert.Empty(t, body)
			assert.Equal(t, []string{"12"}, endpoint.kinds(t, 3)["response"].Response.Headers["Grpc-Status"])
		})
	})
}

func TestTap_AnswersWhileTheRequestGoesOn(t *testing.T) {
	cases := map[string]settings{
		"reject off": nil,
		// Rejecting takes what is recorded, and a byte more, before anything goes on.
		"reject on": {"rejectOnRecordError": true, "maxRecordBodySize": 5},
	}
	for name, options := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				endpoint := newReceiver(t, nil)
				backend := newBackend(t, overHTTP2, func(rw http.ResponseWriter, req *http.Request) {
					first := make([]byte, 10)
					_, _ = io.ReadFull(req.Body, first)
					_, _ = fmt.Fprintf(rw, "got %s\n", first)
					_ = http.NewResponseController(rw).Flush()
					rest, _ := io.ReadAll(req.Body)
					_, _ = rw.Write(rest)
				})
				s := serve(t, e, every(endpoint.URL, options), newProxy(t, backend), inFrontNothing, overHTTP2)

				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				body, client := io.Pipe()
				// A transport that waits for more of a body does not look at the deadline.
				context.AfterFunc(ctx, func() { _ = client.CloseWithError(ctx.Err()) })
				go func() { _, _ = io.WriteString(client, "0123456789") }()
				resp, err := s.Client.Do(newRequest(ctx, t, http.MethodPost, s.URL, body))
				require.NoError(t, err)
				defer func() { _ = resp.Body.Close() }()
				answer := bufio.NewReader(resp.Body)
				line, err := answer.ReadString('\n')
				require.NoError(t, err)
				assert.Equal(t, "got 0123456789\n", line)

				_, err = io.WriteString(client, "the rest")
				require.NoError(t, err)
				require.NoError(t, client.Close())
				rest, err := io.ReadAll(answer)
				require.NoError(t, err)
				assert.Equal(t, "the rest", string(rest))
				require.Nil(t, s.done(t))

				records := endpoint.kinds(t, 3)
				for _, kind := range []string{"request", "exchange"} {
					got := records[kind].Request
					if options == nil {
						assert.Equal(t, "0123456789the rest", string(got.Body), kind)
						assert.False(t, got.BodyTruncated, kind)
					} else {
						assert.Equal(t, "01234", string(got.Body), kind)
						assert.True(t, got.BodyTruncated, kind)
					}
				}
			})
		})
	}
}

func TestTap_PassesEarlyHintsOn(t *testing.T) {
	const link = "</style.css>; rel=preload"
	hinting := func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(http.StatusProcessing)
		rw.Header().Set("Link", link)
		rw.WriteHeader(http.StatusEarlyHints)
		_, _ = io.WriteString(rw, "page")
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			onBothProtocols(t, func(t *testing.T, prepare func(*httptest.Server)) {
				endpoint := newReceiver(t, nil)
				s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), newProxy(t, newBackend(t, prepare, hinting)), inFrontNothing, prepare)

				var hints []string
				ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
					Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
						hints = append(hints, fmt.Sprint(code, header["Link"]))

						return nil
					},
				})
				resp, body := s.send(t, newRequest(ctx, t, http.MethodGet, s.URL, nil))
				require.Nil(t, s.done(t))
				assert.Equal(t, http.StatusOK, resp.StatusCode)
				assert.Equal(t, []string{link}, resp.Header["Link"])
				assert.Equal(t, "page", string(body))
				if reject {
					assert.Empty(t, hints, "a response that may be refused is hinted at")
				} else {
					assert.Equal(t, []string{"102 []", "103 [" + link + "]"}, hints)
				}

				records := endpoint.kinds(t, 3)
				for _, kind := range []string{"response", "exchange"} {
					assert.Equal(t, http.StatusOK, records[kind].Response.Status)
					assert.Equal(t, []string{link}, records[kind].Response.Headers["Link"])
				}
				endpoint.none(t)
			})
		})
	})
}

func TestTap_AnswersExpectContinueAsOften(t *testing.T) {
	cases := map[string]struct {
		options settings
		// continues are how many 100s the client may get.
		continues []int
		status    int
		// expect is what the backend sees of the header.
		expect string
		// early is a status that the backend answers with, without the body.
		early int
	}{
		"reject on: once":              {settings{"rejectOnRecordError": true}, []int{1}, http.StatusOK, "", 0},
		"reject off: as the proxy":     {nil, []int{1, 2}, http.StatusOK, "100-continue", 0},
		"not recorded: as the proxy":   {settings{"rejectOnRecordError": true, "recordBody": false}, []int{1, 2}, http.StatusOK, "100-continue", 0},
		"too large to record: never":   {settings{"rejectOnRecordError": true, "maxRecordBodySize": -1, "maxBodySize": 3}, []int{0}, http.StatusRequestEntityTooLarge, "", 0},
		"answered early, recorded":     {nil, []int{0}, http.StatusUnauthorized, "100-continue", http.StatusUnauthorized},
		"answered early, not recorded": {settings{"recordBody": false}, []int{0}, http.StatusUnauthorized, "100-continue", http.StatusUnauthorized},
		"no larger than allowed: once": {settings{"rejectOnRecordError": true, "maxRecordBodySize": -1, "maxBodySize": 4}, []int{1}, http.StatusOK, "", 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				endpoint := newReceiver(t, nil)
				var called atomic.Int64
				s := newTap(t, e, settings{"request": one(endpoint.URL, c.options)}, func(rw http.ResponseWriter, req *http.Request) {
					called.Add(1)
					assert.Equal(t, c.expect, req.Header.Get("Expect"))
					if c.early != 0 {
						rw.WriteHeader(c.early)

						return
					}
					_, _ = io.Copy(rw, req.Body)
				})

				conn, reader := dial(t, s)
				_, err := io.WriteString(conn, "POST / HTTP/1.1\r\nHost: tapped\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
				require.NoError(t, err)
				continues := 0
				resp := readResponse(t, reader)
				for ; resp.StatusCode == http.StatusContinue; resp = readResponse(t, reader) {
					if continues++; continues == 1 {
						_, err = io.WriteString(conn, "ping")
						require.NoError(t, err)
					}
				}
				body, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.Nil(t, s.done(t))

				assert.Contains(t, c.continues, continues)
				assert.Equal(t, c.status, resp.StatusCode)
				if c.status == http.StatusRequestEntityTooLarge {
					assert.Zero(t, called.Load())
					endpoint.none(t)

					return
				}
				assert.EqualValues(t, 1, called.Load())
				recorded := endpoint.next(t).Request
				if c.early == 0 {
					assert.Equal(t, "ping", string(body))
					assert.Equal(t, c.options["recordBody"] != false, string(recorded.Body) == "ping")
				}
			})
		})
	}
}

func TestTap_KeepsTheLengthOfAHead(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			onBothProtocols(t, func(t *testing.T, prepare func(*httptest.Server)) {
				endpoint := newReceiver(t, nil)
				s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), newProxy(t, newBackend(t, prepare, func(rw http.ResponseWriter, _ *http.Request) {
					rw.Header().Set("Content-Length", "12345")
				})), inFrontNothing, prepare)

				for i := range 2 {
					req := newRequest(t.Context(), t, http.MethodHead, s.URL, nil)
					send := s.send
					if i > 0 {
						send = s.sendReusing
					}
					resp, body := send(t, req)
					require.Nil(t, s.done(t))
					assert.EqualValues(t, 12345, resp.ContentLength)
					assert.Empty(t, body)
					assert.False(t, endpoint.kinds(t, 3)["response"].Response.BodyTruncated)
				}
			})
		})
	})
}

func TestTap_KeepsLengthsAndBytes(t *testing.T) {
	question, answer := text(4_000), text(5_000)
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			s := newTap(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject, "maxRecordBodySize": 8}), func(rw http.ResponseWriter, req *http.Request) {
				got, err := io.ReadAll(req.Body)
				assert.NoError(t, err)
				assert.Equal(t, question, got)
				assert.EqualValues(t, len(question), req.ContentLength)
				assert.Empty(t, req.TransferEncoding)
				rw.Header().Set("Content-Length", strconv.Itoa(len(answer)))
				_, _ = rw.Write(answer)
			})

			resp, got := s.do(t, http.MethodPost, "/", question)
			require.Nil(t, s.done(t))
			assert.Equal(t, answer, got)
			assert.EqualValues(t, len(answer), resp.ContentLength)
			assert.Empty(t, resp.TransferEncoding)
			exchange := endpoint.kinds(t, 3)["exchange"]
			assert.Equal(t, question[:8], exchange.Request.Body)
			assert.Equal(t, answer[:8], exchange.Response.Body)
		})
	})
}

func TestTap_RecordsNoBodyWhereAnUnknownLengthTurnsOutToBeNone(t *testing.T) {
	unknown := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			// As over HTTP/3.
			req.Body, req.ContentLength = io.NopCloser(strings.NewReader("")), -1
			next.ServeHTTP(rw, req)
		})
	}
	cases := map[string]struct {
		inFront func(http.Handler) http.Handler
		request string
	}{
		"chunked without a chunk": {inFrontNothing, "POST / HTTP/1.1\r\nHost: tapped\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		"a body that is not nil":  {unknown, "GET / HTTP/1.1\r\nHost: tapped\r\n\r\n"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				bothWays(t, func(t *testing.T, reject bool) {
					endpoint := newReceiver(t, nil)
					backend := newBackend(t, nil, func(rw http.ResponseWriter, req *http.Request) {
						got, err := io.ReadAll(req.Body)
						assert.NoError(t, err)
						assert.Empty(t, got)
						rw.WriteHeader(http.StatusNoContent)
					})
					s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), newProxy(t, backend), c.inFront, nil)

					conn, reader := dial(t, s)
					_, err := io.WriteString(conn, c.request)
					require.NoError(t, err)
					assert.Equal(t, http.StatusNoContent, readResponse(t, reader).StatusCode)
					require.Nil(t, s.done(t))
					for kind, got := range endpoint.kinds(t, 3) {
						assert.NotContains(t, string(got.Payload), `"body`, kind)
					}
				})
			})
		})
	}
}

// bodyOf is a request body with a will of its own, and tells when it is closed.
type bodyOf struct {
	io.Reader
	closed atomic.Bool
}

func (b *bodyOf) Close() error {
	b.closed.Store(true)

	return nil
}

func TestTap_ClosesTheBodyThatItWasGiven(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			given := &bodyOf{Reader: strings.NewReader("ping")}
			s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				assert.NoError(t, req.Body.Close())
			}), func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
					req.Body = given
					next.ServeHTTP(rw, req)
				})
			}, nil)

			s.do(t, http.MethodPost, "/", []byte("ping"))
			require.Nil(t, s.done(t))
			assert.True(t, given.closed.Load())
			endpoint.kinds(t, 3)
		})
	})
}

func TestTap_LeavesARequestWithoutABodyAlone(t *testing.T) {
	for name, body := range map[string]io.ReadCloser{"nil": nil, "http.NoBody": http.NoBody} {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				bothWays(t, func(t *testing.T, reject bool) {
					endpoint := newReceiver(t, nil)
					s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
						assert.Equal(t, body, req.Body)
						assert.Zero(t, req.ContentLength)
					}), func(next http.Handler) http.Handler {
						return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
							req.Body = body
							next.ServeHTTP(rw, req)
						})
					}, nil)

					s.do(t, http.MethodGet, "/", nil)
					require.Nil(t, s.done(t))
					for kind, got := range endpoint.kinds(t, 3) {
						assert.NotContains(t, string(got.Payload), `"body`, kind)
					}
				})
			})
		})
	}
}

// retrying is a middleware behind the tap as Traefik's retry: it lets the first attempt go nowhere.
func retrying(nowhere, next http.Handler, keepsBody bool) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		body := req.Body
		defer func() { _ = body.Close() }()
		var kept []byte
		if keepsBody {
			kept, _ = io.ReadAll(body)
		}
		for _, attempt := range []struct {
			to http.Handler
			rw http.ResponseWriter
		}{{nowhere, httptest.NewRecorder()}, {next, rw}} {
			// A transport closes what it could not send.
			req.Body = io.NopCloser(body)
			if keepsBody {
				req.Body = io.NopCloser(bytes.NewReader(kept))
			}
			attempt.to.ServeHTTP(attempt.rw, req)
		}
	})
}

func TestTap_RecordsARequestOnceThatIsTriedTwice(t *testing.T) {
	for name, keepsBody := range map[string]bool{"the body is not read before": false, "the body is kept": true} {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				bothWays(t, func(t *testing.T, reject bool) {
					endpoint := newReceiver(t, nil)
					backend := newBackend(t, nil, func(rw http.ResponseWriter, req *http.Request) {
						got, _ := io.ReadAll(req.Body)
						_, _ = rw.Write(got)
					})
					s := newTapInFrontOf(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}),
						retrying(newProxy(t, closedEndpoint(t)), newProxy(t, backend), keepsBody))

					question := text(1_000)
					resp, answer := s.do(t, http.MethodPost, "/", question)
					require.Nil(t, s.done(t))
					assert.Equal(t, http.StatusOK, resp.StatusCode)
					assert.Equal(t, question, answer)
					records := endpoint.kinds(t, 3)
					assert.Equal(t, question, records["request"].Request.Body)
					assert.Equal(t, http.StatusOK, records["exchange"].Response.Status)
					endpoint.none(t)
				})
			})
		})
	}
}

func TestTap_NeverEndsAnUploadThatWasCutShort(t *testing.T) {
	const upload = "5\r\nhello\r\n5\r\nworld\r\n"
	cases := map[string]struct {
		options settings
		http2   bool
		called  bool
	}{
		"reject off":                        {nil, false, true},
		"reject off, over HTTP/2":           {nil, true, true},
		"reject off, cut after the record":  {settings{"maxRecordBodySize": 4}, false, true},
		"reject on, cut after the record":   {settings{"rejectOnRecordError": true, "maxRecordBodySize": 4}, false, true},
		"reject on, cut before the record":  {settings{"rejectOnRecordError": true}, false, false},
		"reject on, over HTTP/2":            {settings{"rejectOnRecordError": true}, true, false},
		"reject on, to be recorded whole":   {settings{"rejectOnRecordError": true, "maxRecordBodySize": -1}, false, false},
		"reject on, the body not recorded":  {settings{"rejectOnRecordError": true, "recordBody": false}, false, true},
		"reject off, the body not recorded": {settings{"recordBody": false}, false, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				endpoint := newReceiver(t, nil)
				halfway, ended := make(chan struct{}), make(chan error, 1)
				backend := newBackend(t, nil, func(_ http.ResponseWriter, req *http.Request) {
					_, err := io.ReadFull(req.Body, make([]byte, 10))
					close(halfway)
					if err == nil {
						_, err = io.Copy(io.Discard, req.Body)
					}
					ended <- err
				})
				var prepare func(*httptest.Server)
				if c.http2 {
					prepare = overHTTP2
				}
				s := serve(t, e, settings{"request": one(endpoint.URL, c.options)}, newProxy(t, backend), inFrontNothing, prepare)

				wait := func() {
					if c.called {
						receive(t, halfway, "the first half at the backend")
					}
				}
				if c.http2 {
					uploadHalf(t, s, wait)
				} else {
					conn, _ := dial(t, s)
					_, err := io.WriteString(conn, "POST / HTTP/1.1\r\nHost: tapped\r\nTransfer-Encoding: chunked\r\n\r\n"+upload)
					require.NoError(t, err)
					wait()
					require.NoError(t, conn.SetLinger(0))
					require.NoError(t, conn.Close())
				}

				s.done(t)
				if !c.called {
					assert.Empty(t, ended, "the backend was called")
					endpoint.none(t)

					return
				}
				assert.Error(t, receive(t, ended, "the end of the body at the backend"))
				got := endpoint.next(t)
				if c.options["recordBody"] != false {
					assert.True(t, got.Request.BodyTruncated)
				}
				endpoint.none(t)
			})
		})
	}
}

// uploadHalf resets an upload over HTTP/2 after ten bytes, when wait has returned.
func uploadHalf(t *testing.T, s *tapped, wait func()) {
	t.Helper()
	body, client := io.Pipe()
	go func() {
		_, _ = io.WriteString(client, "helloworld")
		wait()
		_ = client.CloseWithError(errors.New("the client has gone away"))
	}()
	resp, err := s.Client.Do(newRequest(t.Context(), t, http.MethodPost, s.URL, body))
	if err == nil {
		_ = resp.Body.Close()
	}
}

func TestTap_RefusesABodyThatCannotBeRead(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newReceiver(t, nil)
		s := newTap(t, e, every(endpoint.URL, settings{"rejectOnRecordError": true}), func(http.ResponseWriter, *http.Request) {
			t.Error("the backend was called")
		})

		conn, reader := dial(t, s)
		_, err := io.WriteString(conn, "POST / HTTP/1.1\r\nHost: tapped\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nno length\r\n")
		require.NoError(t, err)
		resp := readResponse(t, reader)
		require.Nil(t, s.done(t))
		assert.Equal(t, http.StatusBadRequest, resp.StatusCode)
		assert.Positive(t, resp.ContentLength)
		endpoint.none(t)
	})
}

func TestTap_PassesABrokenResponseOn(t *testing.T) {
	cases := map[string]struct {
		options  settings
		recorded int
		aborted  bool
	}{
		"reject off":                                 {nil, 100, true},
		"reject on, broken while it is held":         {settings{"rejectOnRecordError": true}, 100, true},
		"reject on, broken after it was let through": {settings{"rejectOnRecordError": true, "maxRecordBodySize": 10}, 10, false},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				onBothProtocols(t, func(t *testing.T, prepare func(*httptest.Server)) {
					endpoint := newReceiver(t, nil)
					backend := newBackend(t, nil, func(rw http.ResponseWriter, _ *http.Request) {
						rw.Header().Set("Content-Length", "1000")
						_, _ = rw.Write(make([]byte, 100))
						_ = http.NewResponseController(rw).Flush()
						panic(http.ErrAbortHandler)
					})
					s := serve(t, e, settings{"response": one(endpoint.URL, c.options)}, newProxy(t, backend), inFrontNothing, prepare)
					pluginLog.take()

					assert.Error(t, getBroken(t, s))
					assert.Same(t, http.ErrAbortHandler, s.done(t))
					got := endpoint.next(t)
					assert.Len(t, got.Response.Body, c.recorded)
					assert.Equal(t, c.aborted, got.Response.Aborted)
					assert.Equal(t, http.StatusOK, got.Response.Status)
					assert.Empty(t, unexpectedLines())
					endpoint.none(t)
				})
			})
		})
	}
}

// getBroken sends a request, and returns the error which its response ends with.
func getBroken(t *testing.T, s *tapped) error {
	t.Helper()
	resp, err := s.Client.Do(newRequest(t.Context(), t, http.MethodGet, s.URL, nil))
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	_, err = io.Copy(io.Discard, resp.Body)

	return err
}

// unexpectedLines returns what was logged since the last take. Failed deliveries of earlier tests are told of up to a second later.
func unexpectedLines() []string {
	var lines []string
	for _, line := range pluginLog.take() {
		if !strings.HasPrefix(line, "Unable to send the ") {
			lines = append(lines, line)
		}
	}

	return lines
}

func TestTap_PassesAnyPanicOn(t *testing.T) {
	value := errors.New("a value of its own")
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			s := newTapInFrontOf(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				panic(value)
			}))

			assert.Error(t, getBroken(t, s))
			assert.Same(t, value, s.done(t))
			records := endpoint.kinds(t, 3)
			assert.True(t, records["response"].Response.Aborted)
			assert.True(t, records["exchange"].Response.Aborted)
		})
	})
}

func TestTap_PassesAPanicOnWhileTheEndpointHangs(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			release, hanging := context.WithCancel(context.Background())
			defer hanging()
			endpoint := newReceiver(t, func(http.ResponseWriter, *http.Request) { <-release.Done() })
			s := newTapInFrontOf(t, e, settings{"response": one(endpoint.URL, settings{"rejectOnRecordError": reject, "timeout": "0"})},
				http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))

			assert.Error(t, getBroken(t, s))
			assert.Same(t, http.ErrAbortHandler, s.done(t))
			endpoint.kinds(t, 1)
		})
	})
}

func TestTap_TakesTheFirstStatus(t *testing.T) {
	cases := map[string]struct {
		next   http.HandlerFunc
		status int
		body   string
	}{
		"nothing written": {func(http.ResponseWriter, *http.Request) {}, http.StatusOK, ""},
		"only a body":     {func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "body") }, http.StatusOK, "body"},
		"two statuses": {func(rw http.ResponseWriter, _ *http.Request) {
			rw.WriteHeader(http.StatusCreated)
			rw.WriteHeader(http.StatusInternalServerError)
		}, http.StatusCreated, ""},
		"a status after the body": {func(rw http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(rw, "body")
			rw.WriteHeader(http.StatusInternalServerError)
		}, http.StatusOK, "body"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				bothWays(t, func(t *testing.T, reject bool) {
					endpoint := newReceiver(t, nil)
					s := newTapInFrontOf(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), c.next)

					resp, body := s.do(t, http.MethodGet, "/", nil)
					require.Nil(t, s.done(t))
					assert.Equal(t, c.status, resp.StatusCode)
					assert.Equal(t, c.body, string(body))
					records := endpoint.kinds(t, 3)
					assert.Equal(t, c.status, records["response"].Response.Status)
					assert.Equal(t, c.status, records["exchange"].Response.Status)
					assert.Equal(t, c.body, string(records["response"].Response.Body))
				})
			})
		})
	}
}

// secretive answers with all that a client must not see of a refused response.
func secretive(rw http.ResponseWriter, req *http.Request) {
	rw.Header().Set("X-Backend", "yes")
	rw.Header().Set("Set-Cookie", "session=secret")
	rw.Header().Set("Etag", `"1"`)
	rw.Header().Set("Content-Encoding", "br")
	rw.Header().Set("Content-Type", "application/json")
	rw.Header().Set("Trailer", "X-Checksum")
	if req.Method == http.MethodHead {
		rw.Header().Del("Trailer")
		rw.Header().Set("Content-Length", "5000")
	}
	rw.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(rw, strings.Repeat("secret", 1_000))
	rw.Header().Set("X-Checksum", "1")
}

func TestTap_RefusesCleanly(t *testing.T) {
	refusing := newReceiver(t, func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusServiceUnavailable) })
	accepting := newReceiver(t, nil)
	down := closedEndpoint(t)
	cases := map[string]struct {
		kind    string
		service string
		options settings
		called  bool
	}{
		"the endpoint refuses the request":                   {"request", refusing.URL, nil, false},
		"the endpoint is down for the request":               {"request", down, nil, false},
		"the endpoint refuses the response":                  {"response", refusing.URL, nil, true},
		"the endpoint is down for the response":              {"response", down, nil, true},
		"the endpoint refuses the exchange":                  {"exchange", refusing.URL, nil, true},
		"the endpoint refuses the header":                    {"response", refusing.URL, settings{"recordBody": false}, true},
		"the endpoint refuses the first bytes":               {"response", refusing.URL, settings{"maxRecordBodySize": 10}, true},
		"the response is larger than can be held":            {"response", accepting.URL, settings{"maxRecordBodySize": -1, "maxBodySize": 100}, true},
		"the exchange's response is larger than can be held": {"exchange", accepting.URL, settings{"maxRecordBodySize": -1, "maxBodySize": 100}, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			onBothEngines(t, func(t *testing.T, e engine) {
				onBothProtocols(t, func(t *testing.T, prepare func(*httptest.Server)) {
					var called atomic.Int64
					backend := newBackend(t, nil, func(rw http.ResponseWriter, req *http.Request) {
						called.Add(1)
						secretive(rw, req)
					})
					options := settings{"rejectOnRecordError": true}
					for name, value := range c.options {
						options[name] = value
					}
					s := serve(t, e, settings{c.kind: one(c.service, options)}, newProxy(t, backend), addHeader, prepare)

					send := s.send
					methods := []string{http.MethodPost, http.MethodGet, http.MethodHead, http.MethodGet}
					if c.service == accepting.URL {
						methods[2] = http.MethodGet // The answer to HEAD has nothing to be held.
					}
					for _, method := range methods {
						body := strings.NewReader("question")
						if method != http.MethodPost {
							body = strings.NewReader("")
						}
						resp, answer := send(t, newRequest(t.Context(), t, method, s.URL, body))
						require.Nil(t, s.done(t), method)
						if method == http.MethodHead {
							assert.Empty(t, answer)
							answer = []byte("Internal Server Error\n")
						}
						assertRefused(t, resp, answer)
						assert.Equal(t, []string{"yes"}, resp.Header["X-In-Front"], method)
						send = s.sendReusing
					}
					if c.called {
						assert.EqualValues(t, 4, called.Load())
					} else {
						assert.Zero(t, called.Load())
					}
				})
			})
		})
	}
	accepting.none(t)
}

// A handler that does not give up when nothing can be written any more sends no trailers with the error in the place of its response.
func TestTap_SendsNoTrailersAfterARefusal(t *testing.T) {
	goesOn := func(rw http.ResponseWriter, req *http.Request) {
		secretive(rw, req)
		rw.Header().Set(http.TrailerPrefix+"X-Backend", "yes")
		rw.Header().Add("X-In-Front", "changed")
		rw.WriteHeader(http.StatusOK)
	}
	for _, recordBody := range []bool{true, false} {
		onBothEngines(t, func(t *testing.T, e engine) {
			onBothProtocols(t, func(t *testing.T, prepare func(*httptest.Server)) {
				options := settings{"rejectOnRecordError": true, "recordBody": recordBody}
				left := make(chan http.Header, 1)
				front := func(next http.Handler) http.Handler {
					return addHeader(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
						next.ServeHTTP(rw, req)
						left <- rw.Header().Clone()
					}))
				}
				s := serve(t, e, settings{"response": one(closedEndpoint(t), options)}, http.HandlerFunc(goesOn), front, prepare)

				resp, body := s.do(t, http.MethodGet, "/", nil)
				require.Nil(t, s.done(t))
				assertRefused(t, resp, body)
				assert.Empty(t, resp.Trailer)
				assert.Equal(t, []string{"yes"}, resp.Header["X-In-Front"])
				header := <-left
				assert.Equal(t, []string{"yes"}, header["X-In-Front"])
				assert.NotContains(t, header, http.TrailerPrefix+"X-Backend")
			})
		})
	}
}

// addHeader is a middleware in front of the tap that adds a header.
func addHeader(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		rw.Header().Set("X-In-Front", "yes")
		next.ServeHTTP(rw, req)
	})
}

// twoMaps is a writer as that of Traefik's retry: it has a header map of its own until the header is written, and then hands out the one of the
// writer underneath.
type twoMaps struct {
	http.ResponseWriter
	own     http.Header
	written bool
}

func (w *twoMaps) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *twoMaps) Header() http.Header {
	if w.written {
		return w.ResponseWriter.Header()
	}

	return w.own
}

func (w *twoMaps) WriteHeader(status int) {
	header := w.ResponseWriter.Header()
	for name, values := range w.own {
		header[name] = values
	}
	header.Set("X-In-Front-Late", "yes")
	w.ResponseWriter.WriteHeader(status)
	w.written = status >= 200
}

func (w *twoMaps) Write(p []byte) (int, error) {
	if !w.written {
		w.WriteHeader(http.StatusOK)
	}

	return w.ResponseWriter.Write(p)
}

// switchMaps is a middleware in front of the tap that hands out two header maps, and has headers in the first.
func switchMaps(next http.Handler) http.Handler {
	return addHeader(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		w := &twoMaps{ResponseWriter: rw, own: http.Header{"X-In-Front-Own": {"yes"}}}
		next.ServeHTTP(w, req)
	}))
}

func TestTap_KeepsHeadersOfMiddlewaresInFront(t *testing.T) {
	inFront := []string{"X-In-Front", "X-In-Front-Own", "X-In-Front-Late"}
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			onBothProtocols(t, func(t *testing.T, prepare func(*httptest.Server)) {
				endpoint := newReceiver(t, nil)
				s := serve(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), newProxy(t, newBackend(t, prepare, trailing)), switchMaps, prepare)

				for _, way := range []string{"announced", "unannounced", "both"} {
					resp, body := s.do(t, http.MethodGet, "/"+way+"/201", nil)
					require.Nil(t, s.done(t))
					assert.Equal(t, http.StatusCreated, resp.StatusCode, way)
					assert.Equal(t, "body", string(body), way)
					for _, name := range inFront {
						assert.Equal(t, []string{"yes"}, resp.Header[name], "%s: %s", way, name)
					}
					assert.Equal(t, http.Header{"Grpc-Status": {"0"}, "Grpc-Message": {"fine"}}, resp.Trailer, way)
					endpoint.kinds(t, 3)
				}
			})
		})

		t.Run("refused", func(t *testing.T) {
			s := serve(t, e, settings{"response": one(closedEndpoint(t), settings{"rejectOnRecordError": true})},
				newProxy(t, newBackend(t, nil, secretive)), switchMaps, nil)
			resp, body := s.do(t, http.MethodGet, "/", nil)
			require.Nil(t, s.done(t))
			assertRefused(t, resp, body)
			for _, name := range inFront {
				assert.Equal(t, []string{"yes"}, resp.Header[name], name)
			}
		})
	})
}

// What stands in the place of the tap in a chain without it.
var withoutTap = engine{"without the tap", nothing{}}

type nothing struct{}

func (nothing) New(_ context.Context, next http.Handler, _ map[string]any, _ string) (http.Handler, error) {
	return next, nil
}

var _ host.Plugin = nothing{}

// inFrontNothing is what stands in front of a tap that has no middleware in front.
func inFrontNothing(next http.Handler) http.Handler { return next }

func overHTTP2(s *httptest.Server) { s.EnableHTTP2 = true }

// onBothProtocols runs a test over HTTP/1.1 and over HTTP/2. Prepare is what makes a server speak it.
func onBothProtocols(t *testing.T, test func(t *testing.T, prepare func(*httptest.Server))) {
	t.Helper()
	t.Run("HTTP1.1", func(t *testing.T) { test(t, nil) })
	t.Run("HTTP2", func(t *testing.T) { test(t, overHTTP2) })
}

// newBackend starts a backend, and returns the URL by which a proxy reaches it over the protocol that prepare stands for.
func newBackend(t *testing.T, prepare func(*httptest.Server), handler http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	// Handlers of these tests panic on purpose.
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	scheme := "http://"
	if prepare != nil {
		server.Config.Protocols = new(http.Protocols)
		server.Config.Protocols.SetUnencryptedHTTP2(true)
		scheme = "h2c://"
	}
	server.Start()
	t.Cleanup(server.Close)

	return scheme + server.Listener.Addr().String()
}

// closedEndpoint returns the URL of a server that has gone.
func closedEndpoint(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(http.NotFoundHandler())
	server.Close()

	return server.URL
}

func newRequest(ctx context.Context, t *testing.T, method, url string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	require.NoError(t, err)

	return req
}

// sendReusing is send over a connection that was used before: the response before this one has left it usable.
func (s *tapped) sendReusing(t *testing.T, req *http.Request) (*http.Response, []byte) {
	t.Helper()
	var connections []bool
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { connections = append(connections, info.Reused) }}
	resp, body := s.send(t, req.WithContext(httptrace.WithClientTrace(req.Context(), trace)))
	assert.Equal(t, []bool{true}, connections, "the connection was not usable any more")

	return resp, body
}

// assertRefused checks that a response is the tap's own, and nothing else.
func assertRefused(t *testing.T, resp *http.Response, body []byte) {
	t.Helper()
	assert.Equal(t, http.StatusInternalServerError, resp.StatusCode)
	assert.Equal(t, "Internal Server Error\n", string(body))
	assert.EqualValues(t, len(body), resp.ContentLength)
	assert.Empty(t, resp.TransferEncoding)
	assert.Empty(t, resp.Trailer)
	for name := range resp.Header {
		switch name {
		case "Content-Length", "Content-Type", "Date", "X-Content-Type-Options", "X-In-Front", "X-In-Front-Own", "X-In-Front-Late":
		default:
			assert.Fail(t, "a header of the backend", name)
		}
	}
	assert.Equal(t, "text/plain; charset=utf-8", resp.Header.Get("Content-Type"))
}

// dial connects to the server in front of a tap.
func dial(t *testing.T, s *tapped) (*net.TCPConn, *bufio.Reader) {
	t.Helper()
	conn, err := net.Dial("tcp", s.Listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))

	return conn.(*net.TCPConn), bufio.NewReader(conn)
}

// readResponse reads one response, informational ones included.
func readResponse(t *testing.T, reader *bufio.Reader) *http.Response {
	t.Helper()
	resp, err := http.ReadResponse(reader, nil)
	require.NoError(t, err)

	return resp
}

// receive waits for a value.
func receive[T any](t *testing.T, values <-chan T, what string) T {
	t.Helper()
	select {
	case value := <-values:
		return value
	case <-time.After(patience):
		require.FailNow(t, "missing: "+what)
		panic("not reached")
	}
}
