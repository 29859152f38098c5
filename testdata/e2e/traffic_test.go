package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
)

// clients is how many send at a time.
const clients = 50

// exchange is what a client sends, and what the backend answers.
type exchange struct {
	method, url               string
	status                    int
	requestBody, responseBody []byte
}

// exchangeNumber returns one of any number of exchanges, always the same for the same number. The backend never answers 500, so that a 500 is
// a refusal of the tap.
func exchangeNumber(n int) exchange {
	random := rand.New(rand.NewPCG(7, uint64(n)))
	x := exchange{
		method:       http.MethodGet,
		url:          fmt.Sprintf("/orders/%d?page=%d", n, random.IntN(100)),
		status:       []int{http.StatusOK, http.StatusCreated, http.StatusNotFound, http.StatusServiceUnavailable}[random.IntN(4)],
		responseBody: bytesOf(random),
	}
	if n%2 == 0 {
		x.method, x.requestBody = http.MethodPost, bytesOf(random)
	}

	return x
}

// bytesOf returns any bytes, which are seldom text.
func bytesOf(random *rand.Rand) []byte {
	body := make([]byte, 1+random.IntN(2000))
	for i := range body {
		body[i] = byte(random.Uint32())
	}

	return body
}

// respond is the backend of all exchanges.
func respond(rw http.ResponseWriter, req *http.Request) {
	var n int
	_, err := fmt.Sscanf(req.URL.Path, "/orders/%d", &n)
	body, readErr := io.ReadAll(req.Body)
	x := exchangeNumber(n)
	if errors.Join(err, readErr) != nil || req.Method != x.method || req.RequestURI != x.url || !bytes.Equal(body, x.requestBody) {
		rw.WriteHeader(http.StatusTeapot)

		return
	}

	rw.Header().Set("Content-Length", strconv.Itoa(len(x.responseBody)))
	rw.WriteHeader(x.status)
	_, _ = rw.Write(x.responseBody)
}

// settingsOf returns what a middleware says in the dynamic.yml of an example, with other addresses: pairs of old and new.
func settingsOf(t *testing.T, example, middleware string, replace ...string) map[string]any {
	t.Helper()
	dynamic, err := host.ReadDynamic(filepath.Join(host.Root(), "examples", example, "dynamic.yml"), replace...)
	require.NoError(t, err)
	config, err := dynamic.PluginConfig(middleware)
	require.NoError(t, err)

	return config
}

// newTap returns the interpreted plugin, with a reverse proxy like Traefik's and the backend behind it.
func newTap(t *testing.T, config map[string]any, backend http.HandlerFunc) http.Handler {
	t.Helper()
	server := httptest.NewServer(backend)
	t.Cleanup(server.Close)
	proxy, err := host.Proxy(server.URL)
	require.NoError(t, err)
	t.Cleanup(proxy.CloseIdleConnections)

	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	handler, err := plugin.New(ctx, proxy, config, "audit@file")
	require.NoError(t, err)

	return handler
}

// serve puts a handler on 127.0.0.1. Close waits until it has handled all requests, and so until their records are delivered.
func serve(t *testing.T, handler http.Handler) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Start()
	t.Cleanup(server.Close)
	transport := server.Client().Transport.(*http.Transport)
	transport.MaxIdleConnsPerHost = clients
	transport.DisableCompression = true // So that no request has a header that it was not given.

	return server
}

// makeExchanges makes the first n exchanges through the interpreted plugin, and returns them when their records are delivered.
func makeExchanges(t *testing.T, config map[string]any, n int) []exchange {
	t.Helper()
	server := serve(t, newTap(t, config, respond))
	made := make([]exchange, n)
	crowd(func(i int) bool {
		if i >= n {
			return false
		}
		made[i] = exchangeNumber(i)
		assert.True(t, made[i].send(t, server), "%s was refused", made[i].url)

		return true
	})
	server.Close()

	return made
}

// crowd lets all clients call send, with 0, 1 and so on, until it returns false.
func crowd(send func(n int) bool) {
	var next atomic.Int64
	var working sync.WaitGroup
	for range clients {
		working.Go(func() {
			for send(int(next.Add(1)) - 1) {
			}
		})
	}
	working.Wait()
}

// send makes the exchange, and tells whether it was served. Anything but the answer of the backend or a refusal of the tap is an error.
func (x exchange) send(t *testing.T, server *httptest.Server) bool {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), x.method, server.URL+x.url, bytes.NewReader(x.requestBody))
	require.NoError(t, err)
	resp, err := server.Client().Do(req)
	if !assert.NoError(t, err) {
		return false
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	assert.NoError(t, err)
	if resp.StatusCode == http.StatusInternalServerError {
		return false
	}
	assert.Equal(t, x.status, resp.StatusCode, "%s", x.url)
	assert.True(t, bytes.Equal(x.responseBody, body), "the client of %s got another body", x.url)

	return true
}
