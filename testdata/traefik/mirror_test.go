package traefik_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The mirror is a plugin that has the settings of the tap, and shows them: so a test sees what Traefik has decoded, in the
// interpreter, of what a user wrote.
const (
	mirrorAlias  = "mirror"
	mirrorModule = "github.com/traefik-tap/mirror"

	mirrorManifest = `
displayName: Mirror
type: middleware
import: github.com/traefik-tap/mirror
summary: Shows the settings of the tap.
testData: {}
`

	mirrorSource = `
package mirror

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/traefik-tap/tap"
)

func CreateConfig() *tap.Config { return tap.CreateConfig() }

func New(_ context.Context, _ http.Handler, config *tap.Config, _ string) (http.Handler, error) {
	text, err := json.Marshal(config)

	return http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(text) }), err
}
`
)

func putMirror(folder string) error {
	target := localFolder(folder, mirrorModule)
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(target, ".traefik.yml"), []byte(mirrorManifest), 0o600); err != nil {
		return err
	}

	return os.WriteFile(filepath.Join(target, "mirror.go"), []byte(mirrorSource), 0o600)
}

// decoded returns what Traefik has decoded of the tap's settings.
func decoded(t *testing.T, config settings) settings {
	t.Helper()
	constructor, err := loaded.Build(mirrorAlias, config, "audit@file")
	require.NoError(t, err)
	mirror, err := constructor(t.Context(), http.NotFoundHandler())
	require.NoError(t, err)
	answer := httptest.NewRecorder()
	mirror.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/", nil))

	decoder := json.NewDecoder(answer.Body)
	decoder.UseNumber() // As it is written.
	var shown settings
	require.NoError(t, decoder.Decode(&shown))

	return shown
}

// flat makes settings from any source comparable: texts under lower case names. What is empty or false may be left out of
// some, and is left out of all.
func flat(config settings) map[string]string {
	flattened := map[string]string{}
	flatten(flattened, "", config)

	return flattened
}

func flatten(flattened map[string]string, name string, value any) {
	switch value := value.(type) {
	case nil:
	case settings:
		for inner := range value {
			flatten(flattened, strings.TrimPrefix(name+"."+strings.ToLower(inner), "."), value[inner])
		}
	case []any:
		texts := make([]string, len(value))
		for i := range value {
			texts[i] = fmt.Sprint(value[i])
		}
		flatten(flattened, name, strings.Join(texts, ","))
	default:
		if text := fmt.Sprint(value); text != "" && text != "false" {
			flattened[name] = text
		}
	}
}
