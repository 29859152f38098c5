// Command benchtable reads results of `go test -bench` from its standard input, and prints what the tap costs as tables in Markdown:
//
//	go run ./benchtable [-spread] < ../../bench.out
//
// The results are those of several rounds over all benchmarks. Whatever else a machine does changes from one minute to the next, so
// everything is compared within a round, and a cell is the median of the rounds; with -spread followed by the least and the most.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"slices"
	"strings"

	"golang.org/x/perf/benchfmt"
)

var spread = flag.Bool("spread", false, "print the least and the most of the rounds beside the median")

func main() {
	log.SetFlags(0)
	flag.Parse()
	measured, err := read(os.Stdin)
	if err != nil {
		log.Fatal(err)
	}
	if err := write(os.Stdout, measured); err != nil {
		log.Fatal(err)
	}
}

// results are what was measured in each round, by the name of the benchmark.
type results struct {
	// names are in the order of the first round.
	names  []string
	rounds map[string][]*benchfmt.Result
}

// read returns all results. It is an error when there are none, or when a benchmark has failed.
func read(in io.Reader) (*results, error) {
	measured := &results{rounds: map[string][]*benchfmt.Result{}}
	reader := benchfmt.NewReader(in, "standard input")
	for reader.Scan() {
		switch result := reader.Result().(type) {
		case *benchfmt.Result:
			name := nameOf(result)
			if measured.rounds[name] == nil {
				measured.names = append(measured.names, name)
			}
			measured.rounds[name] = append(measured.rounds[name], result.Clone())
		case *benchfmt.SyntaxError:
			return nil, result
		}
	}
	if err := reader.Err(); err != nil {
		return nil, err
	}
	if len(measured.names) == 0 {
		return nil, errors.New("no results on standard input")
	}

	return measured, nil
}

// nameOf returns the name of a benchmark without the number of processors.
func nameOf(result *benchfmt.Result) string {
	name, parts := result.Name.Parts()
	text := string(name)
	for _, part := range parts {
		if part[0] == '/' {
			text += string(part)
		}
	}

	return text
}

// The units of testing's results, as benchfmt has them, and those of our own metrics.
const (
	unitAllocations = "allocs/op"
	unitSeconds     = "sec/op"
	unitRate        = "B/s"
	unitMedian      = "p50-sec/op"
	unitRequests    = "req/s"
	unitHeap        = "heap-B/body"
)

// series is one number for each round.
type series []float64

// of returns a metric of a benchmark, empty where it has not run.
func (r *results) of(name, unit string) series {
	var all series
	for _, result := range r.rounds[name] {
		if value, ok := result.Value(unit); ok {
			all = append(all, value)
		}
	}

	return all
}

// with combines two series round by round.
func (s series) with(other series, combine func(a, b float64) float64) series {
	var all series
	for i := range min(len(s), len(other)) {
		all = append(all, combine(s[i], other[i]))
	}

	return all
}

func (s series) over(base series) series {
	return s.with(base, func(a, b float64) float64 { return a / b })
}

func (s series) minus(base series) series {
	return s.with(base, func(a, b float64) float64 { return a - b })
}

// text returns the median times a factor, and what -spread asks for.
func (s series) text(format string, factor float64) string {
	if len(s) == 0 {
		return "-"
	}

	middle := fmt.Sprintf(format, s.median()*factor)
	least, most := fmt.Sprintf(format, slices.Min(s)*factor), fmt.Sprintf(format, slices.Max(s)*factor)
	if !*spread || least == most {
		return middle
	}

	return fmt.Sprintf("%s (%s to %s)", middle, least, most)
}

func (s series) median() float64 {
	sorted := slices.Sorted(slices.Values(s))
	half := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[half]
	}

	return (sorted[half-1] + sorted[half]) / 2
}

// table is a table in Markdown; the first row is its head.
type table struct {
	title string
	rows  [][]string
}

// write prints the tables that there are results for.
func write(out io.Writer, measured *results) error {
	tables := []table{
		records(measured),
		many(measured),
		one(measured, "serial", "One client that sends its next request at once: time added to the median request in us"),
		one(measured, "thinking", "One client that thinks between requests: time added to the median request in us"),
		bodies(measured),
	}
	for _, t := range tables {
		if len(t.rows) == 1 {
			continue
		}
		if _, err := io.WriteString(out, t.text()+"\n"); err != nil {
			return err
		}
	}

	return nil
}

func (t *table) text() string {
	widths := make([]int, len(t.rows[0]))
	for _, row := range t.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], len(cell))
		}
	}

	var text strings.Builder
	fmt.Fprintf(&text, "%s\n\n", t.title)
	for i, row := range t.rows {
		for j, cell := range row {
			fmt.Fprintf(&text, "| %-*s ", widths[j], cell)
		}
		text.WriteString("|\n")
		if i == 0 {
			for _, width := range widths {
				text.WriteString("|" + strings.Repeat("-", width+2))
			}
			text.WriteString("|\n")
		}
	}

	return text.String()
}

// values returns the values that a part of the names has, in their order: those of "body" in X/kind=exchange/body=0.
func (r *results) values(benchmark, key string) []string {
	var all []string
	for _, name := range r.names {
		if value := part(name, key); strings.HasPrefix(name, benchmark+"/") && value != "" && !slices.Contains(all, value) {
			all = append(all, value)
		}
	}

	return all
}

func part(name, key string) string {
	_, rest, _ := strings.Cut(name, "/"+key+"=")
	value, _, _ := strings.Cut(rest, "/")

	return value
}

// records is about the plugin with the delivery stubbed out.
func records(r *results) table {
	t := table{title: "The whole plugin with the delivery stubbed out, limit of bodies 64 kB", rows: [][]string{{
		"records", "bodies", "allocations compiled", "allocations interpreted",
		"us without tap", "us compiled", "us interpreted", "interpreted / compiled",
	}}}
	for _, kind := range r.values("Records", "kind") {
		for _, body := range r.values("Records", "body") {
			name := "Records/kind=" + kind + "/body=" + body + "/engine="
			compiled, interpreted := r.of(name+"compiled", unitSeconds), r.of(name+"interpreted", unitSeconds)
			t.rows = append(t.rows, []string{
				kind, body,
				r.of(name+"compiled", unitAllocations).text("%.0f", 1), r.of(name+"interpreted", unitAllocations).text("%.0f", 1),
				r.of(name+"none", unitSeconds).text("%.1f", 1e6), compiled.text("%.1f", 1e6), interpreted.text("%.1f", 1e6),
				interpreted.over(compiled).text("%.1f", 1),
			})
		}
	}

	return t
}

// The ends of the names of what all is compared with.
const (
	withoutTap = "tap=none/engine=compiled"
	inlineTap  = "tap=inline/engine=compiled"
)

// eachTap calls row with the end of the name of each tap that was measured in a way, and returns the rows. The way is a part of the name.
func eachTap(r *results, benchmark, way string, row func(tap string) []string) [][]string {
	var rows [][]string
	var done []string
	for _, name := range r.names {
		tap := "tap=" + part(name, "tap") + "/engine=" + part(name, "engine")
		if !strings.HasPrefix(name, benchmark+"/") || !strings.Contains(name, way) || tap == withoutTap || slices.Contains(done, tap) {
			continue
		}
		done = append(done, tap)
		rows = append(rows, append([]string{part(name, "tap"), part(name, "engine")}, row(tap)...))
	}

	return rows
}

// many is about many clients at a time.
func many(r *results) table {
	const way = "/load=many/"
	delays := r.values("Traffic", "endpoint")
	head := []string{"50 clients", "engine", "allocations added"}
	for _, delay := range delays {
		head = append(head, "endpoint "+delay+": requests/s", "/ no tap", "/ inline")
	}

	rows := eachTap(r, "Traffic", way, func(tap string) []string {
		first := "Traffic/endpoint=" + delays[0] + way
		cells := []string{r.of(first+tap, unitAllocations).minus(r.of(first+withoutTap, unitAllocations)).text("%.0f", 1)}
		for _, delay := range delays {
			name := "Traffic/endpoint=" + delay + way
			rate := r.of(name+tap, unitRequests)
			cells = append(cells, rate.text("%.0f", 1),
				rate.over(r.of(name+withoutTap, unitRequests)).text("%.2f", 1), rate.over(r.of(name+inlineTap, unitRequests)).text("%.2f", 1))
		}

		return cells
	})

	return table{title: "50 clients on loopback: requests per second", rows: append([][]string{head}, rows...)}
}

// one is about one client at a time.
func one(r *results, load, title string) table {
	way := "/load=" + load + "/"
	delays := r.values("Traffic", "endpoint")
	head := []string{load, "engine", "allocations added"}
	for _, delay := range delays {
		head = append(head, "endpoint "+delay+": us added", "/ inline")
	}

	rows := eachTap(r, "Traffic", way, func(tap string) []string {
		first := "Traffic/endpoint=" + delays[0] + way
		cells := []string{r.of(first+tap, unitAllocations).minus(r.of(first+withoutTap, unitAllocations)).text("%.0f", 1)}
		for _, delay := range delays {
			name := "Traffic/endpoint=" + delay + way
			none := r.of(name+withoutTap, unitMedian)
			added := r.of(name+tap, unitMedian).minus(none)
			cells = append(cells, added.text("%.0f", 1e6), added.over(r.of(name+inlineTap, unitMedian).minus(none)).text("%.2f", 1))
		}

		return cells
	})

	return table{title: title, rows: append([][]string{head}, rows...)}
}

// bodies is about large bodies.
func bodies(r *results) table {
	directions := r.values("Bodies", "body")
	head := []string{"100 MB", "engine"}
	for _, direction := range directions {
		head = append(head, direction+": allocations added", "rate / no tap", "KiB of heap added")
	}

	rows := eachTap(r, "Bodies", "", func(tap string) []string {
		var cells []string
		for _, direction := range directions {
			name := "Bodies/body=" + direction + "/"
			cells = append(cells,
				r.of(name+tap, unitAllocations).minus(r.of(name+withoutTap, unitAllocations)).text("%.0f", 1),
				r.of(name+tap, unitRate).over(r.of(name+withoutTap, unitRate)).text("%.2f", 1),
				r.of(name+tap, unitHeap).minus(r.of(name+withoutTap, unitHeap)).text("%.0f", 1./1024))
		}

		return cells
	})

	return table{title: "Bodies of 100 MB, limit 64 kB: bytes per second, and live heap for each body in flight", rows: append([][]string{head}, rows...)}
}
