package traefik_test

import (
	"strings"
	"testing"

	"github.com/traefik/paerser/file"
	"github.com/traefik/paerser/flag"
	otypes "github.com/traefik/traefik/v3/pkg/observability/types"
	"github.com/traefik/traefik/v3/pkg/plugins"
	"github.com/traefik/traefik/v3/pkg/provider/docker"
	fileprovider "github.com/traefik/traefik/v3/pkg/provider/file"
	"github.com/traefik/traefik/v3/pkg/provider/kubernetes/crd"
)

// static is the part of Traefik's static configuration that examples use, read by Traefik's own parser, and of Traefik's own
// types. Their sum, in Traefik's pkg/config/static, does not build: it leads to modules for DNS providers that cannot be had.
// An option that is not here is an error, so that no example uses what is not looked at.
type static struct {
	EntryPoints map[string]*entryPoint `json:"entryPoints,omitempty" toml:"entryPoints,omitempty" yaml:"entryPoints,omitempty"`
	Providers   *providers             `json:"providers,omitempty" toml:"providers,omitempty" yaml:"providers,omitempty"`
	API         *api                   `json:"api,omitempty" toml:"api,omitempty" yaml:"api,omitempty" label:"allowEmpty" file:"allowEmpty"`
	Metrics     *otypes.Metrics        `json:"metrics,omitempty" toml:"metrics,omitempty" yaml:"metrics,omitempty"`
	Log         *otypes.TraefikLog     `json:"log,omitempty" toml:"log,omitempty" yaml:"log,omitempty" label:"allowEmpty" file:"allowEmpty"`
	AccessLog   *otypes.AccessLog      `json:"accessLog,omitempty" toml:"accessLog,omitempty" yaml:"accessLog,omitempty" label:"allowEmpty" file:"allowEmpty"`

	Experimental *experimental `json:"experimental,omitempty" toml:"experimental,omitempty" yaml:"experimental,omitempty"`
}

type entryPoint struct {
	Address string         `json:"address,omitempty" toml:"address,omitempty" yaml:"address,omitempty"`
	HTTP    entryPointHTTP `json:"http,omitempty" toml:"http,omitempty" yaml:"http,omitempty"`
}

type entryPointHTTP struct {
	Middlewares    []string `json:"middlewares,omitempty" toml:"middlewares,omitempty" yaml:"middlewares,omitempty"`
	MaxHeaderBytes int      `json:"maxHeaderBytes,omitempty" toml:"maxHeaderBytes,omitempty" yaml:"maxHeaderBytes,omitempty"`
}

type providers struct {
	File          *fileprovider.Provider `json:"file,omitempty" toml:"file,omitempty" yaml:"file,omitempty"`
	Docker        *docker.Provider       `json:"docker,omitempty" toml:"docker,omitempty" yaml:"docker,omitempty" label:"allowEmpty" file:"allowEmpty"`
	KubernetesCRD *crd.Provider          `json:"kubernetesCRD,omitempty" toml:"kubernetesCRD,omitempty" yaml:"kubernetesCRD,omitempty" label:"allowEmpty" file:"allowEmpty"`
}

type api struct {
	Insecure  bool `json:"insecure,omitempty" toml:"insecure,omitempty" yaml:"insecure,omitempty"`
	Dashboard bool `json:"dashboard,omitempty" toml:"dashboard,omitempty" yaml:"dashboard,omitempty"`
}

type experimental struct {
	Plugins              map[string]plugins.Descriptor      `json:"plugins,omitempty" toml:"plugins,omitempty" yaml:"plugins,omitempty"`
	LocalPlugins         map[string]plugins.LocalDescriptor `json:"localPlugins,omitempty" toml:"localPlugins,omitempty" yaml:"localPlugins,omitempty"`
	AbortOnPluginFailure bool                               `json:"abortOnPluginFailure,omitempty" toml:"abortOnPluginFailure,omitempty" yaml:"abortOnPluginFailure,omitempty"`
}

// readStatic reads a file as Traefik reads its --configFile.
func readStatic(_ *testing.T, e example) (contents, error) {
	var read static
	if err := file.DecodeContent(e.text, e.extension, &read); err != nil {
		return contents{}, err
	}

	return contents{plugins: read.plugins()}, nil
}

// readCommand reads the arguments of a command line, one a line.
func readCommand(_ *testing.T, e example) (contents, error) {
	read, err := readArguments(strings.Fields(e.text))
	if err != nil {
		return contents{}, err
	}

	return contents{plugins: read.plugins()}, nil
}

// readArguments reads Traefik's command line.
func readArguments(arguments []string) (*static, error) {
	var read static

	return &read, flag.Decode(arguments, &read)
}

func (s *static) plugins() map[string]plugin {
	found := map[string]plugin{}
	if s.Experimental == nil {
		return found
	}
	for name, descriptor := range s.Experimental.Plugins {
		found[name] = plugin{moduleName: descriptor.ModuleName, version: descriptor.Version}
	}
	for name, descriptor := range s.Experimental.LocalPlugins {
		found[name] = plugin{moduleName: descriptor.ModuleName, local: true}
	}

	return found
}
