package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"

	"github.com/traefik/yaegi/interp"
	"github.com/traefik/yaegi/stdlib"
)

// moduleName is what a user of Traefik writes as moduleName in the static configuration.
const moduleName = "github.com/traefik-tap/tap"

// Options says how the plugin is interpreted. The zero value interprets the checkout as it is and discards what it
// prints.
type Options struct {
	// Stdout receives what the plugin prints with fmt; Traefik logs it at DEBUG. Each print is one Write, possibly from
	// many goroutines at once. Nil discards it.
	Stdout io.Writer
	// Stderr receives what the plugin prints with log; Traefik logs it at ERROR. Each line is one Write, possibly from
	// many goroutines at once. Nil discards it.
	Stderr io.Writer
	// Overlay adds source files to the plugin's package, or replaces them: from file name to source text. Tests reach
	// unexported things of the plugin with it. Nil leaves the checkout as it is.
	Overlay map[string]string
}

// Interpreted is the plugin in an interpreter of its own, as in one Traefik process: package variables are shared by all
// middlewares that it builds. It may be used by many goroutines, and needs no closing.
type Interpreted struct {
	// Traefik builds its middlewares one after the other, so a plugin need not expect anything else.
	building     sync.Mutex
	createConfig reflect.Value
	new          reflect.Value
}

// Interpret loads the checkout into a new interpreter. It returns an error if Traefik would not load the plugin: a wrong
// manifest, or source that the interpreter does not understand.
func Interpret(options Options) (*Interpreted, error) {
	return interpret(Root(), options)
}

// Root returns the folder of the checkout. It is known from the place of this source file, so programs built with
// -trimpath cannot interpret the plugin.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..", "..")
}

// New builds a middleware from the settings of a plugin, as decoded by Dynamic.PluginConfig. It returns the decoder's
// error, or that of the plugin's New.
func (i *Interpreted) New(ctx context.Context, next http.Handler, config map[string]any, name string) (http.Handler, error) {
	i.building.Lock()
	defer i.building.Unlock()

	settings := i.createConfig.Call(nil)[0]
	if err := decode(config, settings.Interface()); err != nil {
		return nil, err
	}

	results := i.new.Call([]reflect.Value{reflect.ValueOf(ctx), reflect.ValueOf(next), settings, reflect.ValueOf(name)})
	if failure := results[1].Interface(); failure != nil {
		err, ok := failure.(error)
		if !ok {
			return nil, fmt.Errorf("invalid error type: %T", failure)
		}
		return nil, err
	}

	handler, ok := results[0].Interface().(http.Handler)
	if !ok {
		return nil, fmt.Errorf("invalid handler type: %T", results[0].Interface())
	}
	return handler, nil
}

func interpret(root string, options Options) (*Interpreted, error) {
	manifest, err := readManifest(root)
	if err != nil {
		return nil, err
	}

	// The interpreter reads source files while it imports the package, and never again.
	goPath, err := os.MkdirTemp("", "tap-gopath-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(goPath) }()

	if err := layOut(root, filepath.Join(goPath, "src", filepath.FromSlash(moduleName)), options.Overlay); err != nil {
		return nil, fmt.Errorf("laying out the plugin's sources: %w", err)
	}

	interpreter := interp.New(interp.Options{
		GoPath: goPath,
		Env:    os.Environ(),
		Stdout: orDiscard(options.Stdout),
		Stderr: orDiscard(options.Stderr),
	})
	if err := interpreter.Use(stdlib.Symbols); err != nil {
		return nil, fmt.Errorf("loading the standard library's symbols: %w", err)
	}
	if _, err := interpreter.Eval(fmt.Sprintf("import %q", manifest.Import)); err != nil {
		return nil, fmt.Errorf("importing %q: %w", manifest.Import, err)
	}

	return lookUp(interpreter, manifest.packageName())
}

func lookUp(interpreter *interp.Interpreter, packageName string) (*Interpreted, error) {
	newFunction, errNew := interpreter.Eval(packageName + ".New")
	createConfig, errCreate := interpreter.Eval(packageName + ".CreateConfig")
	if err := errors.Join(errNew, errCreate); err != nil {
		return nil, fmt.Errorf("looking up the plugin's functions: %w", err)
	}

	// Traefik passes arguments by reflection: a wrong signature would be a panic in New instead of an error here.
	if t := createConfig.Type(); t.NumIn() != 0 || t.NumOut() != 1 {
		return nil, fmt.Errorf("CreateConfig has a wrong signature: %s", t)
	}
	if t := newFunction.Type(); t.NumIn() != 4 || t.NumOut() != 2 {
		return nil, fmt.Errorf("New has a wrong signature: %s", t)
	}
	return &Interpreted{createConfig: createConfig, new: newFunction}, nil
}

// layOut copies what an interpreter reads of the plugin into a folder of a GOPATH: its sources without tests, and then
// the overlay.
func layOut(root, folder string, overlay map[string]string) error {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}

	sources, err := filepath.Glob(filepath.Join(root, "*.go"))
	if err != nil {
		return err
	}
	for _, source := range sources {
		if strings.HasSuffix(source, "_test.go") {
			continue
		}
		text, err := os.ReadFile(source)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(folder, filepath.Base(source)), text, 0o600); err != nil {
			return err
		}
	}

	for name, text := range overlay {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return nil
}

func orDiscard(writer io.Writer) io.Writer {
	return cmp.Or(writer, io.Discard)
}
