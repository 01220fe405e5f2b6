# Daily tasks. `make env` sets up .venv; the other targets call it first.

PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
BENCH_STAMP := $(VENV)/.stamp-bench
DOCS_STAMP := $(VENV)/.stamp-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
JOBS ?= 2
LOCK := uv pip compile --universal --python-version 3.11 --no-header --no-emit-index-url --no-annotate \
	--generate-hashes --quiet

.DEFAULT_GOAL := help
.PHONY: help env demo test long check bench docs soak lock clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '%-14s %s\n' "$$name" "$$text"; done

env: $(STAMP) ## Set up .venv with the locked dependencies (PYTHON=... picks the interpreter)

demo: env ## Run the whole path: a click stream through Spark into tables, with processes killed
	$(BIN)/penstock demo

test: check ## Run the static checks, then every tier of tests except those of `make long`
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 25

long: env ## Run the slow tests: Spark killed repeatedly, mutants, the full fault sweeps, the demo
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 10 -m long

check: env ## Check lint, formatting, types and package layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: env $(BENCH_STAMP) ## Measure against raw I/O and against real peers
	$(BIN)/python benchmarks/buffer.py
	$(BIN)/python benchmarks/spark.py
	$(BIN)/python benchmarks/topics.py
	$(BIN)/python benchmarks/topics_live.py
	$(BIN)/python benchmarks/collector.py
	$(BIN)/python benchmarks/quiver.py
	$(BIN)/python benchmarks/otlp.py
	$(BIN)/python benchmarks/coordinator.py
	$(BIN)/python benchmarks/promql.py
	$(BIN)/python benchmarks/timeseries.py
	$(BIN)/python benchmarks/vector.py
	$(BIN)/python benchmarks/console.py
	$(BIN)/python benchmarks/http_cost.py

docs: env $(DOCS_STAMP) ## Build the documentation site into build/site
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/docs_site.py
	@echo "Read it with: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

soak: env ## Run for hours: more seeds, and the tests that `make test` leaves out
	PENSTOCK_SOAK=1 PENSTOCK_SEEDS=$${PENSTOCK_SEEDS:-20000} $(BIN)/python -m pytest -n $(JOBS) \
		-m 'soak or simulation or crash' --timeout 7200

lock: env ## Regenerate the lock files from pyproject.toml
	$(PIP) install uv
	PATH="$(CURDIR)/$(BIN):$$PATH" $(LOCK) --upgrade --extra dev --extra spark --extra iceberg --extra topics --extra collector --extra databases --extra timeseries --extra vector \
		pyproject.toml -o requirements.lock
	PATH="$(CURDIR)/$(BIN):$$PATH" $(LOCK) --upgrade --extra bench -c requirements.lock \
		pyproject.toml -o requirements-bench.lock
	PATH="$(CURDIR)/$(BIN):$$PATH" $(LOCK) --upgrade --extra docs -c requirements.lock \
		pyproject.toml -o requirements-docs.lock

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements.lock pyproject.toml
	@set -e; found=; \
	for python in $(if $(PYTHON),"$(PYTHON)",python3.13 python3.12 python3.11 python3); do \
		if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			found="$$python"; break; \
		fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "No Python 3.11 or newer found: install one, or run 'make env PYTHON=/path/to/python'." >&2; exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv --clear $(VENV)
	$(PIP) install --no-compile --no-deps --require-hashes -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(BENCH_STAMP): requirements-bench.lock $(STAMP)
	$(PIP) install --no-compile --no-deps --require-hashes -r $<
	@touch $@

$(DOCS_STAMP): requirements-docs.lock $(STAMP)
	$(PIP) install --no-compile --no-deps --require-hashes -r $<
	@touch $@
