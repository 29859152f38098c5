package host

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"gopkg.in/yaml.v3"
)

// manifest is what Traefik reads of .traefik.yml.
type manifest struct {
	DisplayName string         `yaml:"displayName"`
	Type        string         `yaml:"type"`
	Runtime     string         `yaml:"runtime"`
	Import      string         `yaml:"import"`
	BasePkg     string         `yaml:"basePkg"`
	Summary     string         `yaml:"summary"`
	UseUnsafe   bool           `yaml:"useUnsafe"`
	TestData    map[string]any `yaml:"testData"`
}

func readManifest(root string) (*manifest, error) {
	file := filepath.Join(root, ".traefik.yml")
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading the plugin's manifest: %w", err)
	}

	var read manifest
	if err := yaml.Unmarshal(text, &read); err != nil {
		return nil, fmt.Errorf("decoding the plugin's manifest %s: %w", file, err)
	}
	if err := read.check(); err != nil {
		return nil, fmt.Errorf("the plugin's manifest %s: %w", file, err)
	}
	return &read, nil
}

// check returns everything that makes Traefik refuse the manifest of a middleware run by Yaegi.
func (m *manifest) check() error {
	var errs []error
	refuseIf := func(refused bool, format string, arguments ...any) {
		if refused {
			errs = append(errs, fmt.Errorf(format, arguments...))
		}
	}

	refuseIf(m.Type != "middleware", "unsupported type %q", m.Type)
	refuseIf(m.Runtime != "" && m.Runtime != "yaegi", "unsupported runtime %q", m.Runtime)
	refuseIf(m.Import == "", "import is missing")
	refuseIf(!strings.HasPrefix(m.Import, moduleName), "import %q is not part of the module %q", m.Import, moduleName)
	refuseIf(m.DisplayName == "", "displayName is missing")
	refuseIf(m.Summary == "", "summary is missing")
	refuseIf(m.TestData == nil, "testData is missing")
	refuseIf(m.UseUnsafe, "useUnsafe is set: users would have to allow it in the static configuration")

	return errors.Join(errs...)
}

// packageName is the name under which Traefik looks for New and CreateConfig.
func (m *manifest) packageName() string {
	if m.BasePkg != "" {
		return m.BasePkg
	}
	return strings.ReplaceAll(path.Base(m.Import), "-", "_")
}
