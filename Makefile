# Cloche's targets. `make help` says what each one does.
# Variables: V=1 shows every test that passes, RUN=regexp narrows the suites.
# PART=ci makes e2e-firecracker run the part that CI runs, GVISOR=0 leaves out
# gVisor's.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-builtin-rules --no-print-directory

export GOTOOLCHAIN := local
export CGO_ENABLED ?= 0

VERSION  := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
TOOLS    := dist/tools
EMBEDDED := internal/node/artifact/embedded
# What is embedded is addressed by its content, so it must not change with
# Cloche's own revision: no paths, no VCS stamp, no version.
REPRODUCIBLE := -trimpath -buildvcs=false
GOTEST   := go test -json
# The environment of tests that use the real Firecracker on this host.
PROGRAMS := programs=$$(go run ./test/nested/run -programs); env $$programs
REPORT   := dist/testreport $(if $(V),-v)
RUNFLAG  := $(if $(RUN),-run '$(RUN)')
SUITES   := check unit linear drivertest e2e e2e-firecracker redteam chaos

# The packages whose tests are the unit tests: all but the suites, what makes
# machines, and the engine, which takes minutes to build with the race detector
# and is tested with its driver.
UNIT := $$(go list ./... | grep -v -e "/test/" -e "/internal/node/driver/" -e "/internal/engine" -e "/cmd/cloche-gvisor")

.PHONY: help
help: ## say what each target does
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/' | expand -t 17

.PHONY: deps
deps: ## install the Debian packages and the Python environment that the other targets need
	@scripts/deps.sh all

.PHONY: build
build: $(EMBEDDED)/cloche-guest $(EMBEDDED)/cloche-gvisor ## build bin/cloche with the engine and the guest agent inside
	go build $(REPRODUCIBLE) -ldflags "-s -w -X main.version=$(VERSION)" -o bin/cloche ./cmd/cloche

# go build itself knows whether a binary is up to date.
.PHONY: $(EMBEDDED)/cloche-guest $(EMBEDDED)/cloche-gvisor
$(EMBEDDED)/cloche-guest:
	@go build $(REPRODUCIBLE) -ldflags "-s -w" -o $@ ./cmd/cloche-guest
$(EMBEDDED)/cloche-gvisor:
	@go build $(REPRODUCIBLE) -ldflags "-s -w" -o $@ ./cmd/cloche-gvisor

.PHONY: generate
generate: tools ## regenerate the code of the guest protocol and of the HTTP API
	@scripts/generate.sh

.PHONY: tools
tools:
	@mkdir -p $(TOOLS)
	@[ -x $(TOOLS)/golangci-lint ] || echo 'compiling the tools of tools/go.mod (two to three minutes the first time)'
	cd tools && GOBIN='$(CURDIR)/$(TOOLS)' go install -trimpath -ldflags "-s -w" tool

.PHONY: check
check: tools build dist/testreport ## format, lint, generated code, known vulnerabilities, shell scripts
	@$(REPORT) -v -suite check -out dist/test/check.json -- scripts/check.sh

dist/testreport: $(wildcard internal/house/testreport/*.go)
	@go build -o $@ ./internal/house/testreport

.PHONY: unit
unit: build dist/testreport ## unit tests, with the race detector
	@CGO_ENABLED=1 $(REPORT) -suite unit -out dist/test/unit.json -- $(GOTEST) -race -timeout 20m $(RUNFLAG) $(UNIT)

.PHONY: drivertest
drivertest: build dist/testreport ## hold the gVisor driver to the named contract, and broken drivers to failing it; Firecracker as far as its API goes
	@$(PROGRAMS) $(REPORT) -v -suite drivertest -out dist/test/drivertest.json -- $(GOTEST) -count=1 -timeout 20m $(RUNFLAG) ./internal/node/driver/... ./internal/engine/...

.PHONY: e2e
e2e: build dist/testreport ## drive the built binary as a user would, over HTTP and by CLI
	@$(PROGRAMS) $(REPORT) -v -suite e2e -out dist/test/e2e.json -- $(GOTEST) -count=1 -timeout 30m $(RUNFLAG) ./test/e2e/...

.PHONY: e2e-firecracker
e2e-firecracker: build dist/testreport ## run the drivers on a real Firecracker and on cgroup v2, in a machine under QEMU (PART=ci, RUN, GVISOR=0)
	@$(REPORT) -lines -suite e2e-firecracker -out dist/test/e2e-firecracker.json -- scripts/e2e-firecracker.sh \
		-json -part '$(or $(PART),all)' -run '$(RUN)' -gvisor=$(or $(GVISOR),1)

# The build that can be killed at failpoints and made careless; the engine and
# the agent in it are those of bin/cloche.
.PHONY: dist/chaos/cloche
dist/chaos/cloche: $(EMBEDDED)/cloche-guest $(EMBEDDED)/cloche-gvisor
	@go build -tags clochefaults $(REPRODUCIBLE) -ldflags "-s -w -X main.version=$(VERSION)" -o $@ ./cmd/cloche

.PHONY: chaos
chaos: build dist/chaos/cloche dist/testreport ## kill everything at any time and check every answer (CHAOS_KILLS=500, CHAOS_SEED, CHAOS_TIME)
	@$(REPORT) -lines -suite chaos -out dist/test/chaos.json -- $(GOTEST) -tags clochefaults -count=1 -timeout 90m $(RUNFLAG) ./test/chaos/...

# The build whose gateway can be told to check too little, so that the suite can
# show that it would notice. Never ship it.
.PHONY: dist/weak/cloche
dist/weak/cloche: $(EMBEDDED)/cloche-guest $(EMBEDDED)/cloche-gvisor
	@go build -tags clocheweak $(REPRODUCIBLE) -ldflags "-s -w -X main.version=$(VERSION)" -o $@ ./cmd/cloche

.PHONY: redteam
redteam: build dist/weak/cloche dist/testreport ## try every known way out of a sandbox, and show that each would be one without its rule
	@$(REPORT) -lines -suite redteam -out dist/test/redteam.json -- $(GOTEST) -count=1 -timeout 30m $(RUNFLAG) ./test/redteam/...

.PHONY: linear
linear: build dist/testreport ## check random concurrent histories for linearizability (LONG=1 for 10 000 of them)
	@$(REPORT) -v -suite linear -out dist/test/linear.json -- $(GOTEST) $(if $(LONG),,-short) -count=1 -timeout 30m $(RUNFLAG) ./test/linear/...

.PHONY: test
test: ## everything that CI checks: check, unit, linear, drivertest, e2e, a part of e2e-firecracker, redteam, a short chaos
	@CHAOS_KILLS=$${CHAOS_KILLS:-60} PART=$${PART:-ci} scripts/test.sh $(SUITES)

.PHONY: demo
demo: ## one sandbox's whole life, from nothing to nothing
	@scripts/demo.sh

.PHONY: bench
bench: build ## the benchmarks, each beside its floor
	@go test -count=1 -timeout 60m -v -run '^TestBench' ./test/bench/...

.PHONY: soak
soak: build ## live 2000 whole lives and look for what is not given back (SOAK_CYCLES, SOAK_WORKERS)
	@go test -count=1 -timeout 5h -v -run '^TestSoak' ./test/soak/...

.PHONY: fuzz
fuzz: ## run every fuzz target for a while (FUZZTIME=30s each)
	@scripts/fuzz.sh $${FUZZTIME:-30s}

.PHONY: clean
clean: ## remove what the targets made in this tree
	rm -rf bin dist $(EMBEDDED)/cloche-guest $(EMBEDDED)/cloche-gvisor
