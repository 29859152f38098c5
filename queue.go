package tap

import (
	"bytes"
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

var newline = []byte("\n")

// queue is where records wait for a slot: while as many POSTs are under way as there are slots, what comes gathers, and goes in one POST when
// a slot is free. With a slot free nothing waits.
type queue struct {
	slots int

	mu    sync.Mutex
	posts int
	// waiting are the records that wait for a slot, the oldest first.
	waiting []*delivery
	// pending counts the records that were handed over and have not been answered.
	pending int
}

func slotsFor(settings endpointSettings) int {
	if settings.maxBatch == 1 {
		return pendingSlots
	}

	return batchSlots
}

// commit delivers a record together with those that come while it waits for a slot. The one that has waited longest sends for all of
// them.
//
// No caller needs a timer: a batch has the deadline of its first record, and the batches before it have earlier ones.
func commit(d *delivery) {
	d.started = time.Now()
	q := &d.source.endpoint.queue
	q.mu.Lock()
	if q.posts == q.slots {
		d.turn = make(chan bool, 1)
		q.waiting = append(q.waiting, d)
		q.mu.Unlock()

		leads := <-d.turn
		if leads {
			d.waited = true
			commitBatch(d, q)
		}

		return
	}
	q.posts++
	q.mu.Unlock()

	commitBatch(d, q)
}

// commitBatch sends a record with those that wait, and tells them of the answer.
func commitBatch(first *delivery, q *queue) {
	batch := takeBatch(first, q)
	err := postBatch(batch)
	if next := nextFirst(q); next != nil {
		next.turn <- true
	}
	account(first, batch[1:], err)
	for _, d := range batch[1:] {
		d.turn <- false
	}
}

// takeBatch returns a record with those that go in the same POST, of those that wait.
func takeBatch(first *delivery, q *queue) []*delivery {
	q.mu.Lock()
	defer q.mu.Unlock()

	room := first.source.endpoint.settings.maxBatch - 1
	if room > len(q.waiting) {
		room = len(q.waiting)
	}
	size, more := len(first.payload), 0
	for more < room {
		if size += len(q.waiting[more].payload) + 1; size > maxBatchBytes {
			break
		}
		more++
	}

	batch := append([]*delivery{first}, q.waiting[:more]...)
	q.waiting = q.waiting[more:]

	return batch
}

// nextFirst gives the slot of a POST that has ended to the record that has waited longest. It returns nil when none waits: then the slot is free.
func nextFirst(q *queue) *delivery {
	q.mu.Lock()
	defer q.mu.Unlock()

	if len(q.waiting) == 0 {
		// The array would keep what has waited in it.
		q.waiting = nil
		q.posts--

		return nil
	}
	next := q.waiting[0]
	q.waiting = q.waiting[1:]

	return next
}

// postBatch makes one POST of several records.
func postBatch(batch []*delivery) error {
	first := batch[0]
	p := &delivery{
		source:  first.source,
		id:      first.id,
		payload: first.payload,
		started: first.started,
		waited:  first.waited,
		header:  first.source.header.Clone(),
	}
	if first.source.batches {
		p.payload = joinBatch(batch)
	} else {
		p.header["X-Tap-Id"] = []string{first.id}
	}
	post(p)

	return p.err
}

// joinBatch returns the payload of a batch: one record a line.
func joinBatch(batch []*delivery) []byte {
	lines := make([][]byte, 0, len(batch))
	for _, d := range batch {
		lines = append(lines, d.payload)
	}

	return append(bytes.Join(lines, newline), '\n')
}

// handOver takes a record whose handler does not wait. It is dropped when as many are pending as may be.
func handOver(d *delivery) {
	d.started = time.Now()
	q := &d.source.endpoint.queue
	q.mu.Lock()
	if q.pending >= d.source.maxPending {
		q.mu.Unlock()
		accountDropped(d)

		return
	}
	q.pending++
	metrics.pending.Add(1)
	if q.posts == q.slots {
		q.waiting = append(q.waiting, d)
	} else {
		q.posts++
		go drain(d, q)
	}
	q.mu.Unlock()
}

// drain delivers pending records until there are none.
func drain(d *delivery, q *queue) {
	for d != nil {
		batch := takeBatch(d, q)
		account(d, batch[1:], postPending(batch))
		metrics.pending.Add(-int64(len(batch)))
		d = nextPending(q, len(batch))
	}
}

// postPending makes a POST whose timeout begins only now: the time in the queue is bounded by its length, and the timeout is for the endpoint.
func postPending(batch []*delivery) error {
	began := batch[0].started
	batch[0].started = time.Now()
	err := postBatch(batch)
	batch[0].started = began

	return err
}

// nextPending counts records as answered, and returns the one that has the slot next, or nil.
func nextPending(q *queue, answered int) *delivery {
	q.mu.Lock()
	q.pending -= answered
	q.mu.Unlock()

	return nextFirst(q)
}
