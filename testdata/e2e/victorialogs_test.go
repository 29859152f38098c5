package e2e_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

const victoriaLogsVersion = "v1.52.2"

// victoriaLogsFlags are those that the README of the example starts it with.
var victoriaLogsFlags = []string{"-retentionPeriod=1y", "-insert.maxLineSizeBytes=2MB"}

// victoriaLogsAddress stands in the example for that of the store.
const victoriaLogsAddress = "http://127.0.0.1:9428"

// victoriaLogs is a VictoriaLogs that runs.
type victoriaLogs struct {
	*process
	address string
	flags   []string
}

// startVictoriaLogs starts one on a free port, with flags beside those of the README.
func startVictoriaLogs(t *testing.T, flags ...string) *victoriaLogs {
	t.Helper()
	store := &victoriaLogs{address: freeAddress(t)}
	store.flags = append(append(store.flags, "-httpListenAddr="+store.address, "-storageDataPath="+t.TempDir()), append(flags, victoriaLogsFlags...)...)
	store.start(t)

	return store
}

// start starts it on the port and the storage that it had before.
func (v *victoriaLogs) start(t *testing.T) {
	t.Helper()
	binary := install(t, "github.com/VictoriaMetrics/VictoriaLogs/app/victoria-logs", victoriaLogsVersion)
	v.process = start(t, v.url()+"/health", binary, v.flags...)
}

func (v *victoriaLogs) url() string {
	return "http://" + v.address
}

// settings are those of a middleware of the example, for this store.
func (v *victoriaLogs) settings(t *testing.T, middleware string) map[string]any {
	t.Helper()

	return settingsOf(t, "victorialogs", middleware, victoriaLogsAddress, v.url())
}

// query returns the rows that a LogsQL query gives, in JSON, of all that was accepted until now.
func (v *victoriaLogs) query(t *testing.T, logsQL string) [][]byte {
	t.Helper()
	// A record can be found about a second after it was accepted. This endpoint is for tests, which do not wait for that.
	require.NoError(t, get(v.url()+"/internal/force_flush"))

	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	resp, err := client.PostForm(v.url()+"/select/logsql/query", url.Values{"query": {logsQL}})
	require.NoError(t, err)
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, "%s: %s", logsQL, answer)

	var rows [][]byte
	for line := range bytes.Lines(answer) {
		rows = append(rows, bytes.TrimSpace(line))
	}

	return rows
}

// records returns all records that it has.
func (v *victoriaLogs) records(t *testing.T) []tap.Record {
	t.Helper()
	var records []tap.Record
	for _, row := range v.query(t, "*") {
		var fields map[string]string
		require.NoError(t, json.Unmarshal(row, &fields))
		records = append(records, recordOf(t, fields))
	}

	return records
}

// recordOf makes a record, without its headers, of the fields that VictoriaLogs has made of it: all are texts, and what is nested has a dot in
// its name.
func recordOf(t *testing.T, fields map[string]string) tap.Record {
	t.Helper()
	at, err := time.Parse(time.RFC3339Nano, fields["_time"])
	require.NoError(t, err)
	record := tap.Record{ID: fields["id"], Kind: fields["kind"], Time: at}
	if method, ok := fields["request.method"]; ok {
		record.Request = &tap.Request{
			Method: method,
			URL:    fields["_msg"],
			Body:   bodyOf(t, fields["request.body"]),
		}
	}
	if status, ok := fields["response.status"]; ok {
		record.Response = &tap.Response{Body: bodyOf(t, fields["response.body"])}
		record.Response.Status, err = strconv.Atoi(status)
		require.NoError(t, err)
	}

	return record
}

func bodyOf(t *testing.T, text string) []byte {
	t.Helper()
	body, err := base64.StdEncoding.DecodeString(text)
	require.NoError(t, err)

	return body
}

func TestVictoriaLogs_HasEveryExchangeOnce(t *testing.T) {
	modes := []struct {
		name, middleware string
		kinds            []string
	}{
		{"one record a POST", "audit", []string{"request", "response"}},
		{"batches", "audit-batched", []string{"exchange"}},
		{"nothing is served unrecorded", "audit-strict", []string{"exchange"}},
	}
	for _, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			store := startVictoriaLogs(t)
			made := makeExchanges(t, store.settings(t, mode.middleware), 2000)

			assert.Empty(t, faults(made, mode.kinds, store.records(t)))
		})
	}
}

// What VictoriaLogs has after a stop and a start is what clients were served, and perhaps a few records whose answer was lost with the
// connection: their clients were refused.
func TestVictoriaLogs_HasWhatWasServedWhenItStopsInMidRun(t *testing.T) {
	for mode, batch := range map[string]int{"one record a POST": 1, "batches": 100} {
		t.Run(mode, func(t *testing.T) {
			store := startVictoriaLogs(t)
			config := store.settings(t, "audit-strict")
			config["exchange"].(map[string]any)["maxBatchSize"] = batch
			server := serve(t, newTap(t, config, respond))

			run := newRun(t, server)
			run.awaitServed(500)
			store.stop(t)
			run.awaitRefused(200)
			store.start(t)
			run.awaitServed(500)
			served, refused := run.end()
			server.Close()

			all := store.records(t)
			records := distinct(t, all)
			ofServed, others := part(records, served)
			assert.Empty(t, faults(served, []string{"exchange"}, ofServed))
			ofRefused, _ := part(others, refused)
			assert.Equal(t, others, ofRefused, "a record of nothing that was made")
			// A client waits for its answer before it sends again.
			assert.LessOrEqual(t, len(ofRefused), clients, "more than what was under way when the store stopped")

			t.Logf("%d served and recorded; %d refused, of which %d are recorded; %d records came twice", len(served), len(refused), len(ofRefused), len(all)-len(records))
		})
	}
}

// part returns the records of some exchanges, and the other records.
func part(records []tap.Record, some []exchange) (theirs, others []tap.Record) {
	urls := map[string]bool{}
	for _, x := range some {
		urls[x.url] = true
	}
	for _, record := range records {
		if urls[urlOf([]tap.Record{record})] {
			theirs = append(theirs, record)
		} else {
			others = append(others, record)
		}
	}

	return theirs, others
}

// run is clients that make exchanges until it ends.
type run struct {
	t               *testing.T
	answers         chan answer
	ended           atomic.Bool
	served, refused []exchange
}

type answer struct {
	exchange exchange
	served   bool
}

func newRun(t *testing.T, server *httptest.Server) *run {
	t.Helper()
	// Clients go on while nobody looks, as while a store stops. When the channel is full they wait.
	r := &run{t: t, answers: make(chan answer, 20_000)}
	go func() {
		defer close(r.answers)
		crowd(func(n int) bool {
			x := exchangeNumber(n)
			select {
			case r.answers <- answer{x, x.send(t, server)}:
			case <-t.Context().Done(): // The test has failed.
				return false
			}

			return !r.ended.Load()
		})
	}()

	return r
}

// awaitServed waits until n more exchanges were served.
func (r *run) awaitServed(n int) {
	r.t.Helper()
	for enough := len(r.served) + n; len(r.served) < enough; {
		r.await()
	}
}

// awaitRefused waits until n more exchanges were refused.
func (r *run) awaitRefused(n int) {
	r.t.Helper()
	for enough := len(r.refused) + n; len(r.refused) < enough; {
		r.await()
	}
}

func (r *run) await() {
	r.t.Helper()
	select {
	case got := <-r.answers:
		r.take(got)
	case <-time.After(patience):
		require.FailNow(r.t, "no client got an answer")
	}
}

func (r *run) take(got answer) {
	if got.served {
		r.served = append(r.served, got.exchange)
	} else {
		r.refused = append(r.refused, got.exchange)
	}
}

// end lets the clients end, and returns the exchanges that they have made.
func (r *run) end() (served, refused []exchange) {
	r.ended.Store(true)
	for got := range r.answers {
		r.take(got)
	}

	return r.served, r.refused
}

// A store that does something to a record and answers 200 is found out, and nothing else is.
func TestFaults_TellsWhatAStoreDidToARecord(t *testing.T) {
	victim := exchangeNumber(16)
	of := func(kind string) func(line []byte) bool {
		return func(line []byte) bool {
			return bytes.Contains(line, []byte(`"kind":"`+kind+`"`)) && bytes.Contains(line, []byte(`"url":"`+victim.url+`"`))
		}
	}
	status := fmt.Sprintf(`"status":%d`, victim.status)
	request := base64.StdEncoding.EncodeToString(victim.requestBody)
	response := base64.StdEncoding.EncodeToString(victim.responseBody)

	lose := func([]byte) [][]byte { return nil }
	repeat := func(line []byte) [][]byte { return [][]byte{line, line} }
	write := func(from, to string) func([]byte) [][]byte {
		return func(line []byte) [][]byte { return [][]byte{bytes.ReplaceAll(line, []byte(from), []byte(to))} }
	}

	for _, test := range []struct {
		name, middleware, kind string
		change                 func(line []byte) [][]byte
		want                   string
	}{
		{"loses a request", "audit", "request", lose, ": 0 request records"},
		{"loses a response", "audit", "response", lose, ": 0 response records"},
		{"loses an exchange", "audit-strict", "exchange", lose, ": not recorded"},
		{"loses a record of a batch", "audit-batched", "exchange", lose, ": not recorded"},
		{"keeps a record twice", "audit-batched", "exchange", repeat, ": 2 exchange records"},
		{"writes another status", "audit-batched", "exchange", write(status, `"status":299`), fmt.Sprintf(": the exchange record tells status 299, not %d", victim.status)},
		{"writes another request body", "audit", "request", write(request, "AAAA"), ": the request record has another request body"},
		{"writes another response body", "audit-batched", "exchange", write(response, "AAAA"), ": the exchange record has another response body"},
	} {
		t.Run(test.name, func(t *testing.T) {
			store := startVictoriaLogs(t)
			falsifier := serve(t, newFalsifier(t, store.url(), of(test.kind), test.change))
			config := settingsOf(t, "victorialogs", test.middleware, victoriaLogsAddress, falsifier.URL)
			made := makeExchanges(t, config, 100)

			kinds := []string{"exchange"}
			if test.middleware == "audit" {
				kinds = []string{"request", "response"}
			}
			assert.Equal(t, []string{victim.url + test.want}, faults(made, kinds, store.records(t)))
		})
	}
}

// newFalsifier stands in front of a store, and does something to the lines that it looks for. A POST without lines is answered 200.
func newFalsifier(t *testing.T, store string, looksFor func(line []byte) bool, change func(line []byte) [][]byte) http.Handler {
	t.Helper()
	proxy, err := host.Proxy(store)
	require.NoError(t, err)
	t.Cleanup(proxy.CloseIdleConnections)

	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		var lines [][]byte
		scanner := bufio.NewScanner(req.Body)
		for scanner.Scan() {
			line := bytes.Clone(scanner.Bytes())
			if looksFor(line) {
				lines = append(lines, change(line)...)
			} else {
				lines = append(lines, line)
			}
		}
		assert.NoError(t, scanner.Err())
		if len(lines) == 0 {
			return
		}

		text := bytes.Join(lines, []byte("\n"))
		req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
		proxy.ServeHTTP(rw, req)
	})
}

// VictoriaLogs accepts what is too much for it, and drops it. So nothing may be too much that a client can send.
func TestVictoriaLogs_KeepsWhateverAClientSends(t *testing.T) {
	// About as many headers as fit into the 64 KiB that static.yml allows, with characters that take six bytes each in JSON.
	many := http.Header{}
	for i := range 1200 {
		many.Set(fmt.Sprintf("X-Header-%d", i), strings.Repeat("<", 35))
	}
	long := http.Header{"X-" + strings.Repeat("Long", 50): {"1"}}

	for _, test := range []struct {
		name, middleware string
		header           http.Header
		want             []string
	}{
		{"many headers", "audit-strict", many, []string{"exchange"}},
		{"the long name of a header", "audit-strict", long, []string{"exchange"}},
		{"the long name of a header, flattened", "audit", long, []string{"request", "response"}},
		// What the README warns of.
		{"many headers, flattened", "audit", many, []string{"response"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			store := startVictoriaLogs(t)
			server := serve(t, newTap(t, store.settings(t, test.middleware), func(rw http.ResponseWriter, req *http.Request) {
				// Read to its end first: a server of net/http does not read on once it has answered.
				body, _ := io.ReadAll(req.Body)
				_, _ = rw.Write(body)
			}))
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/payments", bytes.NewReader(make([]byte, 1<<20)))
			require.NoError(t, err)
			req.Header = test.header
			resp, err := server.Client().Do(req)
			require.NoError(t, err)
			defer resp.Body.Close()
			_, err = io.Copy(io.Discard, resp.Body)
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, resp.StatusCode)
			server.Close()

			var kinds []string
			for _, record := range store.records(t) {
				kinds = append(kinds, record.Kind)
			}
			assert.ElementsMatch(t, test.want, kinds)
		})
	}
}

func TestVictoriaLogs_ClusterHasEveryExchangeOnce(t *testing.T) {
	storages, front := startCluster(t)
	made := makeExchanges(t, front.settings(t, "audit"), 500)

	// What vlinsert has accepted may be on its way to a node when the node is asked to show all that it has.
	front.await(t, func() error {
		if got, want := len(front.records(t)), 2*len(made); got < want {
			return fmt.Errorf("%d records of %d", got, want)
		}

		return nil
	})
	assert.Empty(t, faults(made, []string{"request", "response"}, front.records(t)))
	for _, storage := range storages {
		assert.NotEmpty(t, storage.records(t), "a node of the cluster has nothing")
	}
}

func TestVictoriaLogs_ClusterServesAndHasAllWhenANodeStops(t *testing.T) {
	storages, front := startCluster(t)
	config := front.settings(t, "audit-strict")
	config["exchange"].(map[string]any)["service"] = []string{storages[0].url(), storages[1].url()}
	server := serve(t, newTap(t, config, respond))

	run := newRun(t, server)
	run.awaitServed(300)
	storages[0].stop(t)
	run.awaitServed(300)
	served, refused := run.end()
	server.Close()
	assert.Empty(t, refused)

	storages[0].start(t) // vlselect answers when all nodes are there.
	assert.Empty(t, faults(served, []string{"exchange"}, distinct(t, front.records(t))))
}

// startCluster starts two storage nodes, and one process that is both vlinsert and vlselect.
func startCluster(t *testing.T) (storages []*victoriaLogs, front *victoriaLogs) {
	t.Helper()
	storages = []*victoriaLogs{startVictoriaLogs(t), startVictoriaLogs(t)}

	return storages, startVictoriaLogs(t, "-storageNode="+storages[0].address+","+storages[1].address)
}
