package host

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// Handler serves all routers of a dynamic configuration. A request that no router matches is answered by 404.
type Handler struct {
	routes    []route
	transport *transport
}

type route struct {
	matches  func(path string) bool
	priority int
	handler  http.Handler
}

// Build builds all routers, with middlewares made by plugin under names such as "audit@file". A rule is Path(`/x`) or
// PathPrefix(`/x`), matched against the unescaped path; any other rule is an error. Routers of higher priority are tried
// first, which is the longer rule if none is set. The context is handed to each middleware; Traefik cancels it when the
// configuration changes. Unlike Traefik, which leaves out a router that it cannot build, Build returns its error.
func (d *Dynamic) Build(ctx context.Context, plugin Plugin) (*Handler, error) {
	built := &Handler{transport: newTransport()}
	for _, name := range slices.Sorted(maps.Keys(d.HTTP.Routers)) {
		route, err := d.route(ctx, plugin, d.HTTP.Routers[name], built.transport)
		if err != nil {
			return nil, fmt.Errorf("router %q: %w", name, err)
		}
		built.routes = append(built.routes, route)
	}

	slices.SortStableFunc(built.routes, func(a, b route) int { return b.priority - a.priority })
	return built, nil
}

func (h *Handler) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	for _, route := range h.routes {
		if route.matches(req.URL.Path) {
			route.handler.ServeHTTP(rw, req)
			return
		}
	}
	http.NotFound(rw, req)
}

// CloseIdleConnections closes the connections to servers that no request uses. Connections in use are kept, and stay open
// for 90 s after their use.
func (h *Handler) CloseIdleConnections() {
	h.transport.CloseIdleConnections()
}

func (d *Dynamic) route(ctx context.Context, plugin Plugin, router *Router, transport *transport) (route, error) {
	matches, err := matcher(router.Rule)
	if err != nil {
		return route{}, err
	}
	handler, err := d.service(router.Service, transport)
	if err != nil {
		return route{}, err
	}

	// The last middleware of the list stands next to the service, so it is the first to be built.
	for _, name := range slices.Backward(router.Middlewares) {
		if !strings.Contains(name, "@") {
			name += "@" + d.provider
		}
		config, err := d.PluginConfig(name)
		if err != nil {
			return route{}, err
		}
		if handler, err = plugin.New(ctx, handler, config, name); err != nil {
			return route{}, fmt.Errorf("middleware %q: %w", name, err)
		}
	}

	priority := router.Priority
	if priority == 0 {
		priority = len(router.Rule)
	}
	return route{matches: matches, priority: priority, handler: handler}, nil
}

func (d *Dynamic) service(name string, transport *transport) (http.Handler, error) {
	service := d.HTTP.Services[strings.TrimSuffix(name, "@"+d.provider)]
	if service == nil {
		return nil, fmt.Errorf("service %q does not exist", name)
	}
	if service.LoadBalancer == nil || len(service.LoadBalancer.Servers) == 0 || service.LoadBalancer.Servers[0].URL == "" {
		return nil, fmt.Errorf("service %q: no URL of a server", name)
	}
	proxy, err := newProxy(service.LoadBalancer.Servers[0].URL, transport)
	if err != nil {
		return nil, fmt.Errorf("service %q: %w", name, err)
	}
	return proxy, nil
}

var rulePattern = regexp.MustCompile("^(Path|PathPrefix)\\(`(/[^`]*)`\\)$")

func matcher(rule string) (func(path string) bool, error) {
	parts := rulePattern.FindStringSubmatch(rule)
	if parts == nil {
		return nil, fmt.Errorf("rule %q: only Path(`/x`) and PathPrefix(`/x`) are supported here", rule)
	}
	if parts[1] == "Path" {
		return func(path string) bool { return path == parts[2] }, nil
	}
	return func(path string) bool { return strings.HasPrefix(path, parts[2]) }, nil
}
