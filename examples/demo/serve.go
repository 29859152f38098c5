package main

import (
	"context"
	"strings"
	"sync"
)

// serve keeps a chain up until ctx is done, and prints records and what Traefik would log as they come.
func (d *demo) serve(ctx context.Context) error {
	c, err := newChain(ctx, d.plugin, false)
	if err != nil {
		return err
	}

	var printing sync.Mutex
	show := func(text string) {
		printing.Lock()
		defer printing.Unlock()
		d.page.print(text)
	}
	d.log.follow(func(line string) { show("\n" + bad.Render("Traefik's log") + "  " + line) })
	c.endpoint.before(func(_ context.Context, got record) { show("\n" + got.String()) })
	// Last: whoever reads the URL may use it at once.
	show(strings.ReplaceAll(instructions, "URL", c.URL))

	<-ctx.Done()
	c.Close()

	return nil
}

const instructions = `URL is tapped; records are printed here as they come. Open it in a browser, or:

  curl URL/products/42
  curl -H 'Authorization: Bearer secret' -d '{"item":"teapot"}' URL/orders
  curl -d '{"order":7}' URL/payments
  curl URL/reports/[1-20] --parallel
  curl -N URL/events
  curl -T /etc/services URL/files/services

Ctrl-C ends it.`
