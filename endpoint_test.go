package tap

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestEndpoint_JoinsServiceAndPath(t *testing.T) {
	// Service is what follows the host.
	cases := []struct{ service, path, want string }{
		{"", "", "/"},
		{"/", "", "/"},
		{"/base", "", "/base"},
		{"/base/", "", "/base/"},
		{"", "/", "/"},
		{"", "records", "/records"},
		{"", "/records", "/records"},
		{"", " /records ", "/records"},
		{"/", "records", "/records"},
		{"/", "/records/", "/records/"},
		{"/base", "records", "/base/records"},
		{"/base", "/", "/base/"},
		{"/base/", "/records", "/base/records"},
		{"/a/b", "c/d", "/a/b/c/d"},
		{"", "?tenant=a", "/?tenant=a"},
		{"/base", "records?b=2&a=1&a=%20x+y", "/base/records?b=2&a=1&a=%20x+y"},
		{"", "/records?to=http://audit/?x", "/records?to=http://audit/?x"},
		{"/a%2Fb", "/c%2fd", "/a%2Fb/c%2fd"},
		{"", "/../records/.", "/../records/."},
		{"", "/a b", "/a%20b"},
		{"", "/é", "/%C3%A9"},
	}
	endpoint := newRecorder(t)
	for _, c := range cases {
		t.Run(fmt.Sprintf("%q and %q", c.service, c.path), func(t *testing.T) {
			for _, user := range []string{"", "user:password@"} {
				service := strings.Replace(endpoint.url, "://", "://"+user, 1) + c.service
				handler := newHandler(t, &Config{Exchange: &RecordConfig{Service: []string{service}, Path: c.path}}, discard)

				handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
				assert.Equal(t, c.want, endpoint.next(t).uri)
			}
		})
	}
}

func TestEndpoint_GetsTheHeadersOfTheConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("\nBearer token\r\n\n"), 0o600))
	cases := []struct {
		name, service string
		headers       map[string]string
		want          map[string]string
		host          string
	}{
		{"none", "", nil, map[string]string{"Authorization": ""}, ""},
		{"in any case", "", map[string]string{"x-tENANT": "one"}, map[string]string{"X-Tenant": "one"}, ""},
		{"with a comma", "", map[string]string{"X-List": "a, b"}, map[string]string{"X-List": "a, b"}, ""},
		{"not in ASCII", "", map[string]string{"X-UTF-8": "café", "X-Latin": "caf\xe9"}, map[string]string{"X-Utf-8": "café", "X-Latin": "caf\xe9"}, ""},
		{"of net/http", "", map[string]string{"User-Agent": "audit/1"}, map[string]string{"User-Agent": "audit/1"}, ""},
		{"in a file", "", map[string]string{"Authorization": "file:" + file}, map[string]string{"Authorization": "Bearer token"}, ""},
		{"Host", "", map[string]string{"host": "audit.example:9000"}, map[string]string{"Host": ""}, "audit.example:9000"},
		{"user and password", "user:pass%40word@", nil, map[string]string{"Authorization": "Basic dXNlcjpwYXNzQHdvcmQ="}, ""},
		{"user alone", "user@", nil, map[string]string{"Authorization": "Basic dXNlcjo="}, ""},
		{"a header before the user", "user:password@", map[string]string{"authorization": "Bearer token"}, map[string]string{"Authorization": "Bearer token"}, ""},
		{"a user and Host", "user@", map[string]string{"Host": "audit.example"}, map[string]string{"Authorization": "Basic dXNlcjo="}, "audit.example"},
	}
	endpoint := newRecorder(t)
	own := strings.TrimPrefix(endpoint.url, "http://")
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			handler := newHandler(t, &Config{Exchange: &RecordConfig{Service: []string{"http://" + c.service + own}, Headers: c.headers}}, discard)
			for i := 0; i < 2; i++ {
				handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
				got := endpoint.next(t)
				for name, want := range c.want {
					assert.Equal(t, want, strings.Join(got.header[name], "; "), name)
				}
				host := c.host
				if host == "" {
					host = own
				}
				assert.Equal(t, host, got.host)
				assert.Equal(t, got.ID, got.header.Get("X-Tap-Id"))
				assert.Equal(t, "exchange", got.header.Get("X-Tap-Record"))
				assert.Equal(t, got.ID+"-exchange", got.header.Get("Idempotency-Key"))
				assert.Equal(t, "application/json", got.header.Get("Content-Type"))
			}
		})
	}
}

// A record that is not accepted is one that has no status below 400, for whatever reason.
func TestEndpoint_RefusesWhatIsNotAccepted(t *testing.T) {
	answers := map[string]http.HandlerFunc{
		"a refusal":      func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusConflict) },
		"no answer":      func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"too late":       func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() },
		"no HTTP":        answerBy("SSH-2.0-OpenSSH_9.9\r\n"),
		"half an answer": answerBy("HTTP/1.1 200"),
		"a bad status":   answerBy("HTTP/1.1 20x OK\r\n\r\n"),
		"informational":  answerBy("HTTP/1.1 103 Early Hints\r\n\r\n"),
	}
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			// The server notices the end of a connection only while it reads on.
			server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				_, _ = req.Body.Read(make([]byte, 1<<16))
				_, _ = req.Body.Read(make([]byte, 1))
				answer(rw, req)
			}))
			defer server.Close()
			var called atomic.Bool
			config := &RecordConfig{Service: []string{server.URL}, RejectOnRecordError: true, Timeout: "500ms"}
			handler := newHandler(t, &Config{Request: config}, func(http.ResponseWriter, *http.Request) { called.Store(true) })

			rw := httptest.NewRecorder()
			handler.ServeHTTP(rw, httptest.NewRequest(http.MethodGet, "/", nil))
			assert.Equal(t, http.StatusInternalServerError, rw.Code)
			assert.False(t, called.Load())
		})
	}
}

// answerBy answers by a text that stands for itself, and ends the connection.
func answerBy(text string) http.HandlerFunc {
	return func(rw http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(rw).Hijack()
		if err == nil {
			_, _ = conn.Write([]byte(text))
			_ = conn.Close()
		}
	}
}

func TestParseDuration_TakesGoDurationsAndSeconds(t *testing.T) {
	const byDefault = 7 * time.Second
	cases := map[string]time.Duration{
		"":             byDefault,
		"  ":           byDefault,
		"0":            0,
		"0s":           0,
		"1":            time.Second,
		" 10 ":         10 * time.Second,
		"+5":           5 * time.Second,
		"007":          7 * time.Second,
		"86400":        24 * time.Hour,
		"1ns":          1,
		"500ms":        500 * time.Millisecond,
		"1.5s":         1500 * time.Millisecond,
		" 1m30s ":      90 * time.Second,
		"2540400h10m":  2540400*time.Hour + 10*time.Minute,
		"9223372036":   9223372036 * time.Second,
		"-0":           0,
		"1h1m1s1ms1us": time.Hour + time.Minute + time.Second + time.Millisecond + time.Microsecond,
	}
	for text, want := range cases {
		got, err := parseDuration("request.timeout", text, byDefault)
		assert.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}

	for _, text := range []string{"-1", "-1s", "1.5", "soon", "5 s", "10sec", "1e3", "0x10", "١", "s", ".", "NaN", "9223372037", "99999999999999999999", "1d"} {
		_, err := parseDuration("request.timeout", text, byDefault)
		assert.ErrorContains(t, err, "request.timeout: ", text)
		assert.ErrorContains(t, err, fmt.Sprintf("%q", text), text)
	}
}
