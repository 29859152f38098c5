package tap

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"sync"
)

// unlimited is the limit of a body without one. A byte more must still be a number.
const unlimited = math.MaxInt64 - 1

// maxGuess is the most memory that is set aside for a body because its length was announced, in bytes.
// The rest is set aside as it comes, since an announcement costs its sender nothing.
const maxGuess = 64 << 10

// requestBody passes the body of a request on as it is read, and keeps a copy of its first bytes.
// It never reads more than it is asked for, and its errors are those of the original.
//
// A transport may read on in a goroutine of its own after the handler has returned, hence the mutex; freeze ends the copying.
type requestBody struct {
	original io.ReadCloser
	// length is the announced length in bytes, -1 when unknown.
	length int64
	// limit is how many bytes are copied.
	limit int64
	// recordable is how many bytes the record needs that is sent while the body is still under way; -1 when there is no such record.
	recordable int64
	// recorded is called once, by the goroutine that reads, when recordable bytes and one more have been read, or the whole body.
	// The mutex may be held.
	recorded func()

	// ahead are bytes that readAhead has read and Read has not yet passed on.
	ahead []byte
	// idle says that nothing is left to be done but to read. Only the reading goroutine knows it.
	idle bool
	// atEnd says that the end has been passed on.
	atEnd bool

	mu     sync.Mutex
	copied []byte
	read   int64
	ended  bool
	frozen bool
}

// Read implements io.Reader.
func (b *requestBody) Read(p []byte) (int, error) {
	if !b.idle {
		return readCopying(b, p)
	}

	n, err := b.original.Read(p)
	if err != nil {
		endReading(b, err)
	}

	return n, err
}

// readCopying is Read as long as there is more to do than to read.
func readCopying(b *requestBody, p []byte) (int, error) {
	if len(b.ahead) > 0 {
		n := copy(p, b.ahead)
		b.ahead = b.ahead[n:]

		return n, nil
	}
	if b.atEnd {
		return 0, io.EOF
	}

	n, err := b.original.Read(p)
	copyRequestBody(b, p[:n], err)
	if err != nil {
		endReading(b, err)
	}

	return n, err
}

// endReading sees to it that the original is not read beyond its end: a transport may try to, when net/http has closed it already.
func endReading(b *requestBody, err error) {
	b.idle = false
	b.atEnd = err == io.EOF //nolint:errorlint // io.Reader promises io.EOF itself.
}

// Close implements io.Closer.
func (b *requestBody) Close() error {
	return b.original.Close()
}

func copyRequestBody(b *requestBody, p []byte, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()

	if b.frozen {
		b.idle = true

		return
	}

	// Only as much as the records need, and in one piece: appending is the one copy of each byte.
	if room := b.limit - b.read; room >= int64(len(p)) {
		b.copied = append(b.copied, p...)
	} else if room > 0 {
		b.copied = append(b.copied, p[:room]...)
	}
	b.read += int64(len(p))
	b.ended = b.ended || err == io.EOF || b.read == b.length //nolint:errorlint // io.Reader promises io.EOF itself.
	noticeRecordable(b)
	b.idle = b.read > b.limit && b.recordable < 0
}

// noticeRecordable tells once that all has been read that the record needs which is sent while the body is under way.
func noticeRecordable(b *requestBody) {
	if b.recordable >= 0 && (b.ended || b.read > b.recordable) {
		b.recordable = -1
		b.recorded()
	}
}

// readAhead reads the body until its end or, when it is longer than limit, a byte more. All of it is passed on later.
func readAhead(b *requestBody, limit int64) error {
	guess := b.length
	if guess < 0 {
		guess = 0
	}
	if guess > limit {
		guess = limit
	}
	if guess > maxGuess {
		guess = maxGuess
	}

	buffer := bytes.NewBuffer(make([]byte, 0, guess+bytes.MinRead))
	if _, err := buffer.ReadFrom(io.LimitReader(b.original, limit+1)); err != nil {
		return err
	}

	b.ahead = buffer.Bytes()
	b.read = int64(len(b.ahead))
	b.ended = b.read <= limit
	b.atEnd = b.ended
	b.copied = b.ahead
	if b.read > b.limit {
		b.copied = b.ahead[:b.limit:b.limit]
	}
	noticeRecordable(b)

	return nil
}

// bodyRead returns what has been copied of the body, at most limit bytes, and whether the body is longer than that.
func bodyRead(b *requestBody, limit int64) ([]byte, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()

	body := b.copied
	if int64(len(body)) > limit {
		body = body[:limit:limit]
	}

	return body, b.read > limit || !b.ended
}

// freeze ends the copying. It returns whether the record that is sent while the body is under way is still to be sent.
func freeze(b *requestBody) bool {
	b.mu.Lock()
	defer b.mu.Unlock()

	b.frozen = true

	return b.recordable >= 0
}

// errRefused is what a handler gets that goes on writing a response which was refused.
var errRefused = errors.New("the response was refused, because its record was not accepted")

// responseWriter passes a response on as it is written, and keeps a copy of its header and of the first bytes of its body.
//
// Yaegi hides every method but http.ResponseWriter's own and Hijack from whatever writes to it, http.Flusher included. So it
// flushes the writer underneath by itself, by the rule that httputil.ReverseProxy follows: at once where the length is
// unknown. Where it is known, only when the response is whole or trickles, since net/http sends anything larger by itself.
type responseWriter struct {
	rw http.ResponseWriter
	// room is how many more bytes of the body are copied.
	room int64
	// bodiless says that the response has no body, whatever its length says and the handler writes: it is the answer to HEAD.
	bodiless bool
	// vary is the header of that name before the handler was called.
	vary []string
	// hold is nil, unless the response is held back.
	hold *hold
	// refused says that the client has got an error in place of the response.
	refused bool

	// status is 0 until it is written.
	status int
	// passing says that a status has been written, and what follows is passed on.
	passing bool
	header  http.Header
	body    []byte
	written int64
	// bulk says that large writes are not counted any more: the length is announced, nothing more is copied, and what is left of the
	// response is flushed at its end.
	bulk bool
	// implied says that the handler has written nothing, and net/http will answer for it.
	implied  bool
	hijacked bool
	// length is the announced length in bytes, -1 when unknown.
	length int64
}

// flushBelow is the size of the buffer of net/http's response writer in bytes: a write of this size leaves it by itself.
// The source is bufferBeforeChunkingSize and the 4 KiB bufio.Writer of the connection, in net/http/server.go.
const flushBelow = 4 << 10

// Header implements http.ResponseWriter.
func (w *responseWriter) Header() http.Header {
	if w.refused {
		return w.hold.discarded
	}

	return w.rw.Header()
}

// WriteHeader implements http.ResponseWriter. Of several final statuses the first counts.
func (w *responseWriter) WriteHeader(status int) {
	if status < 200 || w.status != 0 || w.hold != nil {
		writeOtherHeader(w, status)

		return
	}

	header := w.rw.Header()
	w.header = header.Clone()
	w.status = status
	w.passing = true
	if lengths := header["Content-Length"]; lengths != nil {
		w.length = parseLength(lengths)
	}

	w.rw.WriteHeader(status)
	if w.length < 0 && status < 300 {
		flush(w)
	}
}

// Write implements http.ResponseWriter.
func (w *responseWriter) Write(p []byte) (int, error) {
	if !w.passing {
		return writeOther(w, p)
	}

	if w.bulk && len(p) >= flushBelow {
		return w.rw.Write(p)
	}

	n, err := w.rw.Write(p)
	if w.room > 0 {
		copyResponseBody(w, p[:n])
	}
	w.written += int64(n)
	if n < flushBelow || w.written >= w.length {
		flushWritten(w)
	} else {
		w.bulk = w.room == 0
	}

	return n, err
}

// Hijack implements http.Hijacker. A response that is held back is not any more: an upgrade is served as it comes.
func (w *responseWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	hijacker, ok := w.rw.(http.Hijacker)
	if !ok || w.refused {
		return nil, nil, http.ErrNotSupported
	}

	conn, buffered, err := hijacker.Hijack()
	if err == nil {
		w.hijacked = true
		w.hold = nil
	}

	return conn, buffered, err
}

// writeOtherHeader is WriteHeader for a status that is informational, or not the first, or of a held response.
func writeOtherHeader(w *responseWriter, status int) {
	switch {
	case status < 200 && status != http.StatusSwitchingProtocols:
		if w.hold == nil {
			w.rw.WriteHeader(status)
		}
	case w.status != 0:
		// Too late.
	case w.hold != nil && status != http.StatusSwitchingProtocols:
		w.status = status
		w.header = w.rw.Header().Clone()
		w.length = parseLength(w.header["Content-Length"])
		holdHeader(w)
	default:
		// An upgrade, which is served as it comes.
		w.hold = nil
		w.status = status
		w.header = w.rw.Header().Clone()
		w.passing = true
		w.rw.WriteHeader(status)
	}
}

// writeOther is Write before a status, or of a held response.
func writeOther(w *responseWriter, p []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if w.hold != nil {
		return holdBody(w, p)
	}

	return w.Write(p)
}

// parseLength returns the Content-Length in bytes, or -1 when there is none that counts.
func parseLength(lengths []string) int64 {
	if len(lengths) == 0 {
		return -1
	}
	length, err := strconv.ParseInt(lengths[0], 10, 64)
	if err != nil {
		return -1
	}

	return length
}

func copyResponseBody(w *responseWriter, p []byte) {
	if int64(len(p)) > w.room {
		p = p[:w.room]
	}
	if w.body == nil && w.length > int64(len(p)) {
		// One allocation for a body of known length that comes in many pieces.
		w.body = make([]byte, 0, guessLength(w))
	}
	w.body = append(w.body, p...)
	w.room -= int64(len(p))
}

func guessLength(w *responseWriter) int64 {
	guess := w.length
	if guess > w.room {
		guess = w.room
	}
	if guess > maxGuess {
		guess = maxGuess
	}

	return guess
}

// flush sends what net/http has gathered. A writer that cannot flush is left alone.
func flush(w *responseWriter) {
	_ = http.NewResponseController(w.rw).Flush()
}

// flushWritten flushes after a write, unless the length is known and something in front negotiates the encoding: it keeps the
// length only while nothing is flushed.
func flushWritten(w *responseWriter) {
	if w.length < 0 || w.vary == nil || !negotiates(w.vary) {
		flush(w)
	}
}

// negotiates says whether something in front has announced that the response depends on Accept-Encoding.
func negotiates(vary []string) bool {
	return strings.Contains(strings.ToLower(strings.Join(vary, ",")), "accept-encoding")
}

// flushWhole sends a response that has been written to its end without a write that would have flushed it. Where
// the length is not known net/http would announce one of 0, which is left to it unless trailers are to follow.
func flushWhole(w *responseWriter) {
	if w.implied || w.hijacked || w.refused {
		return
	}
	if w.length >= 0 || w.status == http.StatusNotModified {
		if !negotiates(w.vary) {
			flush(w)
		}
	} else if hasTrailers(w.rw.Header()) {
		flush(w)
	}
}

func hasTrailers(header http.Header) bool {
	for name := range header {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			return true
		}
	}

	return false
}

// bodyWritten returns what has been copied of the body, at most limit bytes, and whether the body is longer than that.
func bodyWritten(w *responseWriter, limit int64) ([]byte, bool) {
	if w.bodiless {
		return nil, false
	}

	body := w.body
	if int64(len(body)) > limit {
		body = body[:limit:limit]
	}

	return body, w.written > limit || w.bulk
}

// settle gives a response whose handler wrote no status the one it gets from net/http: 200, or 101 on a connection that was taken over.
func settle(w *responseWriter) {
	w.header = w.rw.Header().Clone()
	w.implied = true
	w.status = http.StatusOK
	if w.hijacked {
		w.status = http.StatusSwitchingProtocols
	}
}

// hold keeps a response from the client until its record is complete and accepted. The bytes it holds are those of the record.
type hold struct {
	// limit is how many bytes of the body are held before the record is complete.
	limit int64
	// max is how many bytes of the body the response may have; with more it is refused.
	max int64
	// accept asks for the record to be delivered. It returns false when the response must not be served.
	accept func() bool
	// before are the headers that stood when the handler was called: a refused response keeps no others.
	before http.Header

	// discarded is given to a handler that goes on after the refusal.
	discarded http.Header
}

// holdHeader is WriteHeader of a held response. Its record may be complete without a body.
func holdHeader(w *responseWriter) {
	if w.length > w.hold.max && w.status != http.StatusNotModified {
		refuse(w)
	} else if w.hold.limit == 0 && w.hold.max > 0 && accepted(w) {
		_ = release(w, nil)
	}
}

// holdBody is Write of a held response.
func holdBody(w *responseWriter, p []byte) (int, error) {
	if w.refused {
		return 0, errRefused
	}

	held := w.body
	w.written += int64(len(p))
	if w.room > 0 {
		copyResponseBody(w, p)
	}
	if w.written <= w.hold.limit {
		return len(p), nil
	}

	if w.written > w.hold.max {
		refuse(w)

		return 0, errRefused
	}
	if !accepted(w) {
		return 0, errRefused
	}
	if err := release(w, held); err != nil {
		return 0, err
	}

	return pass(w, p)
}

// endHold ends the holding of a response that is written to its end.
func endHold(w *responseWriter) {
	if !w.refused && accepted(w) {
		_ = release(w, w.body)
	}
}

// accepted delivers the record of a held response, and refuses the response when the record is refused.
func accepted(w *responseWriter) bool {
	if w.hold.accept() {
		return true
	}
	refuse(w)

	return false
}

// release sends what was held as it would have been sent: headers that were set after the status are trailers, and net/http
// takes them for that only when they come after it.
func release(w *responseWriter, held []byte) error {
	w.hold = nil
	if w.implied {
		return nil
	}

	var trailers http.Header
	if header := w.rw.Header(); !reflect.DeepEqual(header, w.header) {
		trailers = takeTrailers(header, w.header)
	}

	w.passing = true
	w.rw.WriteHeader(w.status)
	if w.length < 0 && w.status < 300 {
		flush(w)
	}

	var err error
	if len(held) > 0 {
		_, err = pass(w, held)
	}
	if trailers != nil {
		putTrailers(w.rw, trailers)
	}

	return err
}

// putTrailers puts trailers back. The header map is asked for again: a middleware in front may hand out another one once the header is
// written.
func putTrailers(rw http.ResponseWriter, trailers http.Header) {
	header := rw.Header()
	for name, values := range trailers {
		header[name] = values
	}
}

// takeTrailers makes header what it was when the status was written, and returns what has come since.
func takeTrailers(header, written http.Header) http.Header {
	trailers := http.Header{}
	for name, values := range header {
		if !reflect.DeepEqual(values, written[name]) {
			trailers[name] = values
			delete(header, name)
		}
	}
	for name, values := range written {
		header[name] = values
	}

	return trailers
}

// pass writes held bytes, which are copied and counted already.
func pass(w *responseWriter, p []byte) (int, error) {
	n, err := w.rw.Write(p)
	if n < flushBelow || w.written >= w.length {
		flushWritten(w)
	}

	return n, err
}

// refuse serves an error in place of a held response, with nothing of that response in it.
func refuse(w *responseWriter) {
	w.refused = true
	w.hold.discarded = http.Header{}

	header := w.rw.Header()
	for name := range header {
		delete(header, name)
	}
	for name, values := range w.hold.before {
		header[name] = values
	}

	// What is recorded of the response from here on is what the client got.
	w.status = http.StatusInternalServerError
	w.body = serveError(w.rw, w.status)
	w.written = int64(len(w.body))
	w.length = w.written
	w.header = header.Clone()
	flushWritten(w)
}

// serveError answers in the place of the handler, and returns the body of the answer.
func serveError(rw http.ResponseWriter, status int) []byte {
	text := []byte(http.StatusText(status) + "\n")

	header := rw.Header()
	header.Set("Content-Type", "text/plain; charset=utf-8")
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Content-Length", strconv.Itoa(len(text)))
	rw.WriteHeader(status)
	_, _ = rw.Write(text)

	return text
}

// Interface guards.
var (
	_ io.ReadCloser       = (*requestBody)(nil)
	_ http.ResponseWriter = (*responseWriter)(nil)
	_ http.Hijacker       = (*responseWriter)(nil)
)
