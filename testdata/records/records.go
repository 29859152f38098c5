// Package records holds golden records: exchanges and what a tap makes of them, byte for byte. It is shared by the tests of
// the compiled plugin, which can fix the id and the time of a record from within, and by those of the interpreted one in a
// module of their own. So a record that both find equal to the golden one is the same from both.
//
// Each folder is one exchange:
//
//	config.json    the settings of the tap; the host "endpoint" stands for that of the endpoint
//	request.http   the request as it comes from the client
//	response.http  the response as it comes from the backend; one that is shorter than it announces is aborted
//	records.ndjson the records, one a line: request, response, exchange
//
// The text files have LF where HTTP has CRLF, which net/http reads as well.
package records

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"time"
)

// ID is the id of every golden record.
const ID = "000102030405060708090a0b0c0d0e0f"

// Time is when every golden exchange was received. It is not in UTC, as a clock's is not, and does not go on, so that every
// duration is 0.
var Time = time.Date(2024, 2, 29, 23, 59, 59, 123456789, time.FixedZone("", 2*60*60))

// RemoteAddr is the address of the client.
const RemoteAddr = "192.0.2.1:49152"

// Exchange is a request, the response to it, and their records.
type Exchange struct {
	// Name is that of the folder.
	Name string
	// Golden is where the golden records stand.
	Golden string

	config, request, response []byte
}

// Read returns the exchanges that stand in a folder, or the error of reading them.
func Read(folder string) ([]Exchange, error) {
	configs, err := filepath.Glob(filepath.Join(folder, "*", "config.json"))
	if err != nil {
		return nil, err
	}
	if len(configs) == 0 {
		return nil, fmt.Errorf("no exchanges in %q", folder)
	}

	var all []Exchange
	for _, config := range configs {
		own := filepath.Dir(config)
		x := Exchange{Name: filepath.Base(own), Golden: filepath.Join(own, "records.ndjson")}
		for name, text := range map[string]*[]byte{"config.json": &x.config, "request.http": &x.request, "response.http": &x.response} {
			if *text, err = os.ReadFile(filepath.Join(own, name)); err != nil {
				return nil, err
			}
		}
		all = append(all, x)
	}

	return all, nil
}

// Record sends the exchange through a tap, and returns its records in the order of the golden ones. The tap is made by newTap
// from settings in JSON and the handler behind it. It is an error when a record does not come, or is not one that was asked for.
func (x Exchange) Record(newTap func(config []byte, next http.Handler) (http.Handler, error)) ([]byte, error) {
	kinds := map[string]json.RawMessage{}
	if err := json.Unmarshal(x.config, &kinds); err != nil {
		return nil, err
	}
	delete(kinds, "redactHeaders")

	delivered := make(chan record, len(kinds))
	endpoint := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		payload, _ := io.ReadAll(req.Body)
		delivered <- record{kind: req.Header.Get("X-Tap-Record"), payload: payload}
	}))
	defer endpoint.Close()

	tap, err := newTap(bytes.ReplaceAll(x.config, []byte("http://endpoint"), []byte(endpoint.URL)), http.HandlerFunc(x.respond))
	if err != nil {
		return nil, err
	}
	req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(x.request)))
	if err != nil {
		return nil, err
	}
	req.RemoteAddr = RemoteAddr
	serve(tap, req)

	return inOrder(delivered, len(kinds))
}

// serve lets a tap serve a request. A response that is aborted ends with the panic of a reverse proxy.
func serve(tap http.Handler, req *http.Request) {
	defer func() {
		if value := recover(); value != nil && value != http.ErrAbortHandler {
			panic(value)
		}
	}()
	tap.ServeHTTP(httptest.NewRecorder(), req)
}

// respond is the backend, and the reverse proxy in front of it.
func (x Exchange) respond(rw http.ResponseWriter, req *http.Request) {
	_, _ = io.Copy(io.Discard, req.Body)

	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(x.response)), req)
	if err != nil {
		panic(err)
	}
	defer func() { _ = resp.Body.Close() }()
	for name, values := range resp.Header {
		rw.Header()[name] = values
	}
	rw.WriteHeader(resp.StatusCode)
	if _, err := io.Copy(rw, resp.Body); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// record is what comes to the endpoint.
type record struct {
	kind    string
	payload []byte
}

// inOrder waits for n records, which may come in any order, and returns them one a line.
func inOrder(delivered <-chan record, n int) ([]byte, error) {
	byKind := map[string][]byte{}
	for range n {
		select {
		case got := <-delivered:
			byKind[got.kind] = got.payload
		case <-time.After(20 * time.Second):
			return nil, errors.New("a record did not come")
		}
	}

	var lines bytes.Buffer
	for _, kind := range []string{"request", "response", "exchange"} {
		if payload, ok := byKind[kind]; ok {
			lines.Write(payload)
			lines.WriteByte('\n')
		}
		delete(byKind, kind)
	}
	if len(byKind) > 0 {
		return nil, fmt.Errorf("unknown kinds of record: %q", byKind)
	}

	return lines.Bytes(), nil
}
