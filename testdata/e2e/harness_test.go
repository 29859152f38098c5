// Package e2e_test delivers records of the interpreted plugin to real receivers, and looks for them there.
//
//	harness_test.go   builds, starts and stops receivers
//	traffic_test.go   exchanges, the clients that make them, and the backend behind the tap
//	verify_test.go    compares what a receiver has with the exchanges that were made
//	<receiver>_test.go  what is particular to one receiver, and its tests
package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/traefik-tap/tap/testdata/yaegi/host"
	"go.uber.org/goleak"
)

// patience is how long a test waits for what must come. It is never waited out when all is well.
const patience = 30 * time.Second

// plugin is the interpreted one. It is loaded once: that takes the interpreter a second.
var plugin host.Plugin

func TestMain(m *testing.M) {
	log.SetOutput(io.Discard)

	var err error
	if plugin, err = host.Interpret(host.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}

	goleak.VerifyTestMain(m)
}

// install builds a command of a module in a pinned version, such as v1.2.3, and returns the path of the binary. It stays in the user's cache
// folder for the next run.
func install(t *testing.T, command, version string) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	require.NoError(t, err)
	name := path.Base(command)
	binary := filepath.Join(cache, "tap-e2e", version, name)
	if _, err := os.Stat(binary); err == nil {
		return binary
	}

	require.NoError(t, os.MkdirAll(filepath.Dir(binary), 0o755))
	// Moved into place when it is whole, so that a build that is interrupted leaves nothing that looks like a binary.
	building, err := os.MkdirTemp(filepath.Dir(binary), "building-")
	require.NoError(t, err)
	defer func() { _ = os.RemoveAll(building) }()

	t.Logf("building %s@%s, once", command, version)
	build := exec.CommandContext(t.Context(), "go", "install", command+"@"+version)
	build.Env = append(os.Environ(), "GOBIN="+building, "GOFLAGS=")
	output, err := build.CombinedOutput()
	require.NoError(t, err, "%s", output)
	require.NoError(t, os.Rename(filepath.Join(building, name), binary))

	return binary
}

// process is a receiver that runs.
type process struct {
	cancel context.CancelFunc
	// exited is closed when the process has ended and err is set.
	exited chan struct{}
	err    error
}

// start runs a command until the test ends or stop is called, and waits until the URL ready answers 200. What the command prints is shown
// if the test fails.
func start(t *testing.T, ready string, command string, args ...string) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{cancel: cancel, exited: make(chan struct{})}
	printed := &output{}

	run := exec.CommandContext(ctx, command, args...)
	run.Stdout, run.Stderr = printed, printed
	run.Cancel = func() error { return run.Process.Signal(os.Interrupt) }
	run.WaitDelay = patience // Then it is killed.
	require.NoError(t, run.Start())
	go func() {
		p.err = run.Wait()
		close(p.exited)
	}()
	t.Cleanup(func() {
		p.stop(t)
		if t.Failed() {
			t.Logf("%s printed:\n%s", filepath.Base(command), printed)
		}
	})

	p.await(t, func() error { return get(ready) })

	return p
}

// stop asks the process to end as an operator does, with an interrupt, and waits until it has. Once it has ended it does nothing.
func (p *process) stop(t *testing.T) {
	t.Helper()
	p.cancel()
	<-p.exited
	// That is what Wait returns for a process that was asked to end and said that all is well.
	if p.err != nil && !errors.Is(p.err, context.Canceled) {
		t.Errorf("the process ended badly: %v", p.err)
	}
}

// await polls until check returns no error, since nothing else tells how far a foreign process is.
func (p *process) await(t *testing.T, check func() error) {
	t.Helper()
	deadline := time.After(patience)
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-poll.C:
		case <-p.exited:
			require.FailNow(t, "the process has ended", "%v; before that: %v", p.err, err)
		case <-deadline:
			require.FailNow(t, "too late", "%v", err)
		}
	}
}

func get(url string) error {
	// A connection of its own, since one that is kept would be a leak when the process ends.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered %s", url, resp.Status)
	}

	return nil
}

// freeAddress returns a port of 127.0.0.1 that nobody listens on, with the host in front.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()

	return listener.Addr().String()
}

// output keeps what a process prints.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()

	return strings.TrimSpace(o.text.String())
}
