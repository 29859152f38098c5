package tap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// readmeSection returns what stands in the README under a heading of the second level.
func readmeSection(t *testing.T, heading string) string {
	t.Helper()
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## "+heading+"\n")
	require.True(t, found, "the README has no section %q", heading)
	section, _, _ = strings.Cut(section, "\n## ")

	return section
}

// readmeRow is a row of a table: a name in backticks, and the other cells.
type readmeRow struct {
	name  string
	cells []string
}

// readmeTable returns the first table in a section.
func readmeTable(t *testing.T, heading string) []readmeRow {
	t.Helper()
	_, table, found := strings.Cut(readmeSection(t, heading), "\n|---")
	require.True(t, found, "there is no table under %q", heading)
	table, _, _ = strings.Cut(table, "\n\n")

	var rows []readmeRow
	for _, line := range strings.Split(table, "\n")[1:] {
		cells := strings.Split(strings.Trim(line, "| "), " | ")
		rows = append(rows, readmeRow{name: strings.Trim(cells[0], "`"), cells: cells[1:]})
	}

	return rows
}

func namesOf(rows []readmeRow) []string {
	var names []string
	for _, row := range rows {
		names = append(names, row.name)
	}

	return names
}

// leaves returns the names of a struct's fields as the user writes or reads them; in place of a struct of this package, those of its
// fields, behind its own name and a dot.
func leaves(of reflect.Type, prefix string) []string {
	var names []string
	for i := 0; i < of.NumField(); i++ {
		field := of.Field(i)
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}

		inner := field.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct && inner.PkgPath() == of.PkgPath() {
			names = append(names, leaves(inner, prefix+name+".")...)
		} else {
			names = append(names, prefix+name)
		}
	}

	return names
}

func TestReadme_NamesEveryOptionAndNoOther(t *testing.T) {
	// The kinds have the same options, so those stand in the README once.
	named := map[string]bool{kindRequest: true, kindResponse: true, kindExchange: true}
	options := []string{kindRequest, kindResponse, kindExchange}
	for _, option := range leaves(reflect.TypeOf(Config{}), "") {
		if kind, rest, nested := strings.Cut(option, "."); nested && named[kind] {
			option = "<kind>." + rest
		}
		if !named[option] {
			named[option] = true
			options = append(options, option)
		}
	}
	require.Contains(t, options, "<kind>.tls.rootCAs", "the options are not found")

	assert.ElementsMatch(t, options, namesOf(readmeTable(t, "Options")))
}

func TestReadme_NamesEveryFieldOfARecordAndNoOther(t *testing.T) {
	fields := leaves(reflect.TypeOf(Record{}), "")
	require.Contains(t, fields, "response.status", "the fields are not found")

	assert.ElementsMatch(t, fields, namesOf(readmeTable(t, "The record")))
}

func TestReadme_NamesTheDefaults(t *testing.T) {
	k, err := newKind(kindRequest, &RecordConfig{Service: []string{"http://endpoint"}, RecordBody: true, Retry: &RetryConfig{}})
	require.NoError(t, err)

	defaults := map[string]string{
		"redactHeaders":                strings.ReplaceAll(defaultRedactHeaders, ",", ", "),
		"<kind>.path":                  strings.TrimPrefix(k.settings.targets[0].url, "http://endpoint"),
		"<kind>.timeout":               k.settings.timeout.String(),
		"<kind>.retry.attempts":        strconv.Itoa(k.settings.attempts),
		"<kind>.retry.initialInterval": k.settings.interval.String(),
		"<kind>.maxBatchSize":          strconv.Itoa(k.settings.maxBatch),
		"<kind>.maxPending":            strconv.Itoa(k.settings.maxPending),
		"<kind>.maxRecordBodySize":     strconv.FormatInt(k.limit, 10),
		"<kind>.rejectOnRecordError":   strconv.FormatBool(k.reject),
	}
	for _, row := range readmeTable(t, "Options") {
		if byDefault, ok := defaults[row.name]; ok {
			assert.Equal(t, "`"+byDefault+"`", row.cells[len(row.cells)-1], row.name)
			delete(defaults, row.name)
		}
	}
	assert.Empty(t, defaults, "these have no row")
}

func TestReadme_NamesTheLimitsOfDelivery(t *testing.T) {
	// Lines are broken wherever they are long.
	text := strings.Join(strings.Fields(readmeSection(t, "Options")), " ")

	for _, limit := range []string{
		"passed over for a pause that grows to " + longestPause.String(),
		"dialled at most once in a pause that grows to " + longestDialPause.String(),
		fmt.Sprintf("while %d POSTs to the endpoint are under way", batchSlots),
		fmt.Sprintf("at most %d MiB", maxBatchBytes>>20),
		fmt.Sprintf("Up to %d POSTs are under way at a time, or %d with batches", pendingSlots, batchSlots),
	} {
		assert.Contains(t, text, limit)
	}
	require.Equal(t, 5, cutsUntilDown, "the README says five")
}

func TestReadme_ShowsARecordAsItIs(t *testing.T) {
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	_, example, found := strings.Cut(string(text), "```json\n")
	require.True(t, found, "there is no record")
	example, _, _ = strings.Cut(example, "```")

	decoder := json.NewDecoder(strings.NewReader(example))
	decoder.DisallowUnknownFields()
	var record Record
	require.NoError(t, decoder.Decode(&record))

	var compact bytes.Buffer
	require.NoError(t, json.Compact(&compact, []byte(example)))
	assert.Equal(t, compact.String(), string(encode(&record)), "with the fields in the same order")
	assert.Len(t, record.ID, len(randomID()))
}

func TestReadme_NamesEveryMetricAndNoOther(t *testing.T) {
	answer := httptest.NewRecorder()
	serveMetrics(answer)

	var metrics []string
	for _, match := range regexp.MustCompile(`(?m)^# TYPE (\S+) `).FindAllStringSubmatch(answer.Body.String(), -1) {
		metrics = append(metrics, match[1])
	}
	require.NotEmpty(t, metrics)
	assert.ElementsMatch(t, metrics, namesOf(readmeTable(t, "Metrics and log")))
}
