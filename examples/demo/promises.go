package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// recordedBytes is how many bytes of a body dynamic.yml lets into a record.
const recordedBytes = 65_536

// promise is something that must be true, and what is wrong with it.
type promise struct {
	text   string
	faults []string
}

// must notes a fault unless ok.
func (p *promise) must(ok bool, fault string, arguments ...any) {
	if !ok {
		p.faults = append(p.faults, fmt.Sprintf(fault, arguments...))
	}
}

func countBroken(promises []promise) int {
	broken := 0
	for _, p := range promises {
		if len(p.faults) > 0 {
			broken++
		}
	}

	return broken
}

// check returns all promises about an exchange, kept and broken.
func (x exchange) check(o *outcome) []promise {
	if o.err != nil {
		return []promise{{text: "The client gets its answer", faults: []string{o.err.Error()}}}
	}
	var promises []promise
	if len(x.records) > 0 {
		promises = append(promises, recordsMatch(x.records, o))
	}

	return append(promises, x.promises(o)...)
}

var idPattern = regexp.MustCompile("^[0-9a-f]{32}$")

// recordsMatch: the records are those that are promised, and say what the client sent and got.
func recordsMatch(kinds []string, o *outcome) promise {
	p := promise{text: "The record says what the client sent and got"}
	if len(kinds) > 1 {
		p.text = "Both records say what the client sent and got, under one id"
	}

	var got []string
	for _, r := range o.records {
		got = append(got, r.Kind)
		r.check(&p, o)
	}
	p.must(slices.Equal(got, kinds), "the endpoint got %q, not %q", got, kinds)

	return p
}

func (r record) check(p *promise, o *outcome) {
	p.must(idPattern.MatchString(r.ID) && r.ID == o.records[0].ID, "%s: id %q", r.Kind, r.ID)
	p.must(r.Time.Equal(o.records[0].Time) && !r.Time.Before(o.started) && !r.Time.After(o.ended), "%s: time %s", r.Kind, r.Time)
	p.must(r.header.Get("X-Tap-Id") == r.ID && r.header.Get("X-Tap-Record") == r.Kind, "%s: X-Tap headers %q", r.Kind, r.header)
	p.must(r.path == "/records/"+r.Kind+"s", "%s: POSTed to %s", r.Kind, r.path)

	p.must((r.Request != nil) == (r.Kind != "response"), "%s: request %v", r.Kind, r.Request)
	if request := r.Request; request != nil {
		p.must(request.Method == o.method && request.URL == o.path, "%s: %s %s", r.Kind, request.Method, request.URL)
		checkBody(p, r.Kind, request.Body, request.BodyTruncated, o.sent)
	}

	p.must((r.Response != nil) == (r.Kind != "request"), "%s: response %v", r.Kind, r.Response)
	if response := r.Response; response != nil {
		p.must(response.Status == o.response.StatusCode, "%s: status %d, not %d", r.Kind, response.Status, o.response.StatusCode)
		p.must(response.Duration > 0 && response.Duration < o.ended.Sub(o.started), "%s: duration %s", r.Kind, response.Duration)
		p.must(!response.Aborted, "%s: aborted", r.Kind)
		checkBody(p, r.Kind, response.Body, response.BodyTruncated, o.body)
	}
}

func checkBody(p *promise, kind string, recorded []byte, truncated bool, body []byte) {
	cut := len(body) > recordedBytes
	if cut {
		body = body[:recordedBytes]
	}
	p.must(bytes.Equal(recorded, body), "%s: %d bytes of body that are not the %d of the client", kind, len(recorded), len(body))
	p.must(truncated == cut, "%s: bodyTruncated %t", kind, truncated)
}

func recordsHide(what string, o *outcome) promise {
	p := promise{text: fmt.Sprintf("No record has %s, which is passed on as it is", what)}
	for _, r := range o.records {
		p.must(!bytes.Contains(r.payload, []byte(token)), "the %s record has it", r.Kind)
	}
	passedOn := o.backend.authorization
	if o.header == nil {
		passedOn = o.response.Header.Get("Set-Cookie")
	}
	p.must(strings.Contains(passedOn, token), "passed on was %q", passedOn)

	return p
}

// eventsComeAtOnce: the backend has not sent an event before the client had the one before.
func eventsComeAtOnce(o *outcome) promise {
	p := promise{text: "Each event was with the client before the next was sent"}
	p.must(len(o.onTheWay) == len(events), "%d of %d events came", len(o.onTheWay), len(events))

	return p
}

func upgradeIsServed(o *outcome) promise {
	p := promise{text: "The upgrade went through, the echo came back, and both sides closed cleanly"}
	p.must(o.response.StatusCode == http.StatusSwitchingProtocols, "the status was %d", o.response.StatusCode)
	p.must(o.heard == o.said, "the echo was %q", o.heard)

	return p
}

func uploadIsWhole(o *outcome) promise {
	sum := sha256.Sum256(o.sent)
	p := promise{text: "The application got all 200,001 bytes, the record has the first 65,536 and says that it was cut"}
	p.must(o.backend.size == int64(len(o.sent)) && o.backend.sum == hex.EncodeToString(sum[:]),
		"the application got %d bytes with SHA-256 %s", o.backend.size, o.backend.sum)
	for _, r := range o.records {
		p.must(r.Request == nil || r.Request.BodyTruncated && len(r.Request.Body) == recordedBytes, "the %s record was not cut", r.Kind)
	}

	return p
}

// nothingIsServed: no record, no service.
func nothingIsServed(o *outcome) promise {
	p := promise{text: "The client got a clean 500, the application was not called, and Traefik's log says why"}
	p.must(o.response.StatusCode == http.StatusInternalServerError, "the status was %d", o.response.StatusCode)
	p.must(o.response.ContentLength == int64(len(o.body)), "the length was %d", o.response.ContentLength)
	p.must(o.backend.calls == 0, "the application was called %d times", o.backend.calls)
	p.must(len(o.log) == 1 && strings.Contains(o.log[0], "Unable to send the request record"), "the log was %q", o.log)

	return p
}
