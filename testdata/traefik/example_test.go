package traefik_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"
)

// example is a file that shows a user what to write, or a fenced block of one.
type example struct {
	// name is that of the file, below the root.
	name string
	// extension is that of the file, or of the language of the block.
	extension string
	text      string
	// siblings are the examples of the same folder, this one not included.
	siblings []example
}

// contents is what the tests look at in an example.
type contents struct {
	// middlewares are the tap's settings by the names of the middlewares, as Traefik's own parsers read them.
	middlewares map[string]settings
	// shown are the same settings as a parser reads them that is not Traefik's.
	shown map[string]settings
	// plugins say how the plugin is loaded, by the name that it gets.
	plugins map[string]plugin
	images  []string
}

// plugin says how a plugin is loaded: from the catalog, or locally without a version.
type plugin struct {
	moduleName, version string
	local               bool
}

// format is one of the formats that examples are written in.
type format struct {
	name string
	// has says whether an example is in this format, by the names at its top level.
	has  func(top []string) bool
	read func(t *testing.T, e example) (contents, error)
}

func formats() []format {
	return []format{
		{"Kubernetes", withAll("apiVersion", "kind"), readKubernetes},
		{"Compose", withAll("services"), readCompose},
		{"labels", withAll("labels"), readLabels},
		{"dynamic configuration", withOnly("http", "tcp", "udp", "tls"), readDynamic},
		{"Helm values", withAll("image"), readValues},
		// Traefik takes no notice of names at the top that it does not know.
		{"static configuration", withOnly("accessLog", "api", "entryPoints", "experimental", "log", "metrics", "providers"), readStatic},
	}
}

func withAll(names ...string) func([]string) bool {
	return func(top []string) bool {
		return !slices.ContainsFunc(names, func(name string) bool { return !slices.Contains(top, name) })
	}
}

func withOnly(names ...string) func([]string) bool {
	return func(top []string) bool {
		return !slices.ContainsFunc(top, func(name string) bool { return !slices.Contains(names, name) })
	}
}

// format returns an error for an example in none of the formats.
func (e example) format() (format, error) {
	if e.extension == argumentsExtension {
		return format{name: "arguments", read: readCommand}, nil
	}
	top := map[string]any{}
	var err error
	if e.extension == ".toml" {
		err = toml.Unmarshal([]byte(e.text), &top)
	} else {
		// The first document will do.
		err = yaml.Unmarshal([]byte(e.text), &top)
	}
	if err != nil {
		return format{}, fmt.Errorf("%s: %w", e.name, err)
	}

	names := slices.Collect(maps.Keys(top))
	for _, format := range formats() {
		if format.has(names) {
			return format, nil
		}
	}

	if e.isOfAReceiver() {
		return format{"file of a receiver", nil, readNothing}, nil
	}

	return format{}, fmt.Errorf("%s: no test knows this format, with %v at its top", e.name, names)
}

// isOfAReceiver says whether a file is not for Traefik but for what gets the records: the end-to-end tests start that with the file.
func (e example) isOfAReceiver() bool {
	folder, name := filepath.Split(filepath.ToSlash(e.name))
	tests, err := filepath.Glob(filepath.Join(root, "testdata", "e2e", "*_test.go"))
	if err != nil {
		return false
	}

	return slices.ContainsFunc(tests, func(test string) bool {
		text, err := os.ReadFile(test)

		return err == nil && bytes.Contains(text, []byte(path.Base(folder))) && bytes.Contains(text, []byte(`"`+name+`"`))
	})
}

func readNothing(*testing.T, example) (contents, error) {
	return contents{}, nil
}

// read reads an example with Traefik's parsers. Anything that they, or Traefik's providers, find wrong is an error.
func (e example) read(t *testing.T) (contents, error) {
	t.Helper()
	format, err := e.format()
	if err != nil {
		return contents{}, err
	}
	traefikLog.errors() // Those of others.
	read, err := format.read(t, e)
	if err == nil {
		// Providers log what is wrong, and leave it out.
		err = errors.Join(traefikLog.errors()...)
	}
	if err != nil {
		return contents{}, fmt.Errorf("%s: %w", e.name, err)
	}

	return read, nil
}

// tested are the extensions of files that have tests of their own, in the module that they belong to.
var tested = []string{".go", ".mod", ".sum", ".html"}

// findExamples returns all examples: the files below examples, and the blocks of their documents and of the README.
func findExamples(t *testing.T) []example {
	t.Helper()
	found := examplesIn(t, filepath.Join(root, "README.md"))
	err := filepath.WalkDir(filepath.Join(root, "examples"), func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && !slices.Contains(tested, filepath.Ext(name)) {
			found = append(found, examplesIn(t, name)...)
		}

		return err
	})
	require.NoError(t, err)
	require.NotEmpty(t, found)

	for i := range found {
		for j, other := range found {
			if i != j && filepath.Dir(found[i].name) == filepath.Dir(other.name) && filepath.Dir(other.name) != "." {
				found[i].siblings = append(found[i].siblings, other)
			}
		}
	}

	return found
}

// argumentsExtension stands for Traefik's command line, which has no file and no language.
const argumentsExtension = ".arguments"

// block is a fenced block of a document, with its language.
var block = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")

// examplesIn returns the example in a file, or those in a document. A file of an unknown kind fails the test.
func examplesIn(t *testing.T, file string) []example {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	name, err := filepath.Rel(root, file)
	require.NoError(t, err)

	switch extension := filepath.Ext(file); extension {
	case ".yml", ".yaml", ".toml", ".json":
		return []example{{name: name, extension: extension, text: string(text)}}
	case ".md":
		return examplesInText(name, string(text))
	default:
		require.True(t, example{name: name}.isOfAReceiver(), "no test knows this kind of file: %s", name)

		return nil
	}
}

// examplesInText returns the examples in a document.
func examplesInText(name, text string) []example {
	var found []example
	for i, match := range block.FindAllStringSubmatch(text, -1) {
		e := example{name: fmt.Sprintf("%s, block %d", name, i+1), extension: "." + match[1], text: match[2]}
		if strings.HasPrefix(e.text, "--") {
			e.extension = argumentsExtension
		}
		if slices.Contains([]string{".yaml", ".toml", argumentsExtension}, e.extension) {
			found = append(found, e)
		}
	}

	return found
}

// documents returns the documents of a text in YAML or JSON, without empty ones.
func documents(text string) ([]map[string]any, error) {
	decoder := yaml.NewDecoder(bytes.NewBufferString(text))
	var found []map[string]any
	for {
		var document map[string]any
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, err
		}
		if document != nil {
			found = append(found, document)
		}
	}
}

// at returns what stands under nested names, or nil.
func at(value any, names ...string) any {
	for _, name := range names {
		inner, _ := value.(map[string]any)
		value = inner[name]
	}

	return value
}

// misspelt returns the example with a name of an option, wherever it is one, spelt wrong.
func (e example) misspelt(option string) (example, bool) {
	pattern := regexp.MustCompile(`(?m)(^|[\s.{,"])` + regexp.QuoteMeta(option) + `("?\s*[:=]|[.\]])`)
	wrong := e
	wrong.text = pattern.ReplaceAllString(e.text, "${1}"+misspell(option)+"${2}")

	return wrong, wrong.text != e.text
}

func misspell(option string) string {
	return option + "z"
}

// untagged returns the example with an image that is not pinned.
func (e example) untagged(image string) example {
	name, tag, _ := strings.Cut(image, ":")
	wrong := e
	wrong.text = strings.ReplaceAll(strings.ReplaceAll(e.text, image, name), "tag: "+tag, "tag: latest")

	return wrong
}
