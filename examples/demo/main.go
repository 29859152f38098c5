// Command demo sends requests through the plugin, interpreted as in Traefik and configured by ../file-provider/dynamic.yml. It shows
// what the client sees next to the records that the endpoint gets, and what the tap costs. All of it runs in this process, on free
// ports of 127.0.0.1.
//
// It checks what it shows: the status is 1 when anything was not as promised. With -serve it waits for other clients instead.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/charmbracelet/colorprofile"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

func main() {
	keep := flag.Bool("serve", false, "keep it up for curl and a browser, and print records as they come, until interrupted")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second interrupt ends it at once.
	context.AfterFunc(ctx, stop)
	if err := start(ctx, *keep, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func start(ctx context.Context, keep bool, stdout *os.File) error {
	traefikLog := &logLines{}
	plugin, err := host.Interpret(host.Options{Stderr: traefikLog})
	if err != nil {
		return err
	}

	// The writer takes out what its reader does not want: all styles where it is no terminal, and colours where NO_COLOR is set.
	out := colorprofile.NewWriter(stdout, os.Environ())
	d := &demo{
		page:       page{out: out, width: widthOf(stdout)},
		plugin:     plugin,
		log:        traefikLog,
		rounds:     15,
		slowRounds: 5,
		patience:   30 * time.Second,
	}
	if keep {
		return d.serve(ctx)
	}

	return d.run(ctx)
}

// demo is what both ways to run it have in common.
type demo struct {
	page   page
	plugin host.Plugin
	// log is what the plugin writes to Traefik's log at ERROR.
	log *logLines
	// rounds are how many times an exchange is measured, after one that is not; slowRounds the same where the endpoint is slow, and takes
	// its time in each.
	rounds, slowRounds int
	// patience is how long it waits for what must come. It is never waited out when all is well.
	patience time.Duration
}

// run shows all exchanges and what they cost. It returns an error when a promise was broken.
func (d *demo) run(ctx context.Context) error {
	d.page.title()

	broken := 0
	for _, part := range []func(context.Context) (int, error){d.showExchanges, d.showCrowd, d.showCosts} {
		n, err := part(ctx)
		if err != nil {
			return err
		}
		broken += n
	}

	if broken > 0 {
		return fmt.Errorf("broken promises: %d", broken)
	}
	d.page.end()

	return nil
}

// showExchanges lets each exchange happen once, and returns how many promises were broken.
func (d *demo) showExchanges(ctx context.Context) (int, error) {
	c, err := newChain(ctx, d.plugin, true)
	if err != nil {
		return 0, err
	}
	defer c.Close()

	broken := 0
	for i, x := range exchanges() {
		if x.endpointDown {
			c.endpoint.Close()
		}
		d.log.take()
		o, err := c.observe(ctx, x, d.patience)
		if err != nil {
			return broken, err
		}
		o.log = d.log.take()

		promises := x.check(o)
		d.page.exchange(i+1, x, o, promises)
		broken += countBroken(promises)
	}

	return broken, nil
}
