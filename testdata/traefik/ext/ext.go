// Package ext takes the place of a module that lies inside Traefik's repository, where its go.mod replaces it by a folder.
// Modules that import Traefik do not get that folder, and its dynamic configuration does not compile without the two types.
package ext

// HTTP is what a build of Traefik may add to the HTTP part of the dynamic configuration: nothing.
type HTTP struct{}

// Router is what a build of Traefik may add to a router: nothing.
type Router struct{}
