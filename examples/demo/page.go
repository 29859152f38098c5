package main

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"charm.land/lipgloss/v2"
	"charm.land/lipgloss/v2/table"
	"github.com/charmbracelet/x/ansi"
	"github.com/charmbracelet/x/term"
	"golang.org/x/text/language"
	"golang.org/x/text/message"
)

const (
	// widest is how wide the page is where there is room, in columns, and narrowest where the two sides still stand next to each other.
	widest, narrowest = 110, 84
	// A body of more than bodyRoom characters is cut to bodyStart.
	bodyRoom, bodyStart = 90, 24
)

// english writes numbers with commas.
var english = message.NewPrinter(language.English)

var (
	strong = lipgloss.NewStyle().Bold(true)
	faint  = lipgloss.NewStyle().Faint(true)
	named  = lipgloss.NewStyle().Foreground(lipgloss.Cyan)
	good   = lipgloss.NewStyle().Foreground(lipgloss.Green)
	bad    = lipgloss.NewStyle().Foreground(lipgloss.Red).Bold(true)
	hidden = lipgloss.NewStyle().Foreground(lipgloss.Yellow)
)

// page is where the demo prints.
type page struct {
	out   io.Writer
	width int
}

// widthOf returns how wide a page on a file may be.
func widthOf(file *os.File) int {
	width, _, err := term.GetSize(file.Fd())
	if err != nil {
		return widest
	}

	return min(width, widest)
}

func (p page) print(text string) {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	_, _ = fmt.Fprintln(p.out, strings.Join(lines, "\n"))
}

func (p page) title() {
	p.print(strong.Render("Tap") + " copies what passes a Traefik router into records. What a client sees, next to what the endpoint gets:")
	p.print(faint.Render("Interpreted as in Traefik, set up by examples/file-provider/dynamic.yml. Bodies, base64 in JSON, are decoded."))
}

func (p page) end() {
	p.print("\n" + good.Render("✓ All was as promised.") + " " + faint.Render("To try it with curl or a browser: go run . -serve"))
}

// exchange shows both sides of an exchange, and what was promised about it.
func (p page) exchange(number int, x exchange, o *outcome, promises []promise) {
	p.heading(fmt.Sprintf("%d  %s", number, x.title), x.middleware)
	p.sides(clientSide(o), endpointSide(o))
	if number == 1 && len(o.records) > 0 {
		p.aside("As POSTed", string(o.records[len(o.records)-1].payload))
	}
	for _, line := range o.log {
		p.aside("Traefik's log", line)
	}
	p.promises(promises)
}

// aside shows a text that belongs to both sides.
func (p page) aside(name, text string) {
	name += "  "
	text = ansi.Hardwrap(text, p.width-lipgloss.Width(name), false)
	p.print(lipgloss.JoinHorizontal(lipgloss.Top, named.Render(name), text))
}

// heading starts a part of the page.
func (p page) heading(title, remark string) {
	rule := max(3, p.width-lipgloss.Width(title)-lipgloss.Width(remark)-2)
	p.print("\n" + strong.Render(title) + " " + faint.Render(strings.Repeat("─", rule)) + " " + named.Render(remark))
}

// sides puts two texts next to each other, or below each other on a narrow page.
func (p page) sides(left, right string) {
	if p.width < narrowest {
		p.print(lipgloss.NewStyle().Width(p.width).Render(left + "\n\n" + right))
		return
	}

	leftWidth := p.width * 2 / 5
	left = lipgloss.NewStyle().Width(leftWidth).PaddingRight(2).Render(left)
	right = lipgloss.NewStyle().Width(p.width - leftWidth - 3).Render(right)
	line := strings.TrimSuffix(strings.Repeat(faint.Render("│")+"  \n", max(lipgloss.Height(left), lipgloss.Height(right))), "\n")
	p.print(lipgloss.JoinHorizontal(lipgloss.Top, left, line, right))
}

func (p page) promises(promises []promise) {
	for _, promised := range promises {
		if len(promised.faults) == 0 {
			p.print(good.Render("✓") + " " + promised.text)
			continue
		}
		p.print(bad.Render("✗ " + promised.text))
		for _, fault := range promised.faults {
			p.print(bad.Render("    " + fault))
		}
	}
}

// clientSide is what a client sent and got.
func clientSide(o *outcome) string {
	lines := []string{strong.Render(o.method + " " + o.path)}
	lines = append(lines, headerLines(o.header)...)
	lines = append(lines, bodyLines(o.sent)...)
	if o.response == nil {
		return strings.Join(lines, "\n")
	}

	lines = append(lines, "", strong.Render(o.response.Status)+faint.Render(" in "+milliseconds(o.complete)))
	lines = append(lines, headerLines(o.response.Header)...)
	if len(o.onTheWay) == 0 {
		lines = append(lines, bodyLines(o.body)...)
	}
	for i, onTheWay := range o.onTheWay {
		lines = append(lines, "data: "+events[i]+faint.Render("  "+milliseconds(onTheWay)+" later"))
	}
	if o.said != "" {
		lines = append(lines, "→ "+o.said, "← "+o.heard)
	}

	return strings.Join(lines, "\n")
}

// endpointSide is what an endpoint got.
func endpointSide(o *outcome) string {
	if len(o.records) == 0 {
		return faint.Render("nothing: it is down")
	}
	var records []string
	for _, r := range o.records {
		records = append(records, r.String())
	}

	return strings.Join(records, "\n")
}

// String shows a record with its bodies decoded.
func (r record) String() string {
	lines := []string{named.Render(r.Kind+" record") + faint.Render("  id "+r.ID[:min(8, len(r.ID))]+"…  POST "+r.path)}
	if request := r.Request; request != nil {
		lines = append(lines, "  "+strong.Render(request.Method+" "+request.URL))
		lines = append(lines, indent(headerLines(request.Headers))...)
		lines = append(lines, indent(bodyLines(request.Body))...)
		lines = append(lines, cutLine(request.BodyTruncated)...)
	}
	if response := r.Response; response != nil {
		lines = append(lines, "  "+strong.Render(fmt.Sprintf("%d %s", response.Status, http.StatusText(response.Status)))+
			faint.Render(" in "+milliseconds(response.Duration)))
		lines = append(lines, indent(headerLines(response.Headers))...)
		lines = append(lines, indent(bodyLines(response.Body))...)
		lines = append(lines, cutLine(response.BodyTruncated)...)
	}

	return strings.Join(lines, "\n")
}

// telling are the headers that are shown: the others are the same everywhere.
var telling = []string{"Authorization", "Cookie", "Content-Type", "Content-Length", "Location", "Set-Cookie", "Upgrade"}

func headerLines(header http.Header) []string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(header)) {
		if !slices.Contains(telling, name) {
			continue
		}
		for _, value := range header[name] {
			if value == "REDACTED" {
				value = hidden.Render(value)
			}
			lines = append(lines, faint.Render(name+": ")+value)
		}
	}

	return lines
}

// bodyLines shows a body where it is text, cut where it is long.
func bodyLines(body []byte) []string {
	if len(body) == 0 {
		return nil
	}
	size := faint.Render(english.Sprintf("%d bytes", len(body)))
	if !utf8.Valid(body) {
		return []string{size}
	}

	shown := strings.ReplaceAll(strings.TrimRight(string(body), "\n"), "\n", "↵")
	if utf8.RuneCountInString(shown) <= bodyRoom {
		return []string{shown}
	}

	return []string{string([]rune(shown)[:bodyStart]) + "… " + size}
}

func cutLine(truncated bool) []string {
	if !truncated {
		return nil
	}

	return []string{"  " + hidden.Render("bodyTruncated: true")}
}

func indent(lines []string) []string {
	for i := range lines {
		lines[i] = "  " + lines[i]
	}

	return lines
}

// costs shows what the exchanges cost.
func (p page) costs(costs []cost, how string) {
	p.heading("What it costs the client", how)

	shown := table.New().Border(lipgloss.HiddenBorder()).BorderTop(false).BorderBottom(false).BorderLeft(false).BorderRight(false).
		BorderHeader(false).
		Headers("", faint.Render("without the tap"), faint.Render("with it"),
			faint.Render(fmt.Sprintf("endpoint takes %d ms", slowness.Milliseconds())), "").
		StyleFunc(func(_, column int) lipgloss.Style {
			style := lipgloss.NewStyle().PaddingRight(2)
			if column > 0 && column < 4 {
				style = style.Align(lipgloss.Right)
			}

			return style
		})
	for _, c := range costs {
		if c.note != "" {
			c.note = faint.Render(c.note)
		}
		shown.Row(c.what, milliseconds(c.without), milliseconds(c.with), milliseconds(c.slow), c.note)
	}
	p.print(shown.String())
	p.print(faint.Render("Each on a connection at rest: the next request on it waits until the records are delivered, unless maxPending is set."))
}

func milliseconds(duration time.Duration) string {
	return fmt.Sprintf("%.2f ms", float64(duration)/float64(time.Millisecond))
}
