// Package host loads the plugin of this checkout and puts it to work in the way that Traefik does, without Traefik: from
// Traefik's dynamic configuration through Traefik's interpreter to a reverse proxy set up like Traefik's. The tests of the
// interpreted plugin and the demo stand on it.
//
// What a Traefik does around a router is left out: entry points with their X-Forwarded-* and X-Real-Ip headers, access
// log, metrics, recovery, and all middlewares but this plugin.
package host

import (
	"context"
	"fmt"
	"net/http"

	"github.com/mitchellh/mapstructure"
	"github.com/traefik-tap/tap"
)

// Plugin builds middlewares. One Plugin stands for the plugin as loaded in one Traefik process.
type Plugin interface {
	// New builds the middleware called name, such as "audit@file", in front of next. The settings in config are what a
	// user wrote under the plugin's alias; nil or empty keeps the plugin's own defaults. It returns the error that
	// Traefik would show for settings that do not fit.
	New(ctx context.Context, next http.Handler, config map[string]any, name string) (http.Handler, error)
}

// Compiled returns the plugin of the checkout as an ordinary Go package, configured in the same way as the interpreted
// one. It logs to the standard logger of the process.
func Compiled() Plugin {
	return compiled{}
}

type compiled struct{}

func (compiled) New(ctx context.Context, next http.Handler, config map[string]any, name string) (http.Handler, error) {
	settings := tap.CreateConfig()
	if err := decode(config, settings); err != nil {
		return nil, err
	}
	return tap.New(ctx, next, settings, name)
}

// decode puts settings into what CreateConfig returned, with the decoder that Traefik uses for plugins.
func decode(config map[string]any, settings any) error {
	if len(config) == 0 {
		return nil
	}

	decoder, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		DecodeHook:       mapstructure.StringToSliceHookFunc(","),
		WeaklyTypedInput: true,
		Result:           settings,
	})
	if err != nil {
		return fmt.Errorf("creating the decoder of the plugin's settings: %w", err)
	}
	if err := decoder.Decode(config); err != nil {
		return fmt.Errorf("failed to decode configuration: %w", err)
	}
	return nil
}
