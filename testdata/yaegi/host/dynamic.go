package host

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig/v3"
	"github.com/traefik/paerser/file"
	"github.com/traefik/paerser/parser"
	"sigs.k8s.io/yaml"
)

// Alias is the name of the plugin in a static configuration, and so the key of its settings in a dynamic one.
const Alias = "tap"

// Dynamic is the part of Traefik's dynamic configuration that a chain of this plugin needs. Any other setting below http
// is an error when it is read, so that no example can use what is not tried here.
type Dynamic struct {
	HTTP *HTTP `json:"http,omitempty" toml:"http,omitempty" yaml:"http,omitempty"`

	// provider qualifies the names of middlewares: "audit" from a file is "audit@file".
	provider string
}

// HTTP holds routers, middlewares and services by name.
type HTTP struct {
	Routers     map[string]*Router     `json:"routers,omitempty" toml:"routers,omitempty" yaml:"routers,omitempty"`
	Middlewares map[string]*Middleware `json:"middlewares,omitempty" toml:"middlewares,omitempty" yaml:"middlewares,omitempty"`
	Services    map[string]*Service    `json:"services,omitempty" toml:"services,omitempty" yaml:"services,omitempty"`
}

// Router sends the requests that match Rule through Middlewares, in this order, to Service. EntryPoints is read and
// ignored. Priority 0 stands for the length of the rule.
type Router struct {
	EntryPoints []string `json:"entryPoints,omitempty" toml:"entryPoints,omitempty" yaml:"entryPoints,omitempty"`
	Middlewares []string `json:"middlewares,omitempty" toml:"middlewares,omitempty" yaml:"middlewares,omitempty"`
	Service     string   `json:"service,omitempty" toml:"service,omitempty" yaml:"service,omitempty"`
	Rule        string   `json:"rule,omitempty" toml:"rule,omitempty" yaml:"rule,omitempty"`
	Priority    int      `json:"priority,omitempty" toml:"priority,omitempty" yaml:"priority,omitempty"`
}

// Middleware holds the settings of one plugin by its alias.
type Middleware struct {
	Plugin map[string]PluginConf `json:"plugin,omitempty" toml:"plugin,omitempty" yaml:"plugin,omitempty"`
}

// PluginConf holds a plugin's settings before they are decoded: from a file or labels all values are strings, lists of
// strings or maps, from Kubernetes they are those of encoding/json.
type PluginConf map[string]any

// Service is a reverse proxy to the first server of LoadBalancer.
type Service struct {
	LoadBalancer *LoadBalancer `json:"loadBalancer,omitempty" toml:"loadBalancer,omitempty" yaml:"loadBalancer,omitempty"`
}

// LoadBalancer lists the servers of a service.
type LoadBalancer struct {
	Servers []Server `json:"servers,omitempty" toml:"servers,omitempty" yaml:"servers,omitempty" label-slice-as-struct:"server"`
}

// Server is one server of a service. Scheme and Port are for labels only, where Traefik completes them to a URL with the
// address of the container; the host has no containers, so a service needs a URL to be built.
type Server struct {
	URL    string `json:"url,omitempty" toml:"url,omitempty" yaml:"url,omitempty"`
	Scheme string `json:"-" toml:"-" yaml:"-" file:"-"`
	Port   string `json:"-" toml:"-" yaml:"-" file:"-"`
}

// ReadDynamic reads a dynamic configuration file as Traefik's file provider does, templates included. The format follows
// the extension: .yml, .yaml or .toml. replace holds pairs of old and new texts that are replaced in the file before
// anything else, such as an address by that of a server on a free port.
func ReadDynamic(name string, replace ...string) (*Dynamic, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}

	rendered, err := render(strings.NewReplacer(replace...).Replace(string(text)))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}

	dynamic := &Dynamic{HTTP: &HTTP{}, provider: "file"}
	if err := file.DecodeContent(rendered, strings.ToLower(filepath.Ext(name)), dynamic); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return dynamic, nil
}

func render(text string) (string, error) {
	parsed, err := template.New("dynamic configuration").Funcs(sprig.TxtFuncMap()).Parse(text)
	if err != nil {
		return "", err
	}
	var rendered bytes.Buffer
	err = parsed.Execute(&rendered, false)
	return rendered.String(), err
}

// FromLabels reads the labels of a container as Traefik's Docker provider does. Labels outside traefik.http are ignored.
func FromLabels(labels map[string]string) (*Dynamic, error) {
	dynamic := &Dynamic{HTTP: &HTTP{}, provider: "docker"}
	if err := parser.Decode(labels, dynamic, parser.DefaultRootName, "traefik.http"); err != nil {
		return nil, err
	}
	return dynamic, nil
}

// documentSeparator parts the documents of a manifest.
var documentSeparator = regexp.MustCompile(`(?m)^---.*$`)

// FromKubernetes reads the Middleware resources of a manifest, in YAML or JSON, as Traefik's CRD provider does. They are
// filed under their metadata.name; other kinds of resources are ignored. Settings that name a Secret
// ("urn:k8s:secret:name:key") are left as they are.
func FromKubernetes(manifest []byte) (*Dynamic, error) {
	middlewares := map[string]*Middleware{}
	for _, document := range documentSeparator.Split(string(manifest), -1) {
		var resource struct {
			Kind     string `json:"kind"`
			Metadata struct {
				Name string `json:"name"`
			} `json:"metadata"`
			Spec json.RawMessage `json:"spec"`
		}
		if err := yaml.Unmarshal([]byte(document), &resource); err != nil {
			return nil, err
		}
		if resource.Kind != "Middleware" {
			continue
		}

		var middleware Middleware
		if err := json.Unmarshal(resource.Spec, &middleware); err != nil {
			return nil, fmt.Errorf("middleware %q: %w", resource.Metadata.Name, err)
		}
		middlewares[resource.Metadata.Name] = &middleware
	}
	if len(middlewares) == 0 {
		return nil, errors.New("no resource of kind Middleware")
	}
	return &Dynamic{HTTP: &HTTP{Middlewares: middlewares}, provider: "kubernetescrd"}, nil
}

// PluginConfig returns the settings that the middleware, named with or without its provider, holds for the plugin's
// Alias. They may be nil. It returns an error if there is no such middleware, or if it is not exactly one plugin of
// that alias.
func (d *Dynamic) PluginConfig(middleware string) (map[string]any, error) {
	found := d.HTTP.Middlewares[strings.TrimSuffix(middleware, "@"+d.provider)]
	if found == nil {
		return nil, fmt.Errorf("middleware %q does not exist", middleware)
	}
	if len(found.Plugin) != 1 {
		return nil, fmt.Errorf("middleware %q: want one plugin, have %d", middleware, len(found.Plugin))
	}
	settings, ok := found.Plugin[Alias]
	if !ok {
		return nil, fmt.Errorf("middleware %q: its plugin is not called %q", middleware, Alias)
	}
	return settings, nil
}
