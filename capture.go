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
// The reader is embedded, so that the interpreter has no part in reading what is not copied: it is a MultiReader of a head and the rest.
//
// A transport may read on in a goroutine of its own after the handler has returned, hence the mutex; freeze ends the copying.
type requestBody struct {
	io.Reader
	original io.ReadCloser
	// rest is the original, or empty when that has been read to its end: a transport may try to read on when net/http has closed it.
	rest *io.LimitedReader
	// length is the announced length in bytes, -1 when unknown.
	length int64
	// limit is how many bytes are copied.
	limit int64
	// recordable is how many bytes the record needs that is sent while the body is still under way; -1 when there is no such record.
	recordable int64
	// recorded is called once, by the goroutine that reads, when recordable bytes and one more have been read, or the whole body.
	// The mutex may be held.
	recorded func()

	mu     sync.Mutex
	copied []byte
	read   int64
	ended  bool
	frozen bool
}

// newRequestBody returns a body of which at most limit bytes are copied.
func newRequestBody(original io.ReadCloser, length, limit int64) *requestBody {
	b := &requestBody{
		original:   original,
		rest:       &io.LimitedReader{R: original, N: unlimited},
		length:     length,
		limit:      limit,
		recordable: -1,
	}
	var head io.Reader = &bodyHead{body: b}
	b.Reader = io.MultiReader(head, b.rest)

	return b
}

// Close implements io.Closer.
func (b *requestBody) Close() error {
	return b.original.Close()
}

// bodyHead reads a body as long as more is to be done than to read. It ends when that is done.
type bodyHead struct {
	body *requestBody
	done bool
}

// Read implements io.Reader.
func (h *bodyHead) Read(p []byte) (int, error) {
	if h.done {
		return 0, io.EOF
	}

	b := h.body
	n, err := b.original.Read(p)
	h.done = copyRequestBody(b, p[:n], err)
	if err == io.EOF {
		b.rest.N = 0
	}

	return n, err
}

// copyRequestBody copies what has been read. It returns whether nothing more is to be copied, or to be known.
func copyRequestBody(b *requestBody, p []byte, err error) bool {
	b.mu.Lock()
	defer b.mu.Unlock()

	if b.frozen {
		return true
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

	return b.read > b.limit && b.recordable < 0
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

	ahead := buffer.Bytes()
	b.read = int64(len(ahead))
	b.ended = b.read <= limit
	b.copied = ahead
	if b.read > b.limit {
		b.copied = ahead[:b.limit:b.limit]
	}
	if b.ended {
		b.rest.N = 0
	}
	b.Reader = io.MultiReader(bytes.NewReader(ahead), b.rest)
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

// responseWriter passes a response on as it is written, and keeps a copy of its header and of the first bytes of its body.
//
// Yaegi hides every method but http.ResponseWriter's own and Hijack from whatever writes to it, http.Flusher included. So it
// flushes the writer underneath by itself, by the rule that httputil.ReverseProxy follows: at once where the length is
// unknown. Where it is known, only when the response is whole or trickles, since net/http sends anything larger by itself.
//
// The writer underneath is embedded, so that the interpreter has no part in calls of Header.
type responseWriter struct {
	http.ResponseWriter
	// copies says that more of the body is to be copied, or to be known: room is how many more bytes, 0 when it matters only whether
	// there are more.
	copies bool
	room   int64
	// bodiless says that the response has no body, whatever its length says and the handler writes: it is the answer to HEAD.
	bodiless bool
	// negotiated says that something in front negotiates the encoding: it keeps the length only while nothing is flushed.
	negotiated bool

	// status is 0 until it is written, and header is the header as it was then.
	status int
	header http.Header
	body   []byte
	// truncated says that the body is longer than what has been copied.
	truncated bool
	// handlesWrites says that a write has to do with more than to pass it on: there was no status yet, or the body is copied.
	handlesWrites bool
	// flushBelow is the size in bytes below which writes are flushed.
	flushBelow int
	// flushed says that nothing of the response waits in a buffer of the writer underneath.
	flushed bool
	// implied says that the handler has written nothing, and net/http will answer for it.
	implied  bool
	hijacked bool
}

const (
	// bufferSize is the size of the buffer of net/http's response writer in bytes: a write of this size leaves it by itself.
	// The source is bufferBeforeChunkingSize and the 4 KiB bufio.Writer of the connection, in net/http/server.go.
	bufferSize = 4 << 10
	// always is flushBelow of a response whose every write is flushed, or that has no end to be flushed.
	always = math.MaxInt
)

// prepareWriter is for a response of which at most room bytes are copied, or before which a header Vary has been set.
func prepareWriter(w *responseWriter, room int64, req *http.Request) {
	w.copies = room > 0
	w.room = room
	w.bodiless = req.Method == http.MethodHead
	w.negotiated = negotiates(w.ResponseWriter.Header()["Vary"])
	if w.negotiated {
		w.flushBelow = 0
	}
}

// WriteHeader implements http.ResponseWriter. Of several final statuses the first counts.
func (w *responseWriter) WriteHeader(status int) {
	if status < 200 || w.status != 0 {
		writeOtherHeader(w, status)

		return
	}

	w.status = status
	w.header = w.ResponseWriter.Header().Clone()
	w.handlesWrites = w.copies
	w.ResponseWriter.WriteHeader(status)
	if w.header["Content-Length"] == nil {
		startStream(w)
	}
}

// Write implements http.ResponseWriter.
func (w *responseWriter) Write(p []byte) (n int, err error) {
	if w.handlesWrites {
		return writeCopying(w, p)
	}

	n, err = w.ResponseWriter.Write(p)
	w.flushed = false
	if len(p) < w.flushBelow {
		// This is flush, without the call.
		w.flushed = true
		if flusher, ok := w.ResponseWriter.(http.Flusher); ok {
			flusher.Flush()
		} else {
			flushBehind(w)
		}
	}

	return n, err
}

// Hijack implements http.Hijacker.
func (w *responseWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	hijacker, ok := w.ResponseWriter.(http.Hijacker)
	if !ok {
		return nil, nil, http.ErrNotSupported
	}

	conn, buffered, err := hijacker.Hijack()
	if err == nil {
		w.hijacked = true
		w.flushBelow = always
	}

	return conn, buffered, err
}

// writeOtherHeader is WriteHeader for a status that is informational, or not the first.
func writeOtherHeader(w *responseWriter, status int) {
	if w.status != 0 {
		return
	}
	if status == http.StatusSwitchingProtocols {
		w.status = status
		w.header = w.ResponseWriter.Header().Clone()
		w.handlesWrites = w.copies
		w.flushBelow = always
		w.flushed = true
	}
	w.ResponseWriter.WriteHeader(status)
}

// startStream flushes a header without a length, and sees to it that all that follows it is.
func startStream(w *responseWriter) {
	w.flushBelow = always
	if w.status < 300 {
		flush(w)
	}
}

// negotiates says whether something in front has announced that the response depends on Accept-Encoding.
func negotiates(vary []string) bool {
	return strings.Contains(strings.ToLower(strings.Join(vary, ",")), "accept-encoding")
}

// writeCopying is Write before a status, or as long as the body is copied.
func writeCopying(w *responseWriter, p []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}

	n, err := pass(w, p)
	if w.copies {
		copyResponseBody(w, p[:n])
	}

	return n, err
}

// pass writes without copying.
func pass(w *responseWriter, p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	w.flushed = false
	if len(p) < w.flushBelow {
		flush(w)
	}

	return n, err
}

func copyResponseBody(w *responseWriter, p []byte) {
	if int64(len(p)) > w.room {
		p = p[:w.room]
		w.truncated = true
		w.copies = false
		w.handlesWrites = w.status == 0
	}
	if w.body == nil {
		// One allocation for a body of known length that comes in many pieces.
		w.body = make([]byte, 0, guessLength(w, len(p)))
	}
	w.body = append(w.body, p...)
	w.room -= int64(len(p))
}

// guessLength returns how much memory to set aside for a body of which written bytes have come.
func guessLength(w *responseWriter, written int) int64 {
	guess := parseLength(w.header)
	if guess > w.room {
		guess = w.room
	}
	if guess > maxGuess {
		guess = maxGuess
	}
	if guess < int64(written) {
		guess = int64(written)
	}

	return guess
}

// parseLength returns the Content-Length in bytes, or -1 when there is none that counts.
func parseLength(header http.Header) int64 {
	length, err := strconv.ParseInt(header.Get("Content-Length"), 10, 64)
	if err != nil {
		return -1
	}

	return length
}

// flush sends what net/http has gathered. A writer that cannot flush is left alone.
func flush(w *responseWriter) {
	w.flushed = true
	// Most writers can flush by themselves, and an assertion costs less than a controller.
	if flusher, ok := w.ResponseWriter.(http.Flusher); ok {
		flusher.Flush()
	} else {
		flushBehind(w)
	}
}

// flushBehind flushes a writer behind the one underneath, if one of them can be flushed.
func flushBehind(w *responseWriter) {
	_ = http.NewResponseController(w.ResponseWriter).Flush()
}

// endResponse sends what is left of a response that is written to its end.
func endResponse(w *responseWriter) {
	if w.status == 0 || w.negotiated || w.flushBelow == always {
		endOtherResponse(w)
	} else {
		flush(w)
	}
}

// endOtherResponse is endResponse where there is no status, or no length, or where the length is lost by a flush. Where the length is not
// known and nothing has been written, net/http would announce a length of 0, which is left to it unless trailers are to follow.
func endOtherResponse(w *responseWriter) {
	if w.status == 0 {
		settle(w)

		return
	}
	if w.implied || w.hijacked || w.negotiated && w.header["Content-Length"] != nil {
		return
	}
	if w.status == http.StatusNotModified && !w.negotiated || hasTrailers(w.ResponseWriter.Header()) {
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
	if int64(len(w.body)) > limit {
		return w.body[:limit:limit], true
	}

	return w.body, w.truncated
}

// settle gives a response whose handler wrote no status the one it gets from net/http: 200, or 101 on a connection that was taken over.
func settle(w *responseWriter) {
	w.header = w.ResponseWriter.Header().Clone()
	w.implied = true
	w.flushBelow = always
	w.status = http.StatusOK
	if w.hijacked {
		w.status = http.StatusSwitchingProtocols
	}
}

// errRefused is what a handler gets that goes on writing a response which was refused.
var errRefused = errors.New("the response was refused, because its record was not accepted")

// heldWriter keeps a response from the client until its record is complete and accepted. The bytes it holds are those of the record. What
// comes then is passed on.
//
// The writer underneath is embedded, so that the interpreter has no part in calls of Header.
type heldWriter struct {
	http.ResponseWriter
	w *responseWriter
	// limit is how many bytes of the body are held before the record is complete.
	limit int64
	// max is how many bytes of the body the response may have; with more it is refused.
	max int64
	// accept asks for the record to be delivered. It returns false when the response must not be served.
	accept func() bool
	// before are the headers that stood when the handler was called: a refused response keeps no others.
	before http.Header

	// written is how many bytes of the body have come while it was held.
	written int64
	// passes says that the response is not held any more.
	passes bool
	// refused says that the client has got an error in place of the response, and after are the headers that stood then.
	refused bool
	after   http.Header
}

// WriteHeader implements http.ResponseWriter. The record may be complete without a body: then the response is released at once.
func (h *heldWriter) WriteHeader(status int) {
	w := h.w
	if status < 200 || w.status != 0 || h.passes {
		holdOtherHeader(h, status)

		return
	}

	w.status = status
	w.header = w.ResponseWriter.Header().Clone()
	if h.max < unlimited {
		holdMeasured(h)
	} else if h.limit == 0 || w.bodiless {
		releaseHeader(h)
	}
}

// Write implements http.ResponseWriter.
func (h *heldWriter) Write(p []byte) (n int, err error) {
	w := h.w
	if !h.passes || w.handlesWrites {
		return writeHeld(h, p)
	}

	// This is pass, without the call.
	n, err = w.ResponseWriter.Write(p)
	w.flushed = false
	if len(p) < w.flushBelow {
		flush(w)
	}

	return n, err
}

// Hijack implements http.Hijacker. The response is not held any more: an upgrade is served as it comes.
func (h *heldWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	if h.refused {
		return nil, nil, http.ErrNotSupported
	}

	conn, buffered, err := h.w.Hijack()
	h.passes = h.passes || err == nil

	return conn, buffered, err
}

// holdOtherHeader is WriteHeader for a status that is informational, or not the first, or that comes after an upgrade. An informational
// one is dropped while the response is held.
func holdOtherHeader(h *heldWriter, status int) {
	if h.refused || h.w.status != 0 {
		return
	}
	// An upgrade is served as it comes.
	h.passes = h.passes || status == http.StatusSwitchingProtocols
	if h.passes {
		h.w.WriteHeader(status)
	}
}

// holdMeasured holds back the header of a response whose size matters.
func holdMeasured(h *heldWriter) {
	if exceeds(h.w, h.max) {
		refuse(h)
	} else if h.limit == 0 && h.max > 0 || h.w.bodiless {
		releaseHeader(h)
	}
}

// exceeds says that the announced body is larger than size.
func exceeds(w *responseWriter, size int64) bool {
	return !w.bodiless && w.status != http.StatusNotModified && parseLength(w.header) > size
}

// writeHeld is Write of a response that is held, or was refused, or whose body is copied.
func writeHeld(h *heldWriter, p []byte) (int, error) {
	if h.w.status == 0 && !h.passes {
		h.WriteHeader(http.StatusOK)
	}
	if h.refused {
		return 0, errRefused
	}
	if h.passes {
		return writeCopying(h.w, p)
	}

	held := h.w.body
	h.written += int64(len(p))
	if h.w.copies {
		copyResponseBody(h.w, p)
	}
	if h.written <= h.limit {
		return len(p), nil
	}

	if h.written > h.max {
		refuse(h)

		return 0, errRefused
	}
	if err := release(h, held); err != nil {
		return 0, err
	}

	return pass(h.w, p)
}

// endHold ends the holding of a response that is written to its end, or for which nothing was written. What a handler has set that went
// on after the refusal is taken away: net/http might make trailers of it.
func endHold(h *heldWriter) {
	if h.refused {
		takeTrailers(h.w.ResponseWriter.Header(), h.after)

		return
	}
	if h.w.status == 0 {
		settle(h.w)
	}
	_ = release(h, h.w.body)
}

// release sends what was held as it would have been sent, if its record is accepted: headers that were set after the status are trailers,
// and net/http takes them for that only when they come after it.
func release(h *heldWriter, held []byte) error {
	w := h.w
	var trailers http.Header
	if header := w.ResponseWriter.Header(); !w.implied && !reflect.DeepEqual(header, w.header) {
		trailers = takeTrailers(header, w.header)
	}

	releaseHeader(h)
	if h.refused {
		return errRefused
	}

	var err error
	if len(held) > 0 {
		_, err = pass(w, held)
	}
	if trailers != nil {
		putTrailers(w.ResponseWriter, trailers)
	}

	return err
}

// releaseHeader sends the status and the header of a response whose record is accepted, and refuses any other. One that net/http
// answers for is left to it.
func releaseHeader(h *heldWriter) {
	if !h.accept() {
		refuse(h)

		return
	}

	h.passes = true
	w := h.w
	if w.implied {
		return
	}
	w.handlesWrites = w.copies
	w.ResponseWriter.WriteHeader(w.status)
	if w.header["Content-Length"] == nil {
		startStream(w)
	}
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

// refuse serves an error in place of a held response, with nothing of that response in it.
func refuse(h *heldWriter) {
	h.refused = true

	w := h.w
	header := w.ResponseWriter.Header()
	for name := range header {
		delete(header, name)
	}
	for name, values := range h.before {
		header[name] = values
	}

	// What is recorded of the response from here on is what the client got.
	w.status = http.StatusInternalServerError
	w.body = serveError(w.ResponseWriter, w.status)
	w.truncated = false
	w.copies = false
	w.header = header.Clone()
	// Asked for again, as by putTrailers.
	h.after = w.ResponseWriter.Header().Clone()
	if !w.negotiated {
		flush(w)
	}
	w.flushed = true
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
	_ http.ResponseWriter = (*heldWriter)(nil)
	_ http.Hijacker       = (*heldWriter)(nil)
)
