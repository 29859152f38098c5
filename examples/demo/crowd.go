package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
)

// crowdSize is how many clients ask at the same time.
const crowdSize = 20

// showCrowd lets many clients ask at once, through a tap whose first endpoint is down, and returns how many promises were broken. The
// second endpoint answers nothing until all clients have their response, so that the records gather.
func (d *demo) showCrowd(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, d.patience)
	defer cancel()
	c, err := newChain(ctx, d.plugin, false)
	if err != nil {
		return 0, err
	}
	defer c.Close()

	answered := make(chan struct{})
	c.endpoint.before(func(ctx context.Context, _ record) {
		select {
		case <-answered:
		case <-ctx.Done():
		}
	})
	d.log.take()
	crowd := newCrowd()
	bodies, failed := c.askTogether(ctx, crowd)
	close(answered)
	c.Server.Close() // Returns when all requests are served, and so all records are delivered.
	for _, client := range crowd {
		client.CloseIdleConnections()
	}

	records := c.endpoint.take()
	posts := c.endpoint.posts
	promises := []promise{comeTogether(records, posts, bodies, failed), comeToTheSecond(d.log.take())}
	d.page.crowd(len(exchanges())+1, records, posts, promises)

	return countBroken(promises), nil
}

// newCrowd returns clients with a connection each: on one that they shared, a request would wait for the records of the one before.
func newCrowd() []*http.Client {
	crowd := make([]*http.Client, crowdSize)
	for i := range crowd {
		crowd[i] = &http.Client{Transport: &http.Transport{}}
	}

	return crowd
}

// askTogether sends a request from each client of the crowd, and returns when all have their response: by path, its body.
func (c *chain) askTogether(ctx context.Context, crowd []*http.Client) (map[string]string, error) {
	var mu sync.Mutex
	var failed error
	bodies := map[string]string{}

	var clients sync.WaitGroup
	for i, client := range crowd {
		clients.Go(func() {
			path := fmt.Sprintf("/reports/%d", i+1)
			body, err := fetch(ctx, client, c.URL+path)
			mu.Lock()
			defer mu.Unlock()
			bodies[path] = body
			if err != nil {
				failed = err
			}
		})
	}
	clients.Wait()

	return bodies, failed
}

func fetch(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	response, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)

	return string(body), err
}

// comeTogether: each record once, several in a POST.
func comeTogether(records []record, posts int, bodies map[string]string, failed error) promise {
	p := promise{text: fmt.Sprintf("All %d clients had their response before the endpoint answered, and each record came once, in %d POSTs", crowdSize, posts)}
	p.must(failed == nil, "a client got no response: %v", failed)
	p.must(posts < crowdSize, "there were %d POSTs", posts)
	p.must(len(records) == crowdSize, "%d records came", len(records))
	seen := map[string]bool{}
	for _, r := range records {
		p.must(!seen[r.Request.URL], "the record of %s came twice", r.Request.URL)
		seen[r.Request.URL] = true
		p.must(string(r.Response.Body) == bodies[r.Request.URL], "the record of %s has the response %s", r.Request.URL, r.Response.Body)
		p.must(r.header.Get("Content-Type") == "application/x-ndjson" && r.header.Get("X-Tap-Record") == "batch", "the header of the POST was %q", r.header)
	}

	return p
}

// comeToTheSecond: an endpoint that is down loses nothing while another one is up.
func comeToTheSecond(log []string) promise {
	p := promise{text: "The first endpoint of the list is down: the second got all of it, and there was nothing to log"}
	p.must(len(log) == 0, "the log was %q", log)

	return p
}

// crowd shows what a crowd did, and one of its records.
func (p page) crowd(number int, records []record, posts int, promises []promise) {
	p.heading(fmt.Sprintf("%d  %d clients at once, and a list of endpoints whose first is down", number, crowdSize), "audit-batched")
	left := strings.Join([]string{strong.Render("GET /reports/1"), "to", strong.Render(fmt.Sprintf("GET /reports/%d", crowdSize))}, "\n")
	right := fmt.Sprintf("%d records in %d POSTs to the second endpoint, such as", len(records), posts)
	if len(records) > 0 {
		right += "\n" + records[len(records)-1].String()
	}
	p.sides(left, right)
	p.promises(promises)
}
