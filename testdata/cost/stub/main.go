// Command stub writes the plugin's sources with the delivery stubbed out, in the form that the flag -overlay of the go command takes:
//
//	go run ./testdata/cost/stub <folder of the plugin> <folder for the sources>
//
// It prints the name of the overlay. Both folders must exist, and the sources in the second are replaced.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/traefik-tap/tap/testdata/cost"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: stub <folder of the plugin> <folder for the sources>")
	}

	overlay, err := write(os.Args[1], os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(overlay)
}

// write returns the name of the overlay in folder.
func write(root, folder string) (string, error) {
	// The go command takes relative names for relative to where it runs.
	root, err := filepath.Abs(root)
	if err != nil {
		return "", err
	}
	if folder, err = filepath.Abs(folder); err != nil {
		return "", err
	}

	name, text, err := cost.StubDelivery(root)
	if err != nil {
		return "", err
	}
	stubbed := filepath.Join(folder, name)
	if err := os.WriteFile(stubbed, []byte(text), 0o600); err != nil {
		return "", err
	}

	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{filepath.Join(root, name): stubbed}})
	if err != nil {
		return "", err
	}
	file := filepath.Join(folder, "overlay.json")

	return file, os.WriteFile(file, overlay, 0o600)
}
