package main

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// slowness is what a slow endpoint takes for a record.
const slowness = 100 * time.Millisecond

// cost is what a client waits for something without the tap, with it, and with an endpoint that is slow: medians. Each request is
// sent when the records of the one before are delivered: a connection takes no other request until then, and that would be measured too.
type cost struct {
	what                string
	without, with, slow time.Duration
	note                string
}

// showCosts measures what each exchange costs, and returns how many promises were broken.
func (d *demo) showCosts(ctx context.Context) (int, error) {
	without, err := newChain(ctx, nil, true)
	if err != nil {
		return 0, err
	}
	defer without.Close()
	with, err := newChain(ctx, d.plugin, true)
	if err != nil {
		return 0, err
	}
	defer with.Close()

	waits := promise{text: "While an endpoint answers nothing, clients have the whole response and each event of the stream"}
	order := promise{text: "audit-strict calls the application when the endpoint has accepted the record, and not before"}
	var costs []cost
	for _, x := range exchanges() {
		if !x.endpointDown {
			if err := d.keepWaiting(ctx, with, x, &waits); err != nil {
				return 0, err
			}
		}
		measured, err := d.measure(ctx, without, with, x, &order)
		if err != nil {
			return 0, err
		}
		costs = append(costs, measured...)
	}
	d.page.costs(costs, fmt.Sprintf("medians of %d, %d where the endpoint is slow", d.rounds, d.slowRounds))
	promises := []promise{waits, order}
	d.page.promises(promises)

	return countBroken(promises), nil
}

// keepWaiting keeps the endpoint from answering until the client has all that it waits for.
func (d *demo) keepWaiting(ctx context.Context, c *chain, x exchange, p *promise) error {
	answers := make(chan struct{})
	release := sync.OnceFunc(func() { close(answers) })
	c.endpoint.before(func(ctx context.Context, _ record) {
		select {
		case <-answers:
		case <-ctx.Done():
		}
	})
	defer c.endpoint.before(nil)

	waited := true
	c.complete = func() {
		waited = c.endpoint.hasAnswered()
		release()
	}
	defer func() { c.complete = func() {} }()

	happen := x.happen
	x.happen = func(ctx context.Context, c *chain, o *outcome) error {
		defer release()

		return happen(ctx, c, o)
	}
	o, err := c.observe(ctx, x, d.patience)
	if err != nil {
		return err
	}
	p.must(o.err == nil, "%s: %v", x.short, o.err)
	p.must(!waited, "%s: the client had to wait for the endpoint", x.short)

	return nil
}

// measure returns what an exchange costs. While the endpoint is slow it sees to it that audit-strict calls nothing early.
func (d *demo) measure(ctx context.Context, without, with *chain, x exchange, p *promise) ([]cost, error) {
	var complete, took [3]time.Duration
	var err error
	if complete[0], took[0], err = d.medians(ctx, without, x, d.rounds); err != nil {
		return nil, err
	}
	if complete[1], took[1], err = d.medians(ctx, with, x, d.rounds); err != nil {
		return nil, err
	}

	var early atomic.Bool
	with.endpoint.before(func(ctx context.Context, _ record) {
		sleep(ctx, slowness)
		if x.endpointDown && with.backend.done().calls > 0 {
			early.Store(true)
		}
	})
	defer with.endpoint.before(nil)
	if complete[2], took[2], err = d.medians(ctx, with, x, d.slowRounds); err != nil {
		return nil, err
	}
	p.must(!early.Load(), "the application was called while the endpoint had not answered")

	return costsOf(x, complete, took), nil
}

// costsOf takes two lines for a stream: it is not over when its last event has come.
func costsOf(x exchange, complete, took [3]time.Duration) []cost {
	costs := []cost{{what: x.short, without: complete[0], with: complete[1], slow: complete[2], note: x.note}}
	if x.endNote != "" {
		costs = append(costs, cost{what: "… and the end", without: took[0], with: took[1], slow: took[2], note: x.endNote})
	}

	return costs
}

// medians lets an exchange happen many times, and returns how long the client waited for what it wanted, and for the end.
func (d *demo) medians(ctx context.Context, c *chain, x exchange, rounds int) (complete, took time.Duration, err error) {
	var completes, tooks []time.Duration
	for round := range rounds + 1 {
		o, err := c.observe(ctx, x, d.patience)
		if err == nil {
			err = o.err
		}
		if err == nil && o.response.StatusCode >= http.StatusBadRequest {
			err = fmt.Errorf("the client got %s", o.response.Status)
		}
		if err != nil {
			return 0, 0, fmt.Errorf("%s: %w", x.title, err)
		}
		if round > 0 {
			completes, tooks = append(completes, o.complete), append(tooks, o.took)
		}
	}
	slices.Sort(completes)
	slices.Sort(tooks)

	return completes[rounds/2], tooks[rounds/2], nil
}

func sleep(ctx context.Context, duration time.Duration) {
	select {
	case <-time.After(duration):
	case <-ctx.Done():
	}
}
