package tap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/assert/yaml"
	"github.com/stretchr/testify/require"
)

func readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	require.NoError(t, err)

	return string(text)
}

// readmeSection returns what stands in the README under a heading of the second level.
func readmeSection(t *testing.T, heading string) string {
	t.Helper()
	_, section, found := strings.Cut(readFile(t, "README.md"), "\n## "+heading+"\n")
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

// unbroken returns what stands under a heading, without the breaks of long lines.
func unbroken(t *testing.T, heading string) string {
	t.Helper()

	return strings.Join(strings.Fields(readmeSection(t, heading)), " ")
}

func TestReadme_NamesTheLimitsOfDelivery(t *testing.T) {
	text := unbroken(t, "Options")

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
	_, example, found := strings.Cut(readFile(t, "README.md"), "```json\n")
	require.True(t, found, "there is no record")
	example, _, _ = strings.Cut(example, "```")

	decoder := json.NewDecoder(strings.NewReader(example))
	decoder.DisallowUnknownFields()
	var record Record
	require.NoError(t, decoder.Decode(&record))

	var compact bytes.Buffer
	require.NoError(t, json.Compact(&compact, []byte(example)))
	assert.Equal(t, compact.String(), string(encode(&record)), "with the fields in the same order")
	assert.Len(t, record.ID, len(randomIDs()[:idLength]))
}

func TestReadme_NamesWhatSizesDependOn(t *testing.T) {
	text := unbroken(t, "Sizing")

	for _, size := range []string{
		fmt.Sprintf("(%d + %d)", defaultMaxRecordBodySize, defaultMaxRecordBodySize),
		fmt.Sprintf("%d POSTs of at most %d MiB are under way", batchSlots, maxBatchBytes>>20),
		fmt.Sprintf("with `maxPending` at most %d, with batches at most %d. Up to %d are kept for %s", pendingSlots, batchSlots, maxIdleConnections, idleTimeout),
		fmt.Sprintf("With `maxPending` at most %d records are sent in the time of one answer", pendingSlots),
		fmt.Sprintf("With batches at most %d times `maxBatchSize` records are, or %d MiB", batchSlots, batchSlots*maxBatchBytes>>20),
	} {
		assert.Contains(t, text, size)
	}
}

// diagramLine is what a line of a diagram may be, of all that Mermaid knows: it takes some words and characters for its own.
var diagramLine = regexp.MustCompile(`^    (?:participant \w+|Note over \w+: [\w .]+|(\w+--?>>\w+: [\w ]+))$`)

// readmeSteps returns the arrows of the diagrams, from top to bottom.
func readmeSteps(t *testing.T) [][]string {
	t.Helper()
	var diagrams [][]string
	for _, match := range regexp.MustCompile("(?s)```mermaid\nsequenceDiagram\n(.*?)\n```").FindAllStringSubmatch(readmeSection(t, "What it does"), -1) {
		var steps []string
		for _, line := range strings.Split(match[1], "\n") {
			parts := diagramLine.FindStringSubmatch(line)
			require.NotNil(t, parts, "%q", line)
			require.NotContains(t, strings.Fields(line), "end", "the word closes a block")
			if parts[1] != "" {
				steps = append(steps, parts[1])
			}
		}
		diagrams = append(diagrams, steps)
	}

	return diagrams
}

// await waits until a channel is closed.
func await(t *testing.T, what <-chan struct{}) {
	t.Helper()
	select {
	case <-what:
	case <-time.After(patience):
		assert.Fail(t, "what is waited for does not come")
	}
}

// stepsOfAnExchange returns what happens until the handler has returned and the client has its response.
//
// With reject off the tap does several things at a time. Then the endpoint and the backend wait for what the README shows before
// their own steps: it would not come if the tap, too, waited for them.
func stepsOfAnExchange(t *testing.T, reject bool) []string {
	t.Helper()
	var mu sync.Mutex
	var steps []string
	step := func(arrow string) {
		mu.Lock()
		defer mu.Unlock()
		steps = append(steps, arrow)
	}
	requestRecorded, requestAccepted := make(chan struct{}), make(chan struct{})
	served, returned := make(chan struct{}), make(chan struct{})

	endpoint := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		kind := req.Header.Get("X-Tap-Record")
		if kind == kindResponse {
			await(t, requestAccepted)
		}
		step("Tap->>Endpoint: " + kind + " record")
		if kind == kindRequest {
			close(requestRecorded)
			if !reject {
				await(t, served)
			}
			defer close(requestAccepted)
		}
		step("Endpoint-->>Tap: accepted")
	}))
	defer endpoint.Close()
	kind := &RecordConfig{Service: []string{endpoint.URL}, RejectOnRecordError: reject}
	handler := newHandler(t, &Config{Request: kind, Response: kind}, func(rw http.ResponseWriter, _ *http.Request) {
		await(t, requestRecorded)
		step("Tap->>Backend: request")
		step("Backend-->>Tap: response")
		rw.Header().Set("Content-Length", "5")
		_, _ = io.WriteString(rw, "hello")
	})
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		defer close(returned)
		handler.ServeHTTP(rw, req)
	}))
	defer server.Close()

	step("Client->>Tap: request")
	resp, err := server.Client().Get(server.URL)
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	resp.Body.Close()
	step("Tap-->>Client: response")
	close(served)
	await(t, returned)

	mu.Lock()
	defer mu.Unlock()

	return append([]string(nil), steps...)
}

func TestReadme_ShowsTheStepsOfAnExchange(t *testing.T) {
	diagrams := readmeSteps(t)
	require.Len(t, diagrams, 3, "this tap with reject off and on, and the native one")

	assert.Equal(t, stepsOfAnExchange(t, false), diagrams[0])
	assert.Equal(t, stepsOfAnExchange(t, true), diagrams[1])
}

// serveSomeMetrics returns the metrics of a process with a tap.
func serveSomeMetrics(t *testing.T) string {
	t.Helper()
	newHandler(t, &Config{Exchange: &RecordConfig{Service: []string{"http://endpoint"}}}, discard)
	answer := httptest.NewRecorder()
	serveMetrics(answer)

	return answer.Body.String()
}

func TestReadme_NamesNoMetricThatIsNotThere(t *testing.T) {
	metrics := serveSomeMetrics(t)

	named := regexp.MustCompile(`\btap_[a-z_]+`).FindAllString(readFile(t, "README.md"), -1)
	require.NotEmpty(t, named)
	for _, name := range named {
		assert.Regexp(t, `(?m)^(# TYPE )?`+name+`[ {]`, metrics)
	}
}

// Blocks of YAML are Traefik's, and testdata/traefik builds what is in them. This one is Prometheus's: so it is written yml.
func TestReadme_AlertsOnWhatTheMetricsSay(t *testing.T) {
	_, text, found := strings.Cut(readmeSection(t, "Metrics and log"), "```yml\n")
	require.True(t, found, "there are no rules")
	text, _, _ = strings.Cut(text, "```")
	var rules struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr string
				For         string
				Annotations struct{ Summary string }
			}
		}
	}
	require.NoError(t, yaml.Unmarshal([]byte(text), &rules))
	require.Len(t, rules.Groups, 1)
	metrics := serveSomeMetrics(t)

	alertsOn := ""
	for _, rule := range rules.Groups[0].Rules {
		assert.NotEmpty(t, rule.Alert)
		assert.NotEmpty(t, rule.Annotations.Summary, rule.Alert)
		assert.Equal(t, strings.Count(rule.Expr, "("), strings.Count(rule.Expr, ")"), rule.Alert)
		alertsOn += rule.Expr + "\n"

		labels := regexp.MustCompile(`by \(([^)]*)\)`).FindStringSubmatch(rule.Expr)
		if labels == nil {
			labels = []string{"", ""}
			assert.NotContains(t, rule.Annotations.Summary, "$labels.middleware", rule.Alert)
		}
		for _, label := range strings.FieldsFunc(labels[1], func(r rune) bool { return r == ',' || r == ' ' }) {
			assert.Contains(t, metrics, label+`="`, rule.Alert)
		}
		for _, label := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(rule.Annotations.Summary, -1) {
			// Prometheus adds the instance.
			assert.Contains(t, labels[1]+"instance", label[1], rule.Alert)
		}
		for _, matched := range regexp.MustCompile(`outcome=~?"([^"]*)"`).FindAllStringSubmatch(rule.Expr, -1) {
			for _, outcome := range strings.Split(matched[1], "|") {
				assert.Contains(t, metrics, `outcome="`+outcome+`"`, rule.Alert)
			}
		}
	}
	for _, outcome := range []string{outcomeFailed, outcomeRejected, outcomeDropped} {
		assert.Contains(t, alertsOn, outcome, "nobody hears of it")
	}
}

func TestReadme_LinksToWhatIsThere(t *testing.T) {
	text := readFile(t, "README.md")
	anchors := map[string]bool{}
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		anchor := regexp.MustCompile(`[^\w -]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		anchors["#"+strings.ReplaceAll(anchor, " ", "-")] = true
	}

	links := regexp.MustCompile(`\]\(([^)]+)\)`).FindAllStringSubmatch(text, -1)
	require.NotEmpty(t, links)
	for _, link := range links {
		switch target := link[1]; {
		case strings.HasPrefix(target, "#"):
			assert.True(t, anchors[target], target)
		case !strings.HasPrefix(target, "https://"):
			_, err := os.Stat(target)
			assert.NoError(t, err)
		}
	}
}

func TestReadme_NamesTargetsOfTheMakefile(t *testing.T) {
	makefile := readFile(t, "Makefile")

	named := 0
	for _, name := range namesOf(readmeTable(t, "Contributing")) {
		if target, isTarget := strings.CutPrefix(name, "make "); isTarget {
			assert.Contains(t, makefile, "\n"+target+":")
			named++
		}
	}
	assert.NotZero(t, named)
}

// What the release gets for its notes is what the workflow gives it.
func TestChangelog_HasNotesOnTheVersionThatUsersInstall(t *testing.T) {
	notes := func(tag string) (string, error) {
		text, err := exec.Command("sh", filepath.Join(".ci", "release-notes"), tag).Output()

		return string(text), err
	}
	newest := regexp.MustCompile(`(?m)^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$`).FindStringSubmatch(readFile(t, "CHANGELOG.md"))
	require.NotNil(t, newest, "there is no version")

	documents := []string{"README.md"}
	require.NoError(t, filepath.WalkDir("examples", func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			documents = append(documents, name)
		}

		return err
	}))
	installed := 0
	for _, document := range documents {
		for _, version := range regexp.MustCompile(`\bversion *[:=] *"?(v\d\S*?)"?\s`).FindAllStringSubmatch(readFile(t, document), -1) {
			assert.Equal(t, "v"+newest[1], version[1], document)
			installed++
		}
	}
	require.NotZero(t, installed)

	text, err := notes("v" + newest[1])
	require.NoError(t, err)
	assert.Contains(t, text, "### Added")
	assert.NotContains(t, text, "\n## ")
	for _, tag := range []string{"v99.0.0", "v0.1", "v"} {
		_, err := notes(tag)
		assert.Error(t, err, tag)
	}
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
