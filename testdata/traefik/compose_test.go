package traefik_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/distribution/reference"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/api/types/system"
	"github.com/stretchr/testify/require"
	"github.com/traefik/traefik/v3/pkg/config/dynamic"
	"github.com/traefik/traefik/v3/pkg/config/label"
	"github.com/traefik/traefik/v3/pkg/provider/docker"
	"github.com/traefik/traefik/v3/pkg/safe"
)

// middlewareLabel is what the names of a plugin's labels start with, before the name of the middleware.
const middlewareLabel = "traefik.http.middlewares."

// readLabels reads a list of labels, with nothing around it.
func readLabels(t *testing.T, e example) (contents, error) {
	t.Helper()
	service := "services:\n  whoami:\n    image: traefik/whoami:v1.11.0\n"
	e.text = service + "    " + strings.ReplaceAll(strings.TrimSpace(e.text), "\n", "\n    ") + "\n"

	return readCompose(t, e)
}

// readCompose reads a file as Docker Compose does, the labels in it as Traefik's Docker provider does, and the command of
// Traefik as Traefik does.
func readCompose(t *testing.T, e example) (contents, error) {
	t.Helper()
	project, err := loader.LoadWithContext(context.Background(), types.ConfigDetails{
		WorkingDir:  t.TempDir(),
		ConfigFiles: []types.ConfigFile{{Filename: "compose.yml", Content: []byte(e.text)}},
	}, func(options *loader.Options) { options.SetProjectName("example", true) })
	if err != nil {
		return contents{}, err
	}

	read := contents{middlewares: map[string]settings{}, shown: map[string]settings{}, plugins: map[string]plugin{}}
	for _, service := range project.Services {
		read.images = append(read.images, service.Image)
		// The provider leaves out a container whose labels are wrong.
		configuration, err := label.DecodeConfiguration(service.Labels)
		if err != nil {
			return contents{}, fmt.Errorf("service %q: %w", service.Name, err)
		}
		taps, err := tapsOf(configuration, docker.DockerName)
		if err != nil {
			return contents{}, fmt.Errorf("service %q: %w", service.Name, err)
		}
		for name, config := range taps {
			read.middlewares[name] = config
		}
		showLabels(service.Labels, read.shown)
	}

	return read, runCompose(t, project, &read)
}

// runCompose reads the command of each Traefik, and looks with its provider for the containers of the project.
func runCompose(t *testing.T, project *types.Project, read *contents) error {
	t.Helper()
	for _, service := range project.Services {
		if image, err := reference.ParseNormalizedNamed(service.Image); err != nil || reference.FamiliarName(image) != "traefik" {
			continue
		}
		configured, err := readArguments(service.Command)
		if err != nil {
			return fmt.Errorf("service %q: command: %w", service.Name, err)
		}
		for name, plugin := range configured.plugins() {
			read.plugins[name] = plugin
		}
		if configured.Providers == nil || configured.Providers.Docker == nil {
			continue
		}
		configuration, err := provideContainers(t, configured.Providers.Docker, project)
		if err != nil {
			return err
		}
		if read.middlewares, err = tapsOf(configuration, docker.DockerName); err != nil {
			return err
		}
	}

	return nil
}

// showLabels puts a container's labels of the plugin into shown.
func showLabels(labels map[string]string, shown map[string]settings) {
	for name, value := range labels {
		middleware, option, found := strings.Cut(strings.TrimPrefix(name, middlewareLabel), ".plugin."+alias+".")
		if !found || !strings.HasPrefix(name, middlewareLabel) {
			continue
		}
		if shown[middleware] == nil {
			shown[middleware] = settings{}
		}
		shown[middleware][option] = value
	}
}

// provideContainers starts Traefik's Docker provider in front of what looks like Docker with the containers of a project, and
// returns the configuration that it makes of their labels.
func provideContainers(t *testing.T, provider *docker.Provider, project *types.Project) (*dynamic.Configuration, error) {
	t.Helper()
	daemon := httptest.NewServer(dockerDaemon(project))
	defer daemon.Close()
	provider.Endpoint = "tcp://" + daemon.Listener.Addr().String()
	provider.Watch = false
	require.NoError(t, provider.Init())

	return provide(t, provider.Provide)
}

// provide returns the first configuration of a provider.
func provide(t *testing.T, start func(chan<- dynamic.Message, *safe.Pool) error) (*dynamic.Configuration, error) {
	t.Helper()
	messages := make(chan dynamic.Message, 10)
	pool := safe.NewPool(context.Background())
	defer pool.Stop()
	if err := start(messages, pool); err != nil {
		return nil, err
	}
	select {
	case message := <-messages:
		return message.Configuration, nil
	case <-time.After(patience):
		return nil, fmt.Errorf("the provider has no configuration: %v", traefikLog.errors())
	}
}

// dockerDaemon answers what Traefik asks Docker: one container for each service of the project, all in one network.
func dockerDaemon(project *types.Project) http.Handler {
	const version = "1.47"
	containers := map[string]container.InspectResponse{}
	var listed []container.Summary
	for _, service := range project.Services {
		found := runningContainer(project, service)
		found.NetworkSettings.Networks["example_default"].IPAddress = netip.AddrFrom4([4]byte{172, 18, 0, byte(2 + len(listed))})
		containers[found.ID] = found
		listed = append(listed, container.Summary{ID: found.ID})
	}

	mux := http.NewServeMux()
	mux.HandleFunc("/_ping", func(rw http.ResponseWriter, _ *http.Request) { rw.Header().Set("Api-Version", version) })
	mux.HandleFunc("/v"+version+"/version", answerJSON(func(*http.Request) any { return system.VersionResponse{APIVersion: version} }))
	mux.HandleFunc("/v"+version+"/containers/json", answerJSON(func(*http.Request) any { return listed }))
	mux.HandleFunc("/v"+version+"/containers/{id}/json", answerJSON(func(req *http.Request) any { return containers[req.PathValue("id")] }))

	return mux
}

func answerJSON(answer func(*http.Request) any) http.HandlerFunc {
	return func(rw http.ResponseWriter, req *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(rw).Encode(answer(req))
	}
}

func runningContainer(project *types.Project, service types.ServiceConfig) container.InspectResponse {
	labels := map[string]string{"com.docker.compose.project": project.Name, "com.docker.compose.service": service.Name}
	for name, value := range service.Labels {
		labels[name] = value
	}

	return container.InspectResponse{
		ID:         service.Name,
		Name:       "/" + path.Join(project.Name+"-"+service.Name+"-1"),
		State:      &container.State{Status: container.StateRunning},
		Config:     &container.Config{Labels: labels},
		HostConfig: &container.HostConfig{NetworkMode: "example_default"},
		NetworkSettings: &container.NetworkSettings{
			// As if each image exposed this port and no other.
			Ports:    network.PortMap{network.MustParsePort("80/tcp"): nil},
			Networks: map[string]*network.EndpointSettings{"example_default": {}},
		},
	}
}
