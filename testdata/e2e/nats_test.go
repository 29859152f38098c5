package e2e_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

func TestNATS_HasEachExchangeOnce(t *testing.T) {
	for name, middleware := range map[string]string{"single": "audit-strict", "batches": "audit"} {
		t.Run(name, func(t *testing.T) {
			// JetStream tells by this header what comes twice, and leaves it out. Here nothing may come twice.
			queue := startQueue(t, "Nats-Msg-Id", "Tap-Record")
			// Clients are refused if any POST of theirs is.
			config := queue.settings(t, middleware, "attempts: 3", "attempts: 1", "maxBatchSize: 100", "maxBatchSize: 100\n            rejectOnRecordError: true")

			made := makeExchanges(t, config, 1000)

			assert.Empty(t, faults(made, []string{"exchange"}, queue.records(t)))
		})
	}
}

func TestNATS_HasWhatIsServed_WhenItStopsInMidRun(t *testing.T) {
	queue := startQueue(t)
	// Sooner, so that those who meet a queue that is down do not wait long.
	tapped := serve(t, newTap(t, queue.settings(t, "audit-strict", "timeout: 5s", "timeout: 500ms"), respond))
	var served, refused exchanges
	send := func(n int) bool {
		x := exchangeNumber(n)
		accepted := x.send(t, tapped)
		if accepted {
			served.add(x)
		} else {
			refused.add(x)
		}

		return accepted
	}

	crowd(func(n int) bool {
		switch n {
		case 200:
			queue.server.stop(t)
		case 400:
			queue.startServer(t)
		}
		send(n)

		return n < 600
	})
	// The pipeline finds the queue again in its own time.
	deadline := time.Now().Add(patience)
	for n := 1000; !send(n); n++ {
		require.True(t, time.Now().Before(deadline), "nothing is served any more")
	}
	tapped.Close()

	assert.NotEmpty(t, refused.made)
	assert.NotEmpty(t, served.made)
	assert.Empty(t, faults(served.made, []string{"exchange"}, without(refused.made, queue.records(t))))
}

// without leaves out the records of exchanges that were refused. The queue may have some: of those whose answer came too late.
func without(refused []exchange, records []tap.Record) []tap.Record {
	urls := map[string]bool{}
	for _, x := range refused {
		urls[x.url] = true
	}

	return slices.DeleteFunc(records, func(record tap.Record) bool { return urls[record.Request.URL] })
}

func TestNATS_NothingIsServed_WithoutPipeline(t *testing.T) {
	queue := startQueue(t)
	tapped := serve(t, newTap(t, queue.settings(t, "audit-strict"), respond))
	require.True(t, exchangeNumber(0).send(t, tapped))
	queue.pipeline.stop(t)

	for n := 1; n < 20; n++ {
		assert.False(t, exchangeNumber(n).send(t, tapped), "exchange %d was served", n)
	}

	tapped.Close()
	assert.Empty(t, faults([]exchange{exchangeNumber(0)}, []string{"exchange"}, queue.records(t)))
}

func TestNATS_HasRecordOnce_WhenItIsSentAgain(t *testing.T) {
	queue := startQueue(t)
	target, err := url.Parse(queue.url)
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	transport := &http.Transport{}
	proxy.Transport = transport
	t.Cleanup(transport.CloseIdleConnections)
	var posts atomic.Int64
	losesFirstAnswer := serve(t, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		if posts.Add(1) > 1 {
			proxy.ServeHTTP(rw, req)

			return
		}
		answer := httptest.NewRecorder()
		proxy.ServeHTTP(answer, req)
		assert.Equal(t, http.StatusOK, answer.Code)
		panic(http.ErrAbortHandler)
	}))
	queue.url = losesFirstAnswer.URL

	made := makeExchanges(t, queue.settings(t, "audit-strict"), 1)

	assert.EqualValues(t, 2, posts.Load())
	assert.Empty(t, faults(made, []string{"exchange"}, queue.records(t)))
}

// queue is a NATS server with a stream, and a pipeline in front of it that takes records over HTTP. All are configured by examples/nats.
type queue struct {
	// url is where the pipeline takes records.
	url      string
	server   *process
	pipeline *process

	binaries, directory string
	// replacer is for the files of the example.
	replacer *strings.Replacer
	health   string
	conn     *nats.Conn
	stream   jetstream.Stream
}

// startQueue starts both. It may replace more in the files of the example than the addresses: pairs of old and new.
func startQueue(t *testing.T, replace ...string) *queue {
	t.Helper()
	q := &queue{binaries: buildQueue(t), directory: t.TempDir()}
	server, monitor, pipeline := freeAddress(t), freeAddress(t), freeAddress(t)
	q.url, q.health = "http://"+pipeline, "http://"+monitor+"/healthz"
	q.replacer = strings.NewReplacer(append(replace, "127.0.0.1:4222", server, "127.0.0.1:8222", monitor, "127.0.0.1:4195", pipeline,
		"store_dir: jetstream", "store_dir: "+filepath.Join(q.directory, "jetstream"))...)

	q.startServer(t)
	var err error
	q.conn, err = nats.Connect("nats://"+server, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond))
	require.NoError(t, err)
	t.Cleanup(q.conn.Close)
	q.createStream(t)
	q.pipeline = start(t, q.url+"/ready", filepath.Join(q.binaries, "benthos"), "run", q.example(t, "pipeline.yml"))

	return q
}

// buildQueue returns the folder of the binaries. What is there and up to date is not built again.
func buildQueue(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	require.NoError(t, err)
	binaries := filepath.Join(cache, "tap-e2e", "nats")
	require.NoError(t, os.MkdirAll(binaries, 0o755))
	output, err := exec.CommandContext(t.Context(), "go", "build", "-o", binaries, "./benthos", "github.com/nats-io/nats-server/v2").CombinedOutput()
	require.NoError(t, err, "%s", output)

	return binaries
}

func (q *queue) startServer(t *testing.T) {
	t.Helper()
	q.server = start(t, q.health, filepath.Join(q.binaries, "nats-server"), "--config", q.example(t, "nats.conf"))
}

// createStream makes the stream of the example as the command of NATS does, from the same file.
func (q *queue) createStream(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile(q.example(t, "stream.json"))
	require.NoError(t, err)
	var config jetstream.StreamConfig
	require.NoError(t, json.Unmarshal(text, &config))
	js, err := jetstream.New(q.conn)
	require.NoError(t, err)
	q.stream, err = js.CreateStream(t.Context(), config)
	require.NoError(t, err)
}

// example returns the path of a copy of a file of the example, with what is replaced for this queue.
func (q *queue) example(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(host.Root(), "examples", "nats", name))
	require.NoError(t, err)
	copied := filepath.Join(q.directory, name)
	require.NoError(t, os.WriteFile(copied, []byte(q.replacer.Replace(string(text))), 0o600))

	return copied
}

func (q *queue) settings(t *testing.T, middleware string, replace ...string) map[string]any {
	t.Helper()

	return settingsOf(t, "nats", middleware, append(replace, "http://127.0.0.1:4195", q.url)...)
}

// records reads the whole stream.
func (q *queue) records(t *testing.T) []tap.Record {
	t.Helper()
	info, err := q.stream.Info(t.Context())
	require.NoError(t, err)
	consumer, err := q.stream.OrderedConsumer(t.Context(), jetstream.OrderedConsumerConfig{})
	require.NoError(t, err)
	messages, err := consumer.Fetch(int(info.State.Msgs), jetstream.FetchMaxWait(patience))
	require.NoError(t, err)

	var records []tap.Record
	for message := range messages.Messages() {
		var record tap.Record
		require.NoError(t, json.Unmarshal(message.Data(), &record))
		assert.Equal(t, "tap."+record.Kind, message.Subject())
		records = append(records, record)
	}
	require.NoError(t, messages.Error())
	require.Len(t, records, int(info.State.Msgs))

	return records
}

// exchanges gathers what many clients made.
type exchanges struct {
	mu   sync.Mutex
	made []exchange
}

func (e *exchanges) add(x exchange) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.made = append(e.made, x)
}
