package traefik_test

import (
	"bytes"
	"context"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/traefik/traefik/v3/pkg/plugins"
	"github.com/traefik/yaegi/stdlib"
	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
	"gopkg.in/yaml.v3"
)

// catalogPatience is how long the plugin catalog waits for a plugin to load and to make a handler.
const catalogPatience = 10 * time.Second

func readManifest(t *testing.T) *plugins.Manifest {
	t.Helper()
	manifest, err := plugins.ReadManifest("plugins-local", moduleName)
	require.NoError(t, err)

	return manifest
}

func readGoMod(t *testing.T) *modfile.File {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "go.mod"))
	require.NoError(t, err)
	parsed, err := modfile.Parse("go.mod", text, nil)
	require.NoError(t, err)

	return parsed
}

func TestManifest_SaysWhatTheCatalogAsksFor(t *testing.T) {
	manifest := readManifest(t)

	assert.NotEmpty(t, manifest.DisplayName)
	assert.Equal(t, "middleware", manifest.Type)
	assert.Equal(t, moduleName, manifest.Import)
	assert.Equal(t, manifest.Import, readGoMod(t).Module.Mod.Path)
	assert.NotEmpty(t, manifest.Summary)
	assert.NotEmpty(t, manifest.TestData)
	assert.True(t, manifest.IsYaegiPlugin())
	assert.False(t, manifest.UseUnsafe)
}

func TestManifest_IsAcceptedByTraefikAndCouldBeRefused(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, ".traefik.yml"))
	require.NoError(t, err)
	var whole map[string]any
	require.NoError(t, yaml.Unmarshal(text, &whole))
	check := func(manifest map[string]any) error {
		text, err := yaml.Marshal(manifest)
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll(localFolder(".", moduleName), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(localFolder(".", moduleName), ".traefik.yml"), text, 0o600))

		return plugins.SetupLocalPlugins(map[string]plugins.LocalDescriptor{alias: {ModuleName: moduleName}})
	}

	t.Chdir(t.TempDir())
	require.NoError(t, check(whole))
	for _, field := range []string{"displayName", "type", "import", "summary", "testData"} {
		incomplete := copyOf(whole).(map[string]any)
		delete(incomplete, field)
		assert.ErrorContains(t, check(incomplete), moduleName, "without %s", field)
	}
}

func TestManifest_TestDataMakesAHandlerWithoutANetwork(t *testing.T) {
	lookups := failLookups(t)
	address, callers := listen(t)
	config := copyOf(readManifest(t).TestData).(settings)
	kinds := 0
	for _, value := range config {
		if kind, ok := value.(settings); ok && kind["service"] != nil {
			kind["service"] = "http://" + address
			kinds++
		}
	}
	require.NotZero(t, kinds, "no endpoint in testData")

	ctx, cancel := context.WithTimeout(context.Background(), catalogPatience)
	defer cancel()
	for _, config := range []settings{readManifest(t).TestData, config} {
		started, err := load(map[string]plugins.LocalDescriptor{alias: {ModuleName: moduleName}})
		require.NoError(t, err)
		constructor, err := started.Build(alias, config, "audit@file")
		require.NoError(t, err)
		handler, err := constructor(ctx, http.NotFoundHandler())
		require.NoError(t, err)
		require.NotNil(t, handler)
	}
	require.NoError(t, ctx.Err(), "it took too long")
	cancel()

	assert.Empty(t, lookups)
	// Connections are accepted in the order in which they were made: had there been another, it would come first.
	own, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer own.Close()
	select {
	case first := <-callers:
		assert.Equal(t, own.LocalAddr().String(), first, "the endpoint was called")
	case <-time.After(patience):
		assert.Fail(t, "nobody was accepted")
	}
}

// listen returns an address, and sends who connects to it. Nobody is answered.
func listen(t *testing.T) (string, <-chan string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	callers := make(chan string, 100)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			callers <- conn.RemoteAddr().String()
			_ = conn.Close()
		}
	}()

	return listener.Addr().String(), callers
}

// failLookups lets no name be looked up, and returns what is sent on each attempt.
func failLookups(t *testing.T) <-chan string {
	t.Helper()
	lookups := make(chan string, 100)
	resolver := net.DefaultResolver
	t.Cleanup(func() { net.DefaultResolver = resolver })
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(_ context.Context, _, address string) (net.Conn, error) {
		lookups <- address

		return nil, errors.New("there is no network")
	}}

	return lookups
}

func TestGoMod_RequiresTestifyAlone(t *testing.T) {
	goMod := readGoMod(t)

	var direct []string
	for _, required := range goMod.Require {
		assert.NotContains(t, required.Mod.Path, "github.com/traefik/", "the catalog refuses such a plugin")
		if !required.Indirect {
			direct = append(direct, required.Mod.Path)
		}
	}
	assert.Equal(t, []string{"github.com/stretchr/testify"}, direct)
	assert.Empty(t, goMod.Replace)
	assert.NoDirExists(t, filepath.Join(root, "vendor"))
}

func TestPlugin_ImportsWhatTraefikOffersAlone(t *testing.T) {
	files, err := pluginFiles()
	require.NoError(t, err)

	imports := map[string]bool{}
	for _, name := range files {
		if filepath.Ext(name) != ".go" {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, parser.ImportsOnly)
		require.NoError(t, err)
		for _, imported := range parsed.Imports {
			name, err := strconv.Unquote(imported.Path.Value)
			require.NoError(t, err)
			imports[name] = true
		}
	}
	require.Contains(t, imports, "net/http", "the imports are not found")

	for name := range imports {
		// Yaegi files the standard library, and nothing else, under its path and its name.
		assert.Contains(t, stdlib.Symbols, name+"/"+path.Base(name))
	}
}

func TestPlugin_IsLoadedFromTheArchiveThatTheCatalogServes(t *testing.T) {
	version := "v0.1.0"
	var archive bytes.Buffer
	require.NoError(t, zip.CreateFromDir(&archive, module.Version{Path: moduleName, Version: version}, root))
	t.Chdir(t.TempDir())

	downloader, err := plugins.NewRegistryDownloader(plugins.RegistryDownloaderOptions{
		HTTPClient:   &http.Client{Transport: catalog(archive.Bytes())},
		ArchivesPath: filepath.Join("plugins-storage", "archives"),
	})
	require.NoError(t, err)
	manager, err := plugins.NewManager(downloader, plugins.ManagerOptions{Output: "plugins-storage"})
	require.NoError(t, err)
	remote := map[string]plugins.Descriptor{alias: {ModuleName: moduleName, Version: version}}
	require.NoError(t, plugins.SetupRemotePlugins(manager, remote))
	started, err := plugins.NewBuilder(manager, remote, nil)
	require.NoError(t, err)

	manifest, err := manager.ReadManifest(moduleName)
	require.NoError(t, err)
	constructor, err := started.Build(alias, manifest.TestData, "audit@file")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	_, err = constructor(ctx, http.NotFoundHandler())
	require.NoError(t, err)
}

// catalog answers for the catalog, which has one plugin in one version: this one.
type catalog []byte

func (c catalog) RoundTrip(req *http.Request) (*http.Response, error) {
	resp := &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: req}
	// The other question that Traefik asks is whether the hash of the archive is right.
	if strings.Contains(req.URL.Path, "/download/") {
		resp.Body = io.NopCloser(bytes.NewReader(c))
	}

	return resp, nil
}

// copyOf copies maps and lists, so that one can be changed without the other.
func copyOf(value any) any {
	switch value := value.(type) {
	case map[string]any:
		copied := map[string]any{}
		for name, inner := range value {
			copied[name] = copyOf(inner)
		}

		return copied
	case []any:
		copied := make([]any, len(value))
		for i, inner := range value {
			copied[i] = copyOf(inner)
		}

		return copied
	default:
		return value
	}
}
