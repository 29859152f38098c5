package tap

import (
	"context"
	"encoding/json"
	"flag"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/records"
)

var update = flag.Bool("update", false, "write the golden records anew")

// The id and the time of a record can only be fixed from within the package, so the compiled plugin is held against the golden
// records here, and the interpreted one in testdata/yaegi, where they are fixed by a source file that is added to the plugin's.
func TestRecord_EqualsTheGoldenRecord(t *testing.T) {
	fixIDAndTime(t)
	exchanges, err := records.Read("testdata/records")
	require.NoError(t, err)

	for _, x := range exchanges {
		t.Run(x.Name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()

			got, err := x.Record(func(settings []byte, next http.Handler) (http.Handler, error) {
				config := CreateConfig()
				if err := json.Unmarshal(settings, config); err != nil {
					return nil, err
				}

				return New(ctx, next, config, "audit@file")
			})
			require.NoError(t, err)

			if *update {
				require.NoError(t, os.WriteFile(x.Golden, got, 0o600))
			}
			want, err := os.ReadFile(x.Golden)
			require.NoError(t, err)
			assert.Equal(t, string(want), string(got))
		})
	}
}

func fixIDAndTime(t *testing.T) {
	t.Helper()
	oldNow, oldSince, oldIDs := now, since, newIDs
	now = func() time.Time { return records.Time }
	since = records.Time.Sub
	newIDs = func() string { return records.ID }
	t.Cleanup(func() { now, since, newIDs = oldNow, oldSince, oldIDs })
}

func TestRandomIDs_Are32HexDigitsEachThatDiffer(t *testing.T) {
	ids := randomIDs() + randomIDs()
	assert.Regexp(t, "^([0-9a-f]{32})+$", ids)

	different := map[string]bool{}
	for ; ids != ""; ids = ids[idLength:] {
		different[ids[:idLength]] = true
	}
	assert.Len(t, different, 2*idsAtOnce)
}

func TestDescribeRequest_IsACopyThatNothingBehindTheTapChanges(t *testing.T) {
	req := httptest.NewRequest(http.MethodPost, "/p?a=1&a=2&b=%20x", strings.NewReader("ping"))
	req.Host, req.RemoteAddr = "shop.example", "192.0.2.1:49152"
	req.Header = http.Header{"Authorization": {"secret"}, "X-Kept": {"1", "2"}}

	described := describeRequest(req)
	req.Method, req.RequestURI, req.Host, req.RemoteAddr = http.MethodPut, "/changed", "changed", "changed"
	req.Header["X-Kept"][0] = "changed"
	req.Header.Set("X-Added", "added")
	redact(described.Headers, newRedaction([]string{"Authorization"}))

	assert.Equal(t, &Request{
		Method:     http.MethodPost,
		URL:        "/p?a=1&a=2&b=%20x",
		Host:       "shop.example",
		Proto:      "HTTP/1.1",
		RemoteAddr: "192.0.2.1:49152",
		Headers:    http.Header{"Authorization": {redacted}, "X-Kept": {"1", "2"}},
	}, described)
	assert.Equal(t, []string{"secret"}, req.Header["Authorization"], "the backend gets the real value")
}

func TestRequestLine_HasTheNamedHeadersAlone(t *testing.T) {
	request := &Request{
		Method:        http.MethodGet,
		URL:           "/",
		Host:          "shop.example",
		Proto:         "HTTP/2.0",
		RemoteAddr:    "192.0.2.1:49152",
		Headers:       http.Header{"X-Request-Id": {"1", "2"}, "X-Other": {"3"}},
		Body:          []byte("body"),
		BodyTruncated: true,
	}

	assert.Equal(t, &Request{
		Method:  http.MethodGet,
		URL:     "/",
		Host:    "shop.example",
		Proto:   "HTTP/2.0",
		Headers: http.Header{"X-Request-Id": {"1", "2"}},
	}, requestLine(request, []string{"X-Request-Id", "X-Absent"}))
}

func TestRedactHeaders_KeepsNamesAndTheNumberOfValues(t *testing.T) {
	cases := []struct {
		name     string
		headers  http.Header
		redacted []string
		want     http.Header
	}{
		{"no headers", nil, []string{"Cookie"}, nil},
		{"no names", http.Header{"Cookie": {"1"}}, nil, http.Header{"Cookie": {"1"}}},
		{"absent", http.Header{"Accept": {"1"}}, []string{"Cookie"}, http.Header{"Accept": {"1"}}},
		{"one value", http.Header{"Cookie": {"1"}}, []string{"Cookie"}, http.Header{"Cookie": {"REDACTED"}}},
		{"an empty value", http.Header{"Cookie": {""}}, []string{"Cookie"}, http.Header{"Cookie": {"REDACTED"}}},
		{"no value", http.Header{"Cookie": {}}, []string{"Cookie"}, http.Header{"Cookie": {}}},
		{
			"three values with commas",
			http.Header{"Cookie": {"1,1", "2", ","}},
			[]string{"Cookie"},
			http.Header{"Cookie": {"REDACTED", "REDACTED", "REDACTED"}},
		},
		{
			"several names",
			http.Header{"Cookie": {"1"}, "Accept": {"2"}, "X-Api-Key": {"3"}},
			[]string{"X-Api-Key", "Cookie"},
			http.Header{"Cookie": {"REDACTED"}, "Accept": {"2"}, "X-Api-Key": {"REDACTED"}},
		},
		{
			"in any spelling",
			http.Header{"cookie": {"1"}, "COOKIE": {"2"}, "cOOKIe": {"3"}, "": {"4"}},
			[]string{"cOokIe"},
			http.Header{"cookie": {"REDACTED"}, "COOKIE": {"REDACTED"}, "cOOKIe": {"REDACTED"}, "": {"4"}},
		},
		{"ends in no letter", http.Header{"X-Key-1": {"1"}, "X-Key-2": {"2"}}, []string{"x-key-1"}, http.Header{"X-Key-1": {"REDACTED"}, "X-Key-2": {"2"}}},
		{"not in letters at all", http.Header{"ſ": {"1"}, "K": {"2"}}, []string{"ſ", "K"}, http.Header{"ſ": {"REDACTED"}, "K": {"REDACTED"}}},
	}
	for _, test := range cases {
		t.Run(test.name, func(t *testing.T) {
			redact(test.headers, newRedaction(test.redacted))
			assert.Equal(t, test.want, test.headers)
		})
	}
}

func TestEncode_MakesValidJSONOfAnyBytes(t *testing.T) {
	const bad = "a\xff\xfe\x00\u2028<&>\"\\"
	payload := encode(&Record{
		ID: bad, Kind: bad, Time: time.Unix(0, 1).UTC(), TraceID: bad,
		Request:  &Request{Method: bad, URL: bad, Host: bad, Proto: bad, RemoteAddr: bad, Headers: http.Header{bad: {bad}}, Body: []byte(bad)},
		Response: &Response{Status: 200, Headers: http.Header{bad: {bad}}, Body: []byte(bad)},
	})
	assert.True(t, utf8.Valid(payload))
	assert.NotContains(t, string(payload), "\n", "a batch has one record a line")

	var record Record
	require.NoError(t, json.Unmarshal(payload, &record))
	const mended = "a\ufffd\ufffd\x00\u2028<&>\"\\"
	assert.Equal(t, mended, record.Request.URL)
	assert.Equal(t, http.Header{mended: {mended}}, record.Response.Headers)
	assert.Equal(t, bad, string(record.Request.Body))
	assert.Equal(t, bad, string(record.Response.Body))
}

func TestEncode_LeavesOutWhatIsEmpty(t *testing.T) {
	record := Record{ID: records.ID, Kind: kindExchange, Time: records.Time.UTC(), Request: &Request{}, Response: &Response{}}
	payload := encode(&record)
	assert.Equal(t, `{"id":"`+records.ID+`","kind":"exchange","time":"2024-02-29T21:59:59.123456789Z",`+
		`"request":{"method":"","url":"","host":"","proto":""},"response":{"status":0,"duration":0}}`, string(payload))
}

func TestEncode_TakesTrailersOutOfTheHeaders(t *testing.T) {
	trailer := http.TrailerPrefix + "Grpc-Status"
	cases := []struct {
		name    string
		headers http.Header
		want    http.Header
	}{
		{"no headers", nil, nil},
		{"no trailer", http.Header{"Trailer": {"Grpc-Status"}}, http.Header{"Trailer": {"Grpc-Status"}}},
		{"a trailer alone", http.Header{trailer: {"0"}}, nil},
		{"a trailer among headers", http.Header{"Accept": {"1"}, trailer: {"0"}}, http.Header{"Accept": {"1"}}},
		{"a value that looks like one", http.Header{"Accept": {`"` + trailer}}, http.Header{"Accept": {`"` + trailer}}},
	}
	for _, test := range cases {
		t.Run(test.name, func(t *testing.T) {
			given := test.headers.Clone()
			payload := encode(&Record{Response: &Response{Headers: test.headers}})

			var record Record
			require.NoError(t, json.Unmarshal(payload, &record))
			assert.Equal(t, test.want, record.Response.Headers)
			assert.Equal(t, given, test.headers, "the client gets the trailers")
		})
	}
}

func TestEncode_LeavesARequestWhoseHeadersLookLikeTrailersAlone(t *testing.T) {
	request := &Request{Headers: http.Header{"Accept": {url.QueryEscape(http.TrailerPrefix)}, "X": {`"Trailer:`}}}
	payload := encode(&Record{Request: request})

	var record Record
	require.NoError(t, json.Unmarshal(payload, &record))
	assert.Equal(t, request.Headers, record.Request.Headers)
}
