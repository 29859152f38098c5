package yaegi_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTap_RecordsAnExchange(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			s := newTap(t, e, every(endpoint.URL, settings{"rejectOnRecordError": reject}), func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("X-Backend", "yes")
				rw.WriteHeader(http.StatusCreated)
				_, _ = rw.Write([]byte("pong"))
			})

			resp, body := s.do(t, http.MethodPost, "/p?a=1&a=2&b=%20x", []byte("ping"))
			require.Nil(t, s.done(t))
			assert.Equal(t, http.StatusCreated, resp.StatusCode)
			assert.Equal(t, "pong", string(body))

			records := endpoint.kinds(t, 3)
			assert.Equal(t, "ping", string(records["request"].Request.Body))
			assert.Nil(t, records["request"].Response)
			assert.Equal(t, "pong", string(records["response"].Response.Body))
			assert.Nil(t, records["response"].Request)
			assert.Equal(t, "/p?a=1&a=2&b=%20x", records["exchange"].Request.URL)
			assert.Equal(t, http.StatusCreated, records["exchange"].Response.Status)
			assert.Equal(t, []string{"yes"}, records["exchange"].Response.Headers["X-Backend"])
			assert.Equal(t, records["request"].ID, records["response"].ID)
			endpoint.none(t)
		})
	})
}

func TestTap_RecordsNoBodyOfTheAnswerToHead(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			config := settings{"response": one(endpoint.URL, settings{"rejectOnRecordError": reject, "maxRecordBodySize": -1, "maxBodySize": 10})}
			s := newTapInFrontOf(t, e, config, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Length", "12345")
				_, _ = rw.Write(make([]byte, 12345))
			}))

			resp, _ := s.do(t, http.MethodHead, "/", nil)
			require.Nil(t, s.done(t))
			assert.Equal(t, http.StatusOK, resp.StatusCode)
			assert.EqualValues(t, 12345, resp.ContentLength)

			record := endpoint.next(t)
			assert.Equal(t, http.StatusOK, record.Response.Status)
			assert.Empty(t, record.Response.Body)
			assert.False(t, record.Response.BodyTruncated)
		})
	})
}

func TestTap_ServesAnUpgradeWhoseHandlerWritesTheStatus(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		bothWays(t, func(t *testing.T, reject bool) {
			endpoint := newReceiver(t, nil)
			config := settings{"response": one(endpoint.URL, settings{"rejectOnRecordError": reject})}
			s := newTapInFrontOf(t, e, config, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Upgrade", "echo")
				rw.Header().Set("Connection", "Upgrade")
				rw.WriteHeader(http.StatusSwitchingProtocols)
				hijacker, ok := rw.(http.Hijacker)
				if !assert.True(t, ok) {
					return
				}
				conn, buffered, err := hijacker.Hijack()
				if !assert.NoError(t, err) {
					return
				}
				_, _ = buffered.WriteString("hello")
				_ = buffered.Flush()
				_ = conn.Close()
			}))

			resp, body := s.do(t, http.MethodGet, "/", nil, "Connection", "Upgrade", "Upgrade", "echo")
			require.Nil(t, s.done(t))
			assert.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
			assert.Equal(t, "hello", string(body))
			assert.Equal(t, http.StatusSwitchingProtocols, endpoint.next(t).Response.Status)
		})
	})
}
