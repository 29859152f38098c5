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
