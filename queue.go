package tap

import (
	"errors"
	"sync"
	"time"
)

const (
	// maxBatchBytes is how large a batch may grow before it takes no more records. A larger record goes alone.
	maxBatchBytes = 1 << 20
	// batchSlots is how many batches may be under way to one endpoint at a time.
	batchSlots = 2
	// pendingSlots is how many single records may be, where handlers do not wait for them.
	pendingSlots = 32
)

// errDropped is the failure of a record for which there is no room among those that are pending.
var errDropped = errors.New("dropped: maxPending records are pending already")

// queue is where records wait for a slot: while as many POSTs are under way as there are slots, what comes gathers in batches, and
// the next batch goes when a slot is free. With a slot free nothing waits.
type queue struct {
	slots int

	mu      sync.Mutex
	posts   int
	batches []*batch
	// pending counts the records that were handed over and have not been answered.
	pending int
}

// batch is what goes in one POST. Its first record's handler sends it, and the others wait for it.
type batch struct {
	delivery *delivery
	records  int
	// turn is closed when a slot is free, done when err is the answer. Both are nil where no handler waits.
	turn, done chan struct{}
	err        error
	// entries are the records whose handlers do not wait.
	entries []entry
}

// entry is a record that was handed over.
type entry struct {
	source  *source
	size    int
	started time.Time
}

func slotsFor(settings endpointSettings) int {
	if settings.maxBatch == 1 {
		return pendingSlots
	}

	return batchSlots
}

// sendGathered sends a record together with others, or leaves it pending, or both.
func sendGathered(s *source, id string, payload []byte, rejects bool) error {
	started := time.Now()
	if s.endpoint.settings.maxPending > 0 {
		return handOver(s, id, payload, started)
	}

	err := commit(s, id, payload, started)
	account(s, err, len(payload), started, rejects)

	return err
}

// commit delivers a record together with those that come while it waits for a slot, and returns the answer to the batch.
//
// No caller needs a timer: a batch has the deadline of its first record, and the batches before it have earlier ones.
func commit(s *source, id string, payload []byte, started time.Time) error {
	q := &s.endpoint.queue
	q.mu.Lock()
	if q.posts < q.slots {
		q.posts++
		q.mu.Unlock()

		err := post(s.endpoint, newDelivery(s, id, payload, started))
		nextBatch(q)

		return err
	}

	b, leads := gather(s, id, payload, started)
	q.mu.Unlock()

	if leads {
		lead(s.endpoint, b)
	} else {
		<-b.done
	}

	return b.err
}

// lead waits for a slot, and delivers a batch for all that are in it.
func lead(e *endpoint, b *batch) {
	<-b.turn
	b.err = post(e, b.delivery)
	nextBatch(&e.queue)
	close(b.done)
}

// newDelivery makes a POST of one record, to which others may be added.
func newDelivery(s *source, id string, payload []byte, started time.Time) *delivery {
	d := &delivery{payload: payload, deadline: started.Add(s.endpoint.timeout)}
	if s.endpoint.settings.maxBatch == 1 {
		d.header = recordHeader(s, id)

		return d
	}

	d.payload = append(d.payload, '\n')
	d.header = s.endpoint.settings.headers.Clone()
	d.header["Content-Type"] = []string{"application/x-ndjson"}
	d.header["X-Tap-Record"] = []string{"batch"}
	d.header["Idempotency-Key"] = []string{id + s.suffix + "-batch"}

	return d
}

// gather puts a record into the last batch, or into a new one behind it. It returns the batch and whether it is new. The queue's mutex is held.
func gather(s *source, id string, payload []byte, started time.Time) (*batch, bool) {
	q := &s.endpoint.queue
	if last := len(q.batches) - 1; last >= 0 {
		b := q.batches[last]
		if b.records < s.endpoint.settings.maxBatch && len(b.delivery.payload)+len(payload) < maxBatchBytes {
			b.records++
			b.delivery.payload = append(append(b.delivery.payload, payload...), '\n')

			return b, false
		}
	}

	b := &batch{records: 1, delivery: newDelivery(s, id, payload, started)}
	if s.endpoint.settings.maxPending == 0 {
		b.turn, b.done = make(chan struct{}), make(chan struct{})
	}
	q.batches = append(q.batches, b)

	return b, true
}

// nextBatch gives the slot of a POST that has ended to the batch that has waited longest. It returns the batch when nobody waits for its turn.
func nextBatch(q *queue) *batch {
	q.mu.Lock()
	defer q.mu.Unlock()

	if len(q.batches) == 0 {
		q.posts--

		return nil
	}
	b := q.batches[0]
	q.batches = q.batches[1:]
	if b.turn != nil {
		close(b.turn)

		return nil
	}

	return b
}

// handOver takes a record whose handler does not wait, and returns errDropped when as many are pending as may be.
func handOver(s *source, id string, payload []byte, started time.Time) error {
	q := &s.endpoint.queue
	q.mu.Lock()
	full := q.pending >= s.endpoint.settings.maxPending
	if !full {
		enqueue(s, id, payload, started)
	}
	q.mu.Unlock()
	if full {
		return accountDropped(s)
	}

	return nil
}

// enqueue gives a record a slot, or a place in a batch that waits for one. The queue's mutex is held.
func enqueue(s *source, id string, payload []byte, started time.Time) {
	e := s.endpoint
	q := &e.queue
	record := entry{source: s, size: len(payload), started: started}

	q.pending++
	metrics.pending.Add(1)
	if q.posts < q.slots {
		q.posts++
		go drain(e, &batch{delivery: newDelivery(s, id, payload, started), entries: []entry{record}})

		return
	}
	b, _ := gather(s, id, payload, started)
	b.entries = append(b.entries, record)
}

// drain delivers pending batches until there are none.
func drain(e *endpoint, b *batch) {
	for b != nil {
		// The time in the queue is bounded by its length, not by the timeout, which is for the endpoint.
		b.delivery.deadline = time.Now().Add(e.timeout)
		err := post(e, b.delivery)
		for _, record := range b.entries {
			account(record.source, err, record.size, record.started, false)
		}
		metrics.pending.Add(-int64(len(b.entries)))
		b = nextPending(&e.queue, len(b.entries))
	}
}

// nextPending counts records as answered, and returns the batch that has the slot next, or nil.
func nextPending(q *queue, answered int) *batch {
	q.mu.Lock()
	q.pending -= answered
	q.mu.Unlock()

	return nextBatch(q)
}
