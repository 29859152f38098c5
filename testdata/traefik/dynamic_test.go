package traefik_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/stretchr/testify/require"
	"github.com/traefik/traefik/v3/pkg/config/dynamic"
	"github.com/traefik/traefik/v3/pkg/provider/file"
	"gopkg.in/yaml.v3"
)

// readDynamic reads a file as Traefik's file provider does.
func readDynamic(t *testing.T, e example) (contents, error) {
	t.Helper()
	configuration, err := readFile(t, e)
	if err != nil {
		return contents{}, err
	}
	middlewares, err := tapsOf(configuration, file.ProviderName)
	if err != nil {
		return contents{}, err
	}

	var plain map[string]any
	if e.extension == ".toml" {
		err = toml.Unmarshal([]byte(e.text), &plain)
	} else {
		err = yaml.Unmarshal([]byte(e.text), &plain)
	}
	require.NoError(t, err)
	shown := map[string]settings{}
	named, _ := at(plain, "http", "middlewares").(map[string]any)
	for name, middleware := range named {
		if config, ok := at(middleware, "plugin", alias).(settings); ok {
			shown[name] = config
		}
	}

	return contents{middlewares: middlewares, shown: shown}, nil
}

func readFile(t *testing.T, e example) (*dynamic.Configuration, error) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "dynamic"+e.extension)
	require.NoError(t, os.WriteFile(name, []byte(e.text), 0o600))

	return new(file.Provider).CreateConfiguration(context.Background(), name, nil, false)
}

// tapsOf returns the tap's settings by the names of its middlewares. A middleware that is another plugin is an error, and so is
// a router that names a middleware or a service that is not there.
func tapsOf(configuration *dynamic.Configuration, provider string) (map[string]settings, error) {
	taps := map[string]settings{}
	for name, middleware := range configuration.HTTP.Middlewares {
		if middleware.Plugin == nil {
			continue
		}
		config, ok := middleware.Plugin[alias]
		if !ok || len(middleware.Plugin) != 1 {
			return nil, fmt.Errorf("middleware %q: its plugin is not called %q", name, alias)
		}
		taps[name] = config
	}

	for name, router := range configuration.HTTP.Routers {
		for _, used := range router.Middlewares {
			if configuration.HTTP.Middlewares[strings.TrimSuffix(used, "@"+provider)] == nil {
				return nil, fmt.Errorf("router %q: middleware %q does not exist", name, used)
			}
		}
		service := strings.TrimSuffix(router.Service, "@"+provider)
		if configuration.HTTP.Services[service] == nil && service != "" && !strings.HasSuffix(service, "@internal") {
			return nil, fmt.Errorf("router %q: service %q does not exist", name, service)
		}
	}

	return taps, nil
}
