package traefik_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// record is what these tests look at in a record.
type record struct {
	Kind     string `json:"kind"`
	Request  *half  `json:"request"`
	Response *half  `json:"response"`
}

type half struct {
	URL    string `json:"url"`
	Status int    `json:"status"`
	Body   []byte `json:"body"`
}

// endpoint accepts records, one in a POST.
type endpoint struct {
	*httptest.Server
	records chan record
}

func newEndpoint(t *testing.T) *endpoint {
	t.Helper()
	e := &endpoint{records: make(chan record, 100)}
	e.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		var got record
		assert.NoError(t, json.NewDecoder(req.Body).Decode(&got))
		e.records <- got
	}))
	t.Cleanup(e.Close)

	return e
}

// next waits for one record.
func (e *endpoint) next(t *testing.T) record {
	t.Helper()
	select {
	case got := <-e.records:
		return got
	case <-time.After(patience):
		require.FailNow(t, "no record came")

		return record{}
	}
}
