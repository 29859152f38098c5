package yaegi_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// exchangeRaw sends text as it stands on a connection of its own, and returns the answer and its body.
func exchangeRaw(t *testing.T, s *tapped, text string) (*http.Response, []byte) {
	t.Helper()
	conn, err := net.DialTimeout("tcp", s.Listener.Addr().String(), patience)
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))

	_, err = io.WriteString(conn, text)
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)

	return resp, body
}

func TestTap_RedactsHeadersWhateverTheirCase(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			atBackend := make(chan http.Header, 1)
			endpoint := newReceiver(t, nil)
			config := every(endpoint.URL, settings{"rejectOnRecordError": reject})
			config["redactHeaders"] = []any{"AUTHORIZATION", "cookie", "X-Api-Key", "SET-cookie"}
			config["response"].(settings)["requestHeaders"] = []any{"Authorization", "x-api-key", "X-Plain"}
			s := newTap(t, e, config, func(rw http.ResponseWriter, req *http.Request) {
				atBackend <- req.Header
				for _, cookie := range []string{"a=s3cret", "b=s3cret; HttpOnly", "c=s3cret"} {
					rw.Header().Add("Set-Cookie", cookie)
				}
				rw.Header().Set("X-Api-Key", "s3cret new")
			})

			resp, _ := exchangeRaw(t, s, "GET / HTTP/1.1\r\nHost: tap\r\nauthorization: Bearer s3cret\r\nCOOKIE: a=s3cret\r\n"+
				"x-API-key: s3cret 1\r\nX-Api-Key: s3cret 2\r\nX-Plain: plain\r\n\r\n")
			require.Nil(t, s.done(t))

			got := <-atBackend
			assert.Equal(t, []string{"Bearer s3cret"}, got["Authorization"])
			assert.Equal(t, []string{"a=s3cret"}, got["Cookie"])
			assert.Equal(t, []string{"s3cret 1", "s3cret 2"}, got["X-Api-Key"])
			assert.Equal(t, []string{"a=s3cret", "b=s3cret; HttpOnly", "c=s3cret"}, resp.Header["Set-Cookie"])
			assert.Equal(t, []string{"s3cret new"}, resp.Header["X-Api-Key"])

			records := endpoint.kinds(t, 3)
			for kind, record := range records {
				assert.NotContains(t, string(record.Payload), "s3cret", kind)
			}
			for _, kind := range []string{"request", "exchange"} {
				headers := records[kind].Request.Headers
				assert.Equal(t, redactedValues(1), headers["Authorization"], kind)
				assert.Equal(t, redactedValues(1), headers["Cookie"], kind)
				assert.Equal(t, redactedValues(2), headers["X-Api-Key"], kind)
				assert.Equal(t, []string{"plain"}, headers["X-Plain"], kind)
			}
			for _, kind := range []string{"response", "exchange"} {
				headers := records[kind].Response.Headers
				assert.Equal(t, redactedValues(3), headers["Set-Cookie"], kind)
				assert.Equal(t, redactedValues(1), headers["X-Api-Key"], kind)
			}
			assert.Equal(t, http.Header{
				"Authorization": redactedValues(1),
				"X-Api-Key":     redactedValues(2),
				"X-Plain":       {"plain"},
			}, records["response"].Request.Headers)
		})
	})
}

func redactedValues(n int) []string {
	values := make([]string, n)
	for i := range values {
		values[i] = "REDACTED"
	}

	return values
}

// What comes from the network has canonical names, but middlewares on both sides of the tap may write others into the maps.
func TestTap_RedactsNamesThatAMiddlewareSpellsInItsOwnWay(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			config := every(endpoint.URL, settings{"rejectOnRecordError": reject})
			next := http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header()["SET-COOKIE"] = []string{"a=s3cret"}
				rw.Header()["set-cookie"] = []string{"b=s3cret"}
			})
			before := func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
					req.Header["AUTHORIZATION"] = []string{"Bearer s3cret"}
					req.Header["authorization"] = []string{"Bearer s3cret"}
					next.ServeHTTP(rw, req)
				})
			}
			s := serve(t, e, config, next, before, nil)

			resp, _ := s.do(t, http.MethodGet, "/", nil)
			require.Nil(t, s.done(t))
			assert.ElementsMatch(t, []string{"a=s3cret", "b=s3cret"}, resp.Header["Set-Cookie"])
			for kind, record := range endpoint.kinds(t, 3) {
				assert.NotContains(t, string(record.Payload), "s3cret", kind)
			}
		})
	})
}

func TestTap_RedactsCredentialsByDefault(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			s := newTap(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), setThreeCookies)

			resp, _ := s.do(t, http.MethodGet, "/", nil, "Authorization", "s3cret", "Proxy-Authorization", "s3cret", "Cookie", "a=s3cret", "X-Api-Key", "plain")
			require.Nil(t, s.done(t))
			assert.Equal(t, threeCookies, resp.Header["Set-Cookie"])

			records := endpoint.kinds(t, 3)
			for kind, record := range records {
				assert.NotContains(t, string(record.Payload), "s3cret", kind)
			}
			headers := records["exchange"].Request.Headers
			for _, name := range []string{"Authorization", "Proxy-Authorization", "Cookie"} {
				assert.Equal(t, redactedValues(1), headers[name], name)
			}
			assert.Equal(t, []string{"plain"}, headers["X-Api-Key"])
			assert.Equal(t, redactedValues(3), records["exchange"].Response.Headers["Set-Cookie"])
		})
	})
}

var threeCookies = []string{"first=s3cret", "second=s3cret; Path=/", "first=s3cret again"}

func setThreeCookies(rw http.ResponseWriter, _ *http.Request) {
	for _, cookie := range threeCookies {
		rw.Header().Add("Set-Cookie", cookie)
	}
}

func TestTap_RecordsAllValuesOfAHeaderInOrder(t *testing.T) {
	cases := []struct {
		name   string
		redact any
	}{
		{"an empty list redacts nothing", []any{}},
		{"an empty string is an empty list", ""},
		{"a list stands in the place of the default", []any{"X-Other"}},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, test := range cases {
			t.Run(test.name, func(t *testing.T) {
				endpoint := newReceiver(t, nil)
				config := every(endpoint.URL, nil)
				config["redactHeaders"] = test.redact
				s := newTap(t, e, config, setThreeCookies)

				resp, _ := s.do(t, http.MethodGet, "/", nil, "X-Many", "1", "X-Many", "2", "X-Many", "1", "Authorization", "verbatim")
				require.Nil(t, s.done(t))
				assert.Equal(t, threeCookies, resp.Header["Set-Cookie"])

				records := endpoint.kinds(t, 3)
				assert.Equal(t, threeCookies, records["response"].Response.Headers["Set-Cookie"])
				assert.Equal(t, threeCookies, records["exchange"].Response.Headers["Set-Cookie"])
				assert.Equal(t, []string{"1", "2", "1"}, records["request"].Request.Headers["X-Many"])
				assert.Equal(t, []string{"verbatim"}, records["request"].Request.Headers["Authorization"])
			})
		}
	})
}

func TestTap_AddsTheNamedRequestHeadersToAResponseRecord(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			config := settings{"response": one(endpoint.URL, settings{
				"rejectOnRecordError": reject,
				"requestHeaders":      []any{"x-request-id", "X-Absent"},
			})}
			next := http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				req.Header["X-Request-Id"][0] = "changed"
				req.Header.Add("X-Request-Id", "added")
				req.Header.Set("X-Absent", "added")
				req.Method, req.RequestURI, req.Host = http.MethodPut, "/changed", "changed"
				req.URL.Path = "/changed"
				_, _ = io.Copy(rw, req.Body)
			})
			s := newTapInFrontOf(t, e, config, next)

			_, body := s.do(t, http.MethodPost, "/asked?a=1", []byte("ping"), "X-Request-Id", "one", "X-Request-Id", "two", "X-Other", "other")
			require.Nil(t, s.done(t))
			assert.Equal(t, "ping", string(body))

			request := endpoint.next(t).Request
			require.NotNil(t, request)
			assert.Equal(t, http.Header{"X-Request-Id": {"one", "two"}}, request.Headers)
			assert.Equal(t, http.MethodPost, request.Method)
			assert.Equal(t, "/asked?a=1", request.URL)
			assert.Equal(t, s.Listener.Addr().String(), request.Host)
			assert.Equal(t, "HTTP/1.1", request.Proto)
			assert.Empty(t, request.RemoteAddr)
			assert.Empty(t, request.Body)
			assert.False(t, request.BodyTruncated)
			endpoint.none(t)
		})
	})
}

func TestTap_RecordsTheRequestAsItArrived(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			next := http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				req.Header.Set("X-Request-Id", "changed")
				req.Header["X-Kept"][0] = "changed"
				req.Header.Set("X-Added", "added")
				req.Method, req.RequestURI, req.Host, req.RemoteAddr = http.MethodPut, "/changed", "changed", "changed"
				rw.WriteHeader(http.StatusNoContent)
				rw.Header().Set("X-Late", "too late")
			})
			s := newTapInFrontOf(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), next)

			s.do(t, http.MethodGet, "/", nil, "X-Request-Id", "one", "X-Kept", "kept")
			require.Nil(t, s.done(t))

			records := endpoint.kinds(t, 3)
			for _, kind := range []string{"request", "exchange"} {
				request := records[kind].Request
				assert.Equal(t, []string{"one"}, request.Headers["X-Request-Id"], kind)
				assert.Equal(t, []string{"kept"}, request.Headers["X-Kept"], kind)
				assert.NotContains(t, request.Headers, "X-Added", kind)
				assert.Equal(t, http.MethodGet, request.Method, kind)
				assert.Equal(t, "/", request.URL, kind)
				assert.Equal(t, s.Listener.Addr().String(), request.Host, kind)
				_, _, err := net.SplitHostPort(request.RemoteAddr)
				assert.NoError(t, err, kind)
			}
			assert.NotContains(t, records["response"].Response.Headers, "X-Late")
		})
	})
}

func TestTap_RecordsTheURLByteForByte(t *testing.T) {
	urls := []string{
		"/p?a=1&a=2&b=%20x",
		"/p?",
		"/a%2Fb//c/../d;e=1?x=%zz;y&&=&+",
		"//double",
		"/%e4%BD%a0/ü?q=ü",
		`/<>"&'?<script>`,
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newReceiver(t, nil)
		s := newTap(t, e, every(endpoint.URL, nil), func(http.ResponseWriter, *http.Request) {})
		for _, url := range urls {
			t.Run(url, func(t *testing.T) {
				exchangeRaw(t, s, "GET "+url+" HTTP/1.1\r\nHost: tap\r\n\r\n")
				require.Nil(t, s.done(t))
				records := endpoint.kinds(t, 3)
				assert.Equal(t, url, records["request"].Request.URL)
				assert.Equal(t, url, records["exchange"].Request.URL)
			})
		}
	})
}
