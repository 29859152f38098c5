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
	delivery delivery
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
	bytes   int
	started time.Time
}

func slotsFor(settings endpointSettings) int {
	if settings.maxBatch == 1 {
		return pendingSlots
	}

	return batchSlots
}

// commit delivers a record together with those that come while it waits for a slot, and returns the answer to the batch.
//
// No caller needs a timer: a batch has the deadline of its first record, and the batches before it have earlier ones.
func commit(e *endpoint, kind, id string, payload []byte) error {
	q := &e.queue
	q.mu.Lock()
	if q.posts < q.slots {
		q.posts++
		q.mu.Unlock()

		b := newBatch(e, kind, id, payload)
		err := post(e, &b.delivery)
		nextBatch(q)

		return err
	}

	b, leads := gather(e, kind, id, payload)
	q.mu.Unlock()

	if !leads {
		<-b.done

		return b.err
	}
	<-b.turn
	b.err = post(e, &b.delivery)
	nextBatch(q)
	close(b.done)

	return b.err
}

// newBatch makes a batch of one record.
func newBatch(e *endpoint, kind, id string, payload []byte) *batch {
	b := &batch{records: 1}
	b.delivery = delivery{payload: payload, kind: kind, id: id}
	if e.settings.maxBatch > 1 {
		b.delivery.batch = true
		b.delivery.payload = append(payload, '\n')
	}
	if e.settings.timeout > 0 {
		b.delivery.deadline = time.Now().Add(e.settings.timeout)
	}

	return b
}

// gather puts a record into the last batch, or into a new one behind it. It returns the batch and whether it is new. The queue's mutex is held.
func gather(e *endpoint, kind, id string, payload []byte) (*batch, bool) {
	q := &e.queue
	if last := len(q.batches) - 1; last >= 0 {
		b := q.batches[last]
		if b.records < e.settings.maxBatch && len(b.delivery.payload)+len(payload) < maxBatchBytes {
			b.records++
			b.delivery.payload = append(append(b.delivery.payload, payload...), '\n')

			return b, false
		}
	}

	b := newBatch(e, kind, id, payload)
	if e.settings.maxPending == 0 {
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
func handOver(s *source, id string, payload []byte) error {
	e := s.endpoint
	q := &e.queue
	record := entry{source: s, bytes: len(payload), started: time.Now()}

	q.mu.Lock()
	defer q.mu.Unlock()

	if q.pending >= e.settings.maxPending {
		account(s, errDropped, len(payload), record.started, false)

		return errDropped
	}
	q.pending++
	metrics.pending.Add(1)
	if q.posts < q.slots {
		q.posts++
		b := newBatch(e, s.kind, id, payload)
		b.entries = append(b.entries, record)
		go drain(e, b)

		return nil
	}
	b, _ := gather(e, s.kind, id, payload)
	b.entries = append(b.entries, record)

	return nil
}

// drain delivers pending batches until there are none.
func drain(e *endpoint, b *batch) {
	for b != nil {
		// The time in the queue is bounded by its length, not by the timeout, which is for the endpoint.
		if e.settings.timeout > 0 {
			b.delivery.deadline = time.Now().Add(e.settings.timeout)
		}
		err := post(e, &b.delivery)
		for _, record := range b.entries {
			account(record.source, err, record.bytes, record.started, false)
		}

		q := &e.queue
		q.mu.Lock()
		q.pending -= len(b.entries)
		q.mu.Unlock()
		metrics.pending.Add(-int64(len(b.entries)))
		b = nextBatch(q)
	}
}
