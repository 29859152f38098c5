package e2e_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/traefik-tap/tap"
)

// faults compares the records of a receiver with the exchanges that were made, and says in a line each what is wrong: an exchange without
// exactly one record of each kind, a record that tells something else, a record of nothing that was made. Without faults it returns none.
func faults(made []exchange, kinds []string, records []tap.Record) []string {
	found, wrong := byURL(records)
	for _, x := range made {
		exchanges := found[x.url]
		delete(found, x.url)
		switch len(exchanges) {
		case 0:
			wrong = append(wrong, x.url+": not recorded")
		case 1:
			wrong = append(wrong, x.faults(kinds, exchanges[0])...)
		default:
			wrong = append(wrong, fmt.Sprintf("%s: recorded under %d ids", x.url, len(exchanges)))
		}
	}
	for url := range found {
		wrong = append(wrong, url+": recorded, and never made")
	}

	return wrong
}

// byURL gathers the records of each id, and files them under the URL that one of them tells.
func byURL(records []tap.Record) (found map[string][][]tap.Record, wrong []string) {
	byID := map[string][]tap.Record{}
	for _, record := range records {
		byID[record.ID] = append(byID[record.ID], record)
	}

	found = map[string][][]tap.Record{}
	for id, ofOne := range byID {
		url := urlOf(ofOne)
		if url == "" {
			wrong = append(wrong, id+": no record with a URL")

			continue
		}
		found[url] = append(found[url], ofOne)
	}

	return found, wrong
}

// urlOf returns the URL of an exchange. Response records may have none.
func urlOf(records []tap.Record) string {
	for _, record := range records {
		if record.Request != nil {
			return record.Request.URL
		}
	}

	return ""
}

func (x exchange) faults(kinds []string, records []tap.Record) []string {
	var wrong []string
	count := map[string]int{}
	for _, record := range records {
		count[record.Kind]++
		if fault := x.fault(record); fault != "" {
			wrong = append(wrong, fmt.Sprintf("%s: the %s record %s", x.url, record.Kind, fault))
		}
	}
	for _, kind := range kinds {
		if count[kind] != 1 {
			wrong = append(wrong, fmt.Sprintf("%s: %d %s records", x.url, count[kind], kind))
		}
		delete(count, kind)
	}
	for kind := range count {
		wrong = append(wrong, fmt.Sprintf("%s: a record of kind %q", x.url, kind))
	}

	return wrong
}

func (x exchange) fault(record tap.Record) string {
	if request := record.Request; request != nil {
		switch {
		case request.Method != x.method || request.URL != x.url:
			return "tells another request"
		case record.Kind != "response" && !bytes.Equal(request.Body, x.requestBody):
			return "has another request body"
		}
	}
	if response := record.Response; response != nil {
		switch {
		case response.Status != x.status:
			return fmt.Sprintf("tells status %d, not %d", response.Status, x.status)
		case !bytes.Equal(response.Body, x.responseBody):
			return "has another response body"
		}
	}
	if missing := x.missingHalf(record); missing != "" {
		return "has no " + missing
	}

	return ""
}

func (exchange) missingHalf(record tap.Record) string {
	if record.Request == nil && record.Kind != "response" {
		return "request"
	}
	if record.Response == nil && record.Kind != "request" {
		return "response"
	}

	return ""
}

// distinct returns the records without those that came again: a record whose answer was lost may be sent a second time, with the same id. One
// that came again and differs is an error.
func distinct(t *testing.T, records []tap.Record) []tap.Record {
	t.Helper()
	type key struct{ id, kind string }
	first := map[key]tap.Record{}
	var all []tap.Record
	for _, record := range records {
		k := key{record.ID, record.Kind}
		if earlier, again := first[k]; again {
			assert.Equal(t, earlier, record, "a record came again, and differs")

			continue
		}
		first[k] = record
		all = append(all, record)
	}

	return all
}
