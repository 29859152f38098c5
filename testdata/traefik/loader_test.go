// Package traefik_test loads the plugin with Traefik's own packages, and reads the examples with Traefik's own parsers and
// providers. Traefik as a whole does not build from here: pkg/config/static, and with it pkg/server and pkg/proxy, leads to modules of DNS
// providers that not every proxy for Go modules has.
package traefik_test

import (
	"context"
	"fmt"
	stdlog "log"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/rs/zerolog"
	"github.com/rs/zerolog/log"
	"github.com/stretchr/testify/require"
	"github.com/traefik/traefik/v3/pkg/observability/logs"
	"github.com/traefik/traefik/v3/pkg/plugins"
	"go.uber.org/goleak"
	"k8s.io/klog/v2"
)

const (
	// alias is the name of the plugin in every static configuration, and so under plugin in every dynamic one.
	alias = "tap"
	// moduleName is what the catalog, and Traefik, know the plugin by.
	moduleName = "github.com/traefik-tap/tap"
	// patience is how long a test waits for what must come. It is never waited out when all is well.
	patience = 20 * time.Second
)

var (
	// root is the checkout.
	root string
	// loaded is what Traefik has loaded, once for the life of its process: the plugin, and the mirror of its settings.
	loaded *plugins.Builder
)

// TestMain does what Traefik does when it starts with the plugin as a local one, in a folder of its own.
func TestMain(m *testing.M) {
	folder, err := os.MkdirTemp("", "traefik")
	if err == nil {
		err = start(folder)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}

	goleak.VerifyTestMain(m, goleak.Cleanup(func(status int) {
		_ = os.RemoveAll(folder)
		os.Exit(status)
	}))
}

func start(folder string) error {
	var err error
	if root, err = filepath.Abs("../.."); err != nil {
		return err
	}
	if err = putPlugin(folder); err != nil {
		return err
	}
	if err = putMirror(folder); err != nil {
		return err
	}
	// Traefik looks for local plugins below its working directory alone.
	if err = os.Chdir(folder); err != nil {
		return err
	}

	// Kubernetes' client would rather watch from the start than list first, which asks more of an API server.
	if err = os.Setenv("KUBE_FEATURE_WatchListClient", "false"); err != nil {
		return err
	}
	// That client writes to the standard error, at each end of a test, that it was told to end.
	klog.SetLogger(logr.Discard())
	setupLogger(zerolog.DebugLevel)
	loaded, err = load(map[string]plugins.LocalDescriptor{alias: {ModuleName: moduleName}, mirrorAlias: {ModuleName: mirrorModule}})

	return err
}

// load loads plugins as Traefik does at its start, from the working directory.
func load(local map[string]plugins.LocalDescriptor) (*plugins.Builder, error) {
	if err := plugins.SetupLocalPlugins(local); err != nil {
		return nil, err
	}

	return plugins.NewBuilder(nil, nil, local)
}

// localFolder is where a Traefik that works in folder looks for the sources of a local plugin.
func localFolder(folder, module string) string {
	return filepath.Join(folder, "plugins-local", "src", filepath.FromSlash(module))
}

// putPlugin copies the plugin to where a Traefik that works in folder looks for it.
func putPlugin(folder string) error {
	target := localFolder(folder, moduleName)
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	files, err := pluginFiles()
	if err != nil {
		return err
	}
	for _, name := range files {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return err
		}
		if err = os.WriteFile(filepath.Join(target, name), text, 0o600); err != nil {
			return err
		}
	}

	return nil
}

// pluginFiles returns the names of what Traefik reads: the manifest and the sources in the root.
func pluginFiles() ([]string, error) {
	sources, err := filepath.Glob(filepath.Join(root, "*.go"))
	if err != nil {
		return nil, err
	}
	files := []string{".traefik.yml"}
	for _, source := range sources {
		if !strings.HasSuffix(source, "_test.go") {
			files = append(files, filepath.Base(source))
		}
	}

	return files, nil
}

// setupLogger does what Traefik does at its start with a log.level, and log.format json.
func setupLogger(level zerolog.Level) {
	zerolog.SetGlobalLevel(level)
	log.Logger = zerolog.New(traefikLog).With().Timestamp().Logger().Level(level)
	zerolog.DefaultContextLogger = &log.Logger
	stdlog.SetFlags(stdlog.Lshortfile | stdlog.LstdFlags)
	stdlog.SetOutput(logs.NoLevel(log.Logger, zerolog.DebugLevel))
}

// settings are what a user writes under the plugin's alias.
type settings = map[string]any

// build makes a middleware as Traefik makes it for a router.
func build(ctx context.Context, next http.Handler, config settings, middleware string) (http.Handler, error) {
	constructor, err := loaded.Build(alias, config, middleware)
	if err != nil {
		return nil, fmt.Errorf("plugin: %w", err)
	}

	return constructor(ctx, next)
}

// newTap makes a middleware that lives as long as the test.
func newTap(t *testing.T, next http.Handler, config settings) http.Handler {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	handler, err := build(ctx, next, config, "audit@file")
	require.NoError(t, err)

	return handler
}
