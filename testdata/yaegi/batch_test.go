package yaegi_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap"
)

func TestBatch_EveryCallerGetsTheAnswerOfItsOwnBatch(t *testing.T) {
	refused := regexp.MustCompile(`"url":"/[0-9]*7"`)
	onBothEngines(t, func(t *testing.T, e engine) {
		const clients, n, maxBatchSize = 50, 500, 10
		endpoint := newGathering(t, clients, n, func(rw http.ResponseWriter, req *http.Request) {
			payload, err := io.ReadAll(req.Body)
			assert.NoError(t, err)
			if refused.Match(payload) {
				rw.WriteHeader(http.StatusBadRequest)
			}
		})
		config := settings{"exchange": one(endpoint.URL, settings{"rejectOnRecordError": true, "maxBatchSize": maxBatchSize})}
		before := countsOf(t, "audit@file")
		s := newTapInFrontOf(t, e, config, endpoint.backend())

		statuses := crowd(t, s, clients, n)

		answered := map[string]int{}
		batches := endpoint.batches(t, n)
		for _, batch := range batches {
			assert.LessOrEqual(t, len(batch), maxBatchSize)
			want := http.StatusOK
			if slices.ContainsFunc(batch, func(r received) bool { return refused.Match(r.Payload) }) {
				want = http.StatusInternalServerError
			}
			for _, r := range batch {
				assert.NotContains(t, answered, r.Request.URL, "a record came twice")
				answered[r.Request.URL] = want
			}
		}
		for i, status := range statuses {
			assert.Equal(t, answered[fmt.Sprintf("/%d", i)], status, i)
		}
		assert.Less(t, len(batches), n/2, "nothing has gathered")
		endpoint.none(t)

		counted := countsOf(t, "audit@file").since(before)
		assert.EqualValues(t, n, counted.records())
		assert.EqualValues(t, countOf(statuses, http.StatusInternalServerError), counted.Rejected)
	})
}

func TestBatch_ManyRecordsGoInFewPOSTs(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		const clients, n = 50, 1000
		endpoint := newGathering(t, clients, n, nil)
		config := settings{"exchange": one(endpoint.URL, settings{"maxBatchSize": 100, "rejectOnRecordError": true})}
		s := newTapInFrontOf(t, e, config, endpoint.backend())

		assert.Equal(t, n, countOf(crowd(t, s, clients, n), http.StatusOK))

		batches := endpoint.batches(t, n)
		assert.LessOrEqual(t, len(batches), n/10)
		for _, batch := range batches {
			assert.Equal(t, "batch", batch[0].Header.Get("X-Tap-Record"))
			assert.Equal(t, "application/x-ndjson", batch[0].Header.Get("Content-Type"))
			assert.NotEmpty(t, batch[0].Header.Get("Idempotency-Key"))
		}
		endpoint.none(t)
	})
}

func TestBatch_IsSharedByAllInstancesWithTheSameSettings(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		const clients = 20
		endpoint := newGathering(t, 2*clients, 2*clients, nil)
		config := settings{"exchange": one(endpoint.URL, settings{"maxBatchSize": 100, "rejectOnRecordError": true})}
		var working sync.WaitGroup
		for range 2 {
			s := newTapInFrontOf(t, e, config, endpoint.backend())
			working.Go(func() { crowd(t, s, clients, clients) })
		}
		working.Wait()

		assert.True(t, slices.ContainsFunc(endpoint.batches(t, 2*clients), func(batch []received) bool {
			return slices.ContainsFunc(batch, func(r received) bool { return r.Request.Host != batch[0].Request.Host })
		}), "no batch has records of both")
	})
}

func TestBatch_HasAtMostAMebibyte(t *testing.T) {
	const mebibyte = 1 << 20
	onBothEngines(t, func(t *testing.T, e engine) {
		const clients, large = 30, 29
		endpoint := newGathering(t, clients, clients, nil)
		config := settings{"exchange": one(endpoint.URL, settings{"maxBatchSize": 100, "rejectOnRecordError": true, "maxRecordBodySize": -1})}
		s := newTapInFrontOf(t, e, config, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			endpoint.waiting.Add(1)
			size := 150_000 // 200 kB as base64.
			if req.URL.Path == fmt.Sprintf("/%d", large) {
				size = 2 * mebibyte
			}
			_, _ = rw.Write(make([]byte, size))
		}))

		assert.Equal(t, clients, countOf(crowd(t, s, clients, clients), http.StatusOK))

		most := 0
		for _, batch := range endpoint.batches(t, clients) {
			size := 0
			for _, r := range batch {
				size += len(r.Payload) + 1
			}
			if len(batch) > 1 {
				assert.LessOrEqual(t, size, mebibyte)
				most = max(most, size)
			}
		}
		assert.Greater(t, most, mebibyte*3/4, "no batch came near the limit")
	})
}

func TestBatch_DoesNotWaitForCompany(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		endpoint := newReceiver(t, nil)
		config := settings{"exchange": one(endpoint.URL, settings{"maxBatchSize": 1000, "rejectOnRecordError": true})}
		s := newTapInFrontOf(t, e, config, http.HandlerFunc(accept))

		const n = 100
		started := time.Now()
		for i := range n {
			s.do(t, http.MethodGet, "/", nil)
			assert.EqualValues(t, i+1, endpoint.next(t).POST)
		}
		// A timer of 100 ms would take twice as long. A POST on loopback takes a millisecond.
		assert.Less(t, time.Since(started), 5*time.Second)
	})
}

func TestBatch_IsAnsweredWithinTheTimeout(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		t.Parallel()
		endpoint := newHanging(t)
		config := settings{"exchange": one(endpoint.URL, settings{"maxBatchSize": 2, "rejectOnRecordError": true, "timeout": "1s"})}
		s := newTapInFrontOf(t, e, config, http.HandlerFunc(accept))

		started := time.Now()
		statuses := crowd(t, s, 80, 80)
		// One after the other, the batches would take 20 s or more.
		assert.Less(t, time.Since(started), 10*time.Second)
		assert.Equal(t, 80, countOf(statuses, http.StatusInternalServerError))
	})
}

func TestDelivery_ResendsWithTheSameKeyWhatWasStoredWithoutAnAnswer(t *testing.T) {
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, maxBatchSize := range []int{1, 10} {
			t.Run(fmt.Sprintf("maxBatchSize=%d", maxBatchSize), func(t *testing.T) {
				var posts atomic.Int64
				endpoint := newReceiver(t, func(http.ResponseWriter, *http.Request) {
					if posts.Add(1) == 1 {
						panic(http.ErrAbortHandler) // Cuts the connection.
					}
				})
				options := settings{"maxBatchSize": maxBatchSize, "rejectOnRecordError": true, "retry": settings{"attempts": 2, "initialInterval": "1ms"}}
				s := newTapInFrontOf(t, e, settings{"exchange": one(endpoint.URL, options)}, http.HandlerFunc(accept))

				resp, _ := s.do(t, http.MethodGet, "/", nil)
				assert.Equal(t, http.StatusOK, resp.StatusCode)
				assertSamePOST(t, endpoint.next(t), endpoint.next(t))
				endpoint.none(t)
			})
		}
	})
}

// assertSamePOST asserts that one POST repeats another, byte by byte.
func assertSamePOST(t *testing.T, first, again received) {
	t.Helper()
	assert.Equal(t, string(first.Payload), string(again.Payload))
	assert.Equal(t, first.Header, again.Header)
	assert.Equal(t, first.URI, again.URI)
	assert.NotEmpty(t, again.Header.Get("Idempotency-Key"))
}

// gathering is an endpoint that answers after 10 ms, and not before all clients wait for the answers to their records. So a slow machine
// has as much to gather as a fast one.
type gathering struct {
	*receiver
	// waiting counts the records that have been made and not answered, left those that are still to be answered.
	waiting, left atomic.Int64
}

// newGathering starts such an endpoint for so many records of so many clients. Answer may answer; nil accepts everything.
func newGathering(t *testing.T, clients, records int64, answer http.HandlerFunc) *gathering {
	t.Helper()
	g := &gathering{}
	g.left.Store(records)
	g.receiver = newReceiver(t, func(rw http.ResponseWriter, req *http.Request) {
		payload, err := io.ReadAll(req.Body)
		assert.NoError(t, err)
		n := int64(len(linesOf(t, req.Header, payload)))
		time.Sleep(10 * time.Millisecond)
		for deadline := time.Now().Add(patience); g.waiting.Load() < min(clients, g.left.Load()); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Error("not all clients came to wait")

				break
			}
		}
		if answer != nil {
			req.Body = io.NopCloser(bytes.NewReader(payload))
			answer(rw, req)
		}
		g.left.Add(-n)
		g.waiting.Add(-n)
	})

	return g
}

// backend returns a handler whose response is recorded next.
func (g *gathering) backend() http.Handler {
	return http.HandlerFunc(func(http.ResponseWriter, *http.Request) { g.waiting.Add(1) })
}

// batches waits for n records, and returns them by POST.
func (r *receiver) batches(t *testing.T, n int) [][]received {
	t.Helper()
	var batches [][]received
	byPOST := map[int64]int{}
	for range n {
		got := r.next(t)
		at, known := byPOST[got.POST]
		if !known {
			at = len(batches)
			byPOST[got.POST] = at
			batches = append(batches, nil)
		}
		batches[at] = append(batches[at], got)
	}

	return batches
}

// urlOf returns the URL of the request in a record.
func urlOf(t *testing.T, payload []byte) string {
	t.Helper()
	var record tap.Record
	require.NoError(t, json.NewDecoder(strings.NewReader(string(payload))).Decode(&record))

	return record.Request.URL
}

// hanging is an endpoint that takes records and answers none, until end or the end of the test.
type hanging struct {
	*receiver
	end func()
}

func newHanging(t *testing.T) *hanging {
	t.Helper()
	over := make(chan struct{})
	h := &hanging{end: sync.OnceFunc(func() { close(over) })}
	h.receiver = newReceiver(t, func(_ http.ResponseWriter, req *http.Request) {
		select {
		case <-over:
		case <-req.Context().Done():
		}
	})
	t.Cleanup(h.end) // Before the endpoint is closed, which waits for its answers.

	return h
}
