# Everything here needs Go and make alone; the linter is built, pinned, by the go command.

modules := $(patsubst %/,%,$(sort $(dir $(shell find . -name go.mod))))
linter := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.12.2
# What these two need is large: Traefik itself, and real stores for records. They have targets of their own.
tested := $(filter-out ./testdata/e2e ./testdata/traefik,$(modules))
# The race detector needs a C compiler. Without one the go command reports CGO_ENABLED=0, and the tests run without it.
race := $(if $(filter 1,$(shell go env CGO_ENABLED)),-race)

# Tests are not vetted here, since lint does it, and go test would analyse all that they import for it.
.PHONY: all lint test traefik e2e demo bench
.SILENT:

all: lint test

lint: # Lints every module, and looks in the plugin for what Yaegi breaks.
	echo "Linting $(modules)"
	status=0; go test -count=1 -run=TestPlugin_HasNothingThatYaegiBreaks . || status=1; \
	for module in $(modules); do \
		(cd $$module && $(linter) run --config $(CURDIR)/.golangci.yml) || status=1; \
	done; exit $$status

test: # Tests every module: the root runs the plugin compiled, testdata/yaegi interpreted as Traefik does.
	echo "Testing $(tested) $(if $(race),with the race detector,without the race detector: no C compiler)"
	status=0; for module in $(tested); do \
		(cd $$module && go test $(race) -vet=off -count=1 -timeout=5m ./...) || status=1; \
	done; exit $$status

# Not with the race detector, for which all of Traefik would be compiled once more: the same plugin is raced by testdata/yaegi.
traefik: # Loads the plugin and the examples with Traefik's own packages.
	cd testdata/traefik && go test -vet=off -count=1 -timeout=5m ./...

e2e: # Delivers records to real receivers, which it builds and starts, and looks for them there.
	cd testdata/e2e && go test -vet=off -count=1 -timeout=5m ./...

demo: # Sends requests through the interpreted plugin and shows their records.
	cd examples/demo && go run .

# Several short rounds over everything rather than one long one: what is compared must have had the same machine.
rounds := 4

bench: # Measures what the tap costs, in about 4 minutes. The results of all rounds stay in bench.out, for benchstat.
	set -e; work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	overlay=$$(go run ./testdata/cost/stub . "$$work"); \
	go test -c -o "$$work/tap.test" .; \
	cd testdata/yaegi; \
	go test -c -o "$$work/yaegi.test" .; \
	go test -c -overlay="$$overlay" -o "$$work/stubbed.test" .; \
	: >../../bench.out; \
	for round in $$(seq $(rounds)); do \
		echo "Round $$round of $(rounds)" >&2; \
		{ "$$work/tap.test" -test.run='^$$' -test.bench=. -test.benchtime=20ms && \
			"$$work/stubbed.test" -test.run='^$$' -test.bench=Records -test.benchtime=50ms && \
			"$$work/yaegi.test" -test.run='^$$' -test.bench='Traffic|Bodies' -test.benchtime=200ms; \
		} >>../../bench.out || { tail -n 20 ../../bench.out >&2; exit 1; }; \
	done; \
	go run ./benchtable <../../bench.out
