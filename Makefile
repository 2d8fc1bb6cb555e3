# On a bare machine too:
#   make train     what the quick start needs, then the quick start (configs/quickstart.toml)
#   make test      what developers need, lint, types and the tests; twelve minutes on two cores
#   make test-all  what these leave out: the heaviest tests, real engines, other frameworks
# More: make environment, the installation of make test alone; make long, what takes hours.
# Another Python: make train PYTHON=python3.12. Another run: make train ARGS="run.seed=1 run.name=b".

PYTHON ?= python3
CONFIG ?= configs/quickstart.toml
VENV := .venv
BIN := $(VENV)/bin

# Hundreds of processes start in the tests, and none should compile what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all tests long engines engine-vllm engine-sglang inspect verifiers openenv programs lint types environment clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n '1,7s/^# \{0,1\}//p' Makefile

train:
	@test -f "$(CONFIG)" || { echo "error: CONFIG=$(CONFIG): no such file; expected a configuration such as configs/quickstart.toml" >&2; exit 2; }
	@PYTHON="$(PYTHON)" VENV="$(VENV)" EXTRA=train sh .ci/environment
	$(BIN)/agentenv train $(CONFIG) $(ARGS)

# side by side: mypy alone would leave a processor idle
test: environment
	@$(MAKE) --no-print-directory -j 3 tests types lint

tests: environment
	$(BIN)/python -m pytest -q -n 3 -m "not heavy or promise" $(ARGS)

# real vLLM again, since where it was missing make test has skipped it
test-all: environment
	@sh .ci/viewer
	@PYTHON="$(PYTHON)" sh .ci/mcp-servers
	@$(MAKE) --no-print-directory -j 2 engines inspect verifiers openenv programs
	$(BIN)/python -m pytest -q -n 2 -m "heavy and (not promise or engine_vllm)" $(ARGS)

# what takes longer; writes docs/long-run.md
long: environment
	$(BIN)/python tests/long.py $(PARTS)

# vLLM and SGLang on the CPU, each in an environment of its own, for the engine tests
engines: engine-vllm engine-sglang

engine-vllm engine-sglang: environment
	@PYTHON="$(PYTHON)" sh .ci/$@

# the page of agentenv view, from viewer/ into the package; needs npm
.PHONY: viewer
viewer:
	cd viewer && npm ci --no-fund --no-audit --silent && npm run --silent build

# the site of docs/ in site/; a warning is an error
.PHONY: docs
docs: environment
	@sh .ci/tree
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "open site/index.html; with search: $(BIN)/python -m http.server --directory site"

# Inspect and Inspect Scout, which the tests of exports open these with; OpenEnv for its contract
inspect openenv: environment
	@PYTHON="$(PYTHON)" sh .ci/$@

# verifiers, whose packages the tests run
verifiers: environment
	@PYTHON="$(PYTHON)" sh .ci/$@

# agents of other libraries, each with its packages in .programs/NAME
PROGRAMS := $(patsubst tests/programs/%/program.toml,program-%,$(wildcard tests/programs/*/program.toml))
.PHONY: $(PROGRAMS)
programs: $(PROGRAMS)
$(PROGRAMS): program-%: environment
	@PYTHON="$(PYTHON)" sh .ci/program $*

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/check_words.py

types: environment
	@sh .ci/tree
	cd build/tree && $(CURDIR)/$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

environment:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" EXTRA=dev sh .ci/environment

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-inspect .venv-verifiers .venv-verifiers-classic .venv-mcp .venv-openenv .programs .mypy_cache .ruff_cache .pytest_cache .hypothesis build site *.egg-info
