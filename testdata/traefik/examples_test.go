package traefik_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/distribution/reference"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/mod/semver"
)

// check returns what a user would have to find out about an example.
func check(t *testing.T, e example) error {
	t.Helper()
	read, err := e.read(t)
	if err != nil {
		return err
	}
	for name, config := range read.middlewares {
		if err := checkSettings(t, config, name); err != nil {
			return fmt.Errorf("%s: middleware %q: %w", e.name, name, err)
		}
	}
	for name, plugin := range read.plugins {
		if err := checkPlugin(name, plugin); err != nil {
			return fmt.Errorf("%s: plugin %q: %w", e.name, name, err)
		}
	}
	for _, image := range read.images {
		if err := checkImage(image); err != nil {
			return fmt.Errorf("%s: image %q: %w", e.name, image, err)
		}
	}

	return nil
}

// checkSettings makes a middleware of settings, with Traefik's loader.
func checkSettings(t *testing.T, config settings, name string) error {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	_, err := build(ctx, http.NotFoundHandler(), withFiles(t, config), name)

	return err
}

// withFiles has the header values that settings name as files in a folder of this machine.
func withFiles(t *testing.T, config settings) settings {
	t.Helper()
	folder := t.TempDir()
	config = copyOf(config).(settings)
	for _, kind := range config {
		headers, _ := at(kind, "headers").(map[string]any)
		for name, value := range headers {
			file, found := strings.CutPrefix(fmt.Sprint(value), "file:")
			if !found {
				continue
			}
			file = filepath.Join(folder, filepath.Base(file))
			require.NoError(t, os.WriteFile(file, []byte("secret"), 0o600))
			headers[name] = "file:" + file
		}
	}

	return config
}

func checkPlugin(name string, p plugin) error {
	switch {
	case name != alias:
		return fmt.Errorf("it is not called %q", alias)
	case p.moduleName != moduleName:
		return fmt.Errorf("moduleName: %q is another plugin", p.moduleName)
	case !p.local && semver.Canonical(p.version) != p.version || !p.local && p.version == "":
		return fmt.Errorf("version: %q is not a version", p.version)
	default:
		return nil
	}
}

func checkImage(image string) error {
	named, err := reference.ParseNormalizedNamed(image)
	if err != nil {
		return err
	}
	if tagged, ok := named.(reference.Tagged); !ok || tagged.Tag() == "latest" {
		return errors.New("it is not pinned")
	}

	return nil
}

func TestExamples_AreWhatTraefikTakes(t *testing.T) {
	for _, e := range findExamples(t) {
		t.Run(e.name, func(t *testing.T) {
			require.NoError(t, check(t, e))
		})
	}
}

func TestExamples_DecodeToTheSettingsThatTheyShow(t *testing.T) {
	for _, e := range findExamples(t) {
		t.Run(e.name, func(t *testing.T) {
			read, err := e.read(t)
			require.NoError(t, err)

			require.Len(t, read.middlewares, len(read.shown))
			for name, config := range read.middlewares {
				assert.Equal(t, flat(read.shown[name]), flat(decoded(t, config)), name)
			}
		})
	}
}

func TestExamples_AreSameInYAMLAndTOML(t *testing.T) {
	pairs := 0
	for _, e := range findExamples(t) {
		for _, other := range e.siblings {
			if e.extension != ".toml" || strings.TrimSuffix(e.name, ".toml") != strings.TrimSuffix(other.name, filepath.Ext(other.name)) {
				continue
			}
			pairs++
			own, err := e.read(t)
			require.NoError(t, err)
			others, err := other.read(t)
			require.NoError(t, err)
			assert.Equal(t, own.plugins, others.plugins, e.name)
			require.Len(t, others.middlewares, len(own.middlewares), e.name)
			for name := range own.middlewares {
				assert.Equal(t, decoded(t, own.middlewares[name]), decoded(t, others.middlewares[name]), "%s: %s", e.name, name)
			}
		}
	}
	assert.GreaterOrEqual(t, pairs, 2)
}

func TestReadme_ShowsTheSameMiddlewareInEachFormat(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n### Dynamic configuration\n")
	require.True(t, found, "the README has no such section")
	section, _, _ = strings.Cut(section, "\n## ")
	// A cluster has names of its own for services.
	section = strings.ReplaceAll(section, ".observability.svc", "")

	shown := map[string]settings{}
	for _, e := range examplesInText("README.md", section) {
		format, err := e.format()
		require.NoError(t, err)
		read, err := e.read(t)
		require.NoError(t, err)
		for _, config := range read.middlewares {
			shown[format.name+" in "+e.extension] = decoded(t, config)
		}
	}
	require.Len(t, shown, 4)
	want := shown["dynamic configuration in .yaml"]
	require.Contains(t, want, "response")
	for name, config := range shown {
		assert.Equal(t, want, config, name)
	}
}

func TestExamples_FailWithAMisspeltOption(t *testing.T) {
	for _, e := range findExamples(t) {
		t.Run(e.name, func(t *testing.T) {
			read, err := e.read(t)
			require.NoError(t, err)

			for middleware, config := range read.middlewares {
				for _, option := range optionsOf(config, "") {
					err := checkSettings(t, misspeltAt(config, option), middleware)
					assert.ErrorContains(t, err, misspell(option), middleware)
				}
			}
			for _, option := range e.options(read) {
				wrong, changed := e.misspelt(option)
				require.True(t, changed, "there is no %s", option)
				assert.ErrorContains(t, check(t, wrong), misspell(option), "with %s", misspell(option))
			}
		})
	}
}

// optionsOf returns the paths of all options in settings. The names of headers are the user's.
func optionsOf(config settings, prefix string) []string {
	var options []string
	for name, value := range config {
		options = append(options, prefix+name)
		if inner, ok := value.(settings); ok && name != "headers" {
			options = append(options, optionsOf(inner, prefix+name+".")...)
		}
	}

	return options
}

// misspeltAt returns the settings with one option spelt wrong.
func misspeltAt(config settings, option string) settings {
	wrong := copyOf(config).(settings)
	names := strings.Split(option, ".")
	last := names[len(names)-1]
	parent := at(wrong, names[:len(names)-1]...).(settings)
	parent[misspell(last)] = parent[last]
	delete(parent, last)

	return wrong
}

// optionsOfOthers are options around the plugin's own.
var optionsOfOthers = []string{
	"containers", "entryPoints", "entrypoints", "experimental", "image", "loadBalancer", "loadbalancer", "localPlugins", "localplugins", "match",
	"middlewares", "moduleName", "modulename", "plugins", "providers", "routers", "rule", "services", "spec", "stringData", "version",
}

// options returns the names of the options in an example that the tests look at, each once.
func (e example) options(read contents) []string {
	found := map[string]bool{}
	for _, config := range read.middlewares {
		for _, option := range optionsOf(config, "") {
			found[option[strings.LastIndex(option, ".")+1:]] = true
		}
	}
	for _, option := range optionsOfOthers {
		if _, there := e.misspelt(option); there {
			found[option] = true
		}
	}
	names := make([]string, 0, len(found))
	for name := range found {
		names = append(names, name)
	}

	return names
}

func TestExamples_FailWithAnImageThatIsNotPinned(t *testing.T) {
	images := 0
	for _, e := range findExamples(t) {
		read, err := e.read(t)
		require.NoError(t, err)
		for _, image := range read.images {
			if !strings.Contains(e.text, "image:") {
				continue // A list of labels, to which readLabels adds one.
			}
			images++
			assert.ErrorContains(t, check(t, e.untagged(image)), "it is not pinned", "%s: %s", e.name, image)
		}
	}
	assert.NotZero(t, images)
}
