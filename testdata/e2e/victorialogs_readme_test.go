package e2e_test

import (
	"bytes"
	"flag"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

var update = flag.Bool("update", false, "write the output of the queries into the README anew")

// block is a query of the README and, right behind it, what it gives.
var block = regexp.MustCompile("(?s)```logsql\n(.*?)```\n\n```json\n(.*?)```")

// The queries of the README run as they stand there, and give the rows that stand there: the same but for ids, times, ports and durations.
func TestVictoriaLogs_AnswersAsItsREADMESays(t *testing.T) {
	name := filepath.Join(host.Root(), "examples", "victorialogs", "README.md")
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	readme := string(text)
	assert.Contains(t, readme, "victoria-logs -storageDataPath=victoria-logs-data "+strings.Join(victoriaLogsFlags, " "))
	assert.Contains(t, readme, "app/victoria-logs@"+victoriaLogsVersion)
	assert.Contains(t, readme, "victoria-logs:"+victoriaLogsVersion)
	require.Len(t, block.FindAllString(readme, -1), 5)

	store := startVictoriaLogs(t)
	shop := newShop(t, store.settings(t, "audit"))
	shop.visit()

	// The one exchange that the README shows all of.
	readme = anyID.ReplaceAllString(readme, shop.idOf(store, "/payments/12"))
	answered := block.ReplaceAllStringFunc(readme, func(text string) string {
		parts := block.FindStringSubmatch(text)
		answer := string(bytes.Join(store.query(t, parts[1]), []byte("\n"))) + "\n"
		t.Logf("\n%s\n%s", parts[1], answer)
		if !*update {
			assert.Equal(t, normal(parts[2]), normal(answer), "%s", parts[1])
		}

		return strings.TrimSuffix(text, parts[2]+"```") + answer + "```"
	})
	if *update {
		require.NoError(t, os.WriteFile(name, []byte(answered), 0o644))
	}
}

var anyID = regexp.MustCompile(`\b[0-9a-f]{32}\b`)

// changing is what differs from run to run.
var changing = []struct {
	pattern     *regexp.Regexp
	replacement string
}{
	{anyID, "ID"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT[0-9:.]+Z`), "TIME"},
	{regexp.MustCompile(`[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} [0-9:]+ GMT`), "DATE"},
	{regexp.MustCompile(`127\.0\.0\.1:\d+`), "CLIENT"},
	{regexp.MustCompile(`("response\.duration"|"milliseconds"):"[0-9.]+"`), `$1:"DURATION"`},
}

func normal(rows string) string {
	for _, c := range changing {
		rows = c.pattern.ReplaceAllString(rows, c.replacement)
	}

	return rows
}

// shop is an application, the clients that visit it, and a tap in between.
type shop struct {
	t      *testing.T
	url    string
	client *http.Client
	// reached and release have a channel for each slow report.
	reached, release map[string]chan struct{}
	// recorded gets a value for each exchange whose records are delivered.
	recorded chan struct{}
	// ended is closed when all are to end.
	ended   chan struct{}
	sending sync.WaitGroup
}

// slow are reports that the application makes until it is told to end one.
var slow = []string{"/reports/all", "/reports/2026", "/reports/november", "/reports/today"}

func newShop(t *testing.T, config map[string]any) *shop {
	t.Helper()
	s := &shop{t: t, reached: map[string]chan struct{}{}, release: map[string]chan struct{}{}, recorded: make(chan struct{}, 100), ended: make(chan struct{})}
	for _, url := range slow {
		s.reached[url], s.release[url] = make(chan struct{}), make(chan struct{})
	}
	handler := newTap(t, config, s.answer)
	server := serve(t, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		defer func() { s.recorded <- struct{}{} }()
		handler.ServeHTTP(rw, req)
	}))
	s.url, s.client = server.URL, server.Client()
	t.Cleanup(func() {
		close(s.ended)
		s.sending.Wait()
	})

	return s
}

// answer is the application.
func (s *shop) answer(rw http.ResponseWriter, req *http.Request) {
	if reached, ok := s.reached[req.RequestURI]; ok {
		close(reached)
		select {
		case <-s.release[req.RequestURI]:
		case <-s.ended:
		}
	}
	status, body := http.StatusOK, `{"state":"shipped"}`
	switch req.Method + " " + req.RequestURI {
	case "DELETE /orders/7":
		status, body = http.StatusForbidden, `{"error":"not yours"}`
	case "GET /orders/8":
		status, body = http.StatusNotFound, `{"error":"no such order"}`
	case "POST /payments/12":
		status, body = http.StatusCreated, `{"receipt":4711}`
	case "POST /payments/13":
		status, body = http.StatusBadGateway, `{"error":"no answer from the bank"}`
	}
	rw.Header().Set("Content-Type", "application/json")
	rw.Header().Set("Content-Length", strconv.Itoa(len(body)))
	rw.WriteHeader(status)
	_, _ = io.WriteString(rw, body)
}

// visit makes the exchanges that the README tells of. The reports start one after the other and end the other way round, so that it is sure
// which took longest; the first does not end before the test does.
func (s *shop) visit() {
	s.t.Helper()
	for _, url := range slow {
		s.sending.Go(func() { s.send(http.MethodGet, url, "reporter/1.0", "") })
		s.await(s.reached[url])
	}

	s.send(http.MethodGet, "/orders/7", "shop/2.1", "")
	s.send(http.MethodDelete, "/orders/7", "curl/8.5.0", "")
	s.send(http.MethodGet, "/orders/8", "shop/2.1", "")
	s.send(http.MethodPost, "/payments/12", "shop/2.1", `{"order":7,"amount":"19.90"}`)
	s.send(http.MethodPost, "/payments/13", "shop/2.1", `{"order":8,"amount":"5.00"}`)
	for range 5 {
		s.await(s.recorded)
	}

	for i := len(slow) - 1; i > 0; i-- {
		close(s.release[slow[i]])
		s.await(s.recorded)
	}
}

func (s *shop) send(method, url, userAgent, body string) {
	// Not with the context of the test, which ends before what is still under way does.
	req, err := http.NewRequest(method, s.url+url, strings.NewReader(body))
	if !assert.NoError(s.t, err) {
		return
	}
	req.Host = "shop.example"
	req.Header.Set("User-Agent", userAgent)
	resp, err := s.client.Do(req)
	if !assert.NoError(s.t, err) {
		return
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	assert.NoError(s.t, err)
}

func (s *shop) await(happened <-chan struct{}) {
	s.t.Helper()
	select {
	case <-happened:
	case <-time.After(patience):
		require.FailNow(s.t, "an exchange stands still")
	}
}

// idOf returns the id of the exchange with a URL.
func (s *shop) idOf(store *victoriaLogs, url string) string {
	s.t.Helper()
	for _, record := range store.records(s.t) {
		if urlOf([]tap.Record{record}) == url {
			return record.ID
		}
	}
	require.FailNow(s.t, "not recorded", url)

	return ""
}
