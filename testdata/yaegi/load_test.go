package yaegi_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// exchangesOfLoad is how many exchanges each load test makes: few, so that all of them can be run often, or what TAP_LOAD says:
//
//	TAP_LOAD=20000 go test -race -count=1 -timeout 30m -run TestLoad .
func exchangesOfLoad(t *testing.T) int {
	t.Helper()
	text, set := os.LookupEnv("TAP_LOAD")
	if !set {
		return 500
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, "TAP_LOAD")

	return n
}

func TestLoad_EveryRecordIsAccountedFor(t *testing.T) {
	modes := []struct {
		name    string
		options settings
	}{
		{"one POST a record", settings{"rejectOnRecordError": true}},
		{"retry", settings{"rejectOnRecordError": true, "retry": settings{"attempts": 2, "initialInterval": "1ms"}}},
		{"batch", settings{"rejectOnRecordError": true, "maxBatchSize": 100}},
		{"pending", settings{"maxPending": 20}},
		{"batch and pending", settings{"maxPending": 20, "maxBatchSize": 100}},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, mode := range modes {
			t.Run(mode.name, func(t *testing.T) { accountForEveryRecord(t, e, mode.options) })
		}
	})
}

func accountForEveryRecord(t *testing.T, e engine, options settings) {
	t.Helper()
	made := exchangesOfLoad(t)
	store := newUnreliableStore(t)
	before := countsOf(t, "audit@file")
	s := newTapInFrontOf(t, e, settings{"exchange": one(store.endpoint.URL, options)}, http.HandlerFunc(accept))

	statuses := crowd(t, s, 50, made)
	awaitAnswers(t)

	counted := countsOf(t, "audit@file").since(before)
	assert.EqualValues(t, made, counted.records(), "%+v", counted)
	if options["rejectOnRecordError"] == true {
		assert.Zero(t, counted.Failed+counted.Dropped, "nothing of a reject mode fails otherwise")
		assert.EqualValues(t, counted.Sent, countOf(statuses, http.StatusOK))
		assert.EqualValues(t, counted.Rejected, countOf(statuses, http.StatusInternalServerError))
	} else {
		assert.Zero(t, counted.Rejected, "nothing is rejected where nobody waits")
		assert.Equal(t, made, countOf(statuses, http.StatusOK))
	}
	assert.NotZero(t, counted.Sent)

	store.mu.Lock()
	defer store.mu.Unlock()
	assert.LessOrEqual(t, int(counted.Sent), len(store.keys), "a record was counted as sent that the endpoint does not have")
	if options["rejectOnRecordError"] == true {
		for i, status := range statuses {
			if status == http.StatusOK {
				_, stored := store.keys[fmt.Sprintf("/%d", i)] // assert.Contains would compare it with every key.
				assert.True(t, stored, "client %d got 200 without a record", i)
			}
		}
	}
}

// unreliableStore is an endpoint that fails one POST in ten at random: it does not store it, or it stores it and fails its answer.
type unreliableStore struct {
	endpoint *receiver

	mu sync.Mutex
	// keys are the Idempotency-Key headers of the records stored, by URL.
	keys map[string]string
}

func newUnreliableStore(t *testing.T) *unreliableStore {
	t.Helper()
	store := &unreliableStore{keys: map[string]string{}}
	store.endpoint = newReceiver(t, func(rw http.ResponseWriter, req *http.Request) {
		failure := rand.IntN(40)
		if failure == 0 {
			rw.WriteHeader(http.StatusServiceUnavailable)

			return
		}

		payload, err := io.ReadAll(req.Body)
		assert.NoError(t, err)
		store.put(t, req.Header, payload)
		switch failure {
		case 1:
			rw.WriteHeader(http.StatusBadGateway)
		case 2:
			rw.WriteHeader(http.StatusTooManyRequests)
		case 3:
			panic(http.ErrAbortHandler) // Cuts the connection.
		}
	})

	return store
}

func (s *unreliableStore) put(t *testing.T, header http.Header, payload []byte) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	key := header.Get("Idempotency-Key")
	assert.NotEmpty(t, key)
	for _, line := range linesOf(t, header, payload) {
		url := urlOf(t, line)
		if first, twice := s.keys[url]; twice {
			assert.Equal(t, first, key, "%s came twice with different keys", url)
		}
		s.keys[url] = key
	}
}

// accept answers 200.
func accept(http.ResponseWriter, *http.Request) {}

// crowd sends n requests, for /0, /1 and so on, so many clients at a time. It returns the status of each, 0 where no answer came.
func crowd(t *testing.T, s *tapped, clients, n int) []int {
	t.Helper()
	transport, ok := s.Client.Transport.(*http.Transport)
	require.True(t, ok)
	transport.MaxIdleConnsPerHost = clients

	statuses := make([]int, n)
	var next atomic.Int64
	var working sync.WaitGroup
	for range clients {
		working.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				resp, err := s.Client.Get(fmt.Sprintf("%s/%d", s.URL, i))
				if !assert.NoError(t, err) {
					continue
				}
				_, err = io.Copy(io.Discard, resp.Body)
				assert.NoError(t, err)
				_ = resp.Body.Close()
				statuses[i] = resp.StatusCode
			}
		})
	}
	working.Wait()

	return statuses
}

func countOf(statuses []int, status int) int {
	n := 0
	for _, s := range statuses {
		if s == status {
			n++
		}
	}

	return n
}
