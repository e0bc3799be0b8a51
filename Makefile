# Every target does its own set-up, can be run again, and is cheap when nothing changed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

ENV := .venv
RUN := $(ENV)/bin
PYTHON ?= 3.11
# --no-deps: a lock is complete, and the CPU engine's own pins cannot be met (override-dependencies in pyproject.toml).
LOCK := requirements/dev-cpu.txt
UV := $(shell command -v uv || echo .tools/bin/uv)
export VIRTUAL_ENV := $(CURDIR)/$(ENV)
export UV_PYTHON_PREFERENCE ?= only-system
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
unexport PYTHONPATH PYTHONHOME

.PHONY: help setup demo test services check bench clean lock reference e2e e2e-api e2e-build e2e-down e2e-up

help: ## show this text
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	echo
	echo '  make demo ARGS="--keep"    flags for the demo;  make test ARGS="-m engine"  flags for pytest'
	echo '  PYTHON=3.12 make setup     another Python (3.11 to 3.13)'

setup: $(ENV)/.installed ## install everything into .venv (about 6 GB with the CPU engine)

demo: setup ## the product at work on two real engines, about ten minutes
	$(RUN)/kvist demo $(ARGS)

services: setup ## redis-server and an S3 server for the tests of shared tiers, where they can be had
	@tools/services.sh

test: setup services ## all tests but the long suites (those: ARGS="-m full")
	$(RUN)/pytest -m "not full" $(ARGS)

check: setup ## lint, format, types, import contracts, layout and style budgets
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/pytest -q tests/test_layout.py tests/test_budgets.py

bench: setup ## run every bench, write docs/benchmarks.md
	$(RUN)/python -m bench.report $(ARGS)

e2e-build: ## build the parts of the e2e cluster into a cache (half an hour the first time)
	@e2e/build $(ARGS)

e2e-up: setup ## a one-node Kubernetes of real parts on this machine, as root (docs/e2e.md)
	@e2e/build
	e2e/cluster up

e2e-down: ## remove it
	@e2e/cluster down

e2e-api: setup ## the tests on a real API server that need no pods: minutes
	@e2e/build --group api
	e2e/cluster api-only
	$(RUN)/pytest e2e/tests -m e2e_api $(ARGS)
	KUBECONFIG=$$(e2e/cluster kubeconfig) $(RUN)/pytest $$(grep -rl KUBECONFIG tests --include='test_*.py')

e2e: e2e-up ## all tests on the e2e cluster
	e2e/images
	$(RUN)/pytest -o faulthandler_timeout=0 e2e/tests $(ARGS)  # pods take minutes; each test has a deadline

reference: setup ## write docs/reference.md, docs/api.md and the CRD from the code
	$(RUN)/python -m kvist_operator.crd > crds/.new
	mv crds/.new crds/cachecluster.yaml
	cp crds/cachecluster.yaml charts/kvist/files/
	$(RUN)/python -m tools.reference
	$(RUN)/python -m tools.api_reference

clean: ## remove the environment, caches and build output
	rm -rf $(ENV) .tools build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Locks hold hashes and no index address. Versions already locked stay unless ARGS=--upgrade.
lock: $(UV) ## resolve requirements/*.txt anew from pyproject.toml (ARGS=--upgrade for newer versions)
	@compile() {
	  echo "requirements/$$1.txt"
	  $(UV) pip compile "$${@:2}" --generate-hashes --universal \
	    --python-version 3.11 --no-emit-index-url --no-header --no-annotate -q -o requirements/$$1.txt $(ARGS)
	}
	compile router pyproject.toml --extra router --extra tracing --extra cli
	compile operator pyproject.toml --extra operator
	compile engine-cpu pyproject.toml --extra connector --extra engine-cpu
	compile dev-cpu pyproject.toml --extra connector --extra router --extra operator --extra cli --extra demo --extra engine-cpu \
	  --group dev --group build
	compile bootstrap --group pyproject.toml:bootstrap

$(ENV)/bin/python: | $(UV)
	@echo "setup: creating $(ENV) with Python $(PYTHON)"
	$(UV) venv --quiet --allow-existing --python "$(PYTHON)" $(ENV) ||
	  $(UV) venv --quiet --allow-existing --python ">=3.11,<3.14" $(ENV)

# Redone when the lock or the project's metadata change; sources are used in place.
$(ENV)/.installed: $(LOCK) pyproject.toml | $(ENV)/bin/python
	@want=$$(sha256sum $(LOCK) pyproject.toml | sha256sum)
	if [ "$$want" != "$$(cat $@ 2>/dev/null || true)" ]; then
	  echo "setup: installing $$(grep -c == $(LOCK)) locked packages (minutes and about 6 GB the first time)"
	  $(UV) pip install --python $(RUN)/python --no-deps --require-hashes -r $(LOCK)
	  $(UV) pip install --quiet --python $(RUN)/python --no-deps --no-build-isolation --editable .
	  echo "$$want" > $@
	  echo "setup: done; next: make demo (ten minutes, two real engines) or make test"
	else
	  touch $@
	fi

.tools/bin/uv:
	@echo "setup: uv is not installed, getting it with pip into .tools"
	python3 -m pip install --quiet --disable-pip-version-check --target .tools --require-hashes -r requirements/bootstrap.txt
