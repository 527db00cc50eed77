# Torpor. `make demo` shows it, `make test` tests it; both set up what they need.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PYPROJECTS := pyproject.toml $(wildcard */pyproject.toml sdk/python/pyproject.toml tests/kubernetes/pyproject.toml tests/guests/pyproject.toml)

export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test check lint types layers generated isolated proto lock bench format clean

help:  ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

$(VENV)/complete: requirements.lock $(PYPROJECTS)
	@command -v git >/dev/null || { echo "git is needed; on Debian or Ubuntu: apt-get install git" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is needed (3.11 or later); on Debian or Ubuntu: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) tools/setup.py

setup: $(VENV)/complete  ## the environment in .venv

demo: setup  ## the mesh on an embedded cluster with 30 operators, about a minute
	@$(RUN) -m torpor_cli demo

test: setup check  ## everything: checks and tests, the real Kubernetes built on first use
	@$(RUN) tests/kubernetes/build.py
	@$(RUN) sdk/python/runtime/build.py
	@$(RUN) -m torpor_guests_testing
	$(RUN) -m pytest

check: setup lint types layers generated  ## lint, types, layers, generated files

lint:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types:
	$(VENV)/bin/mypy

layers:
	$(VENV)/bin/lint-imports

generated:
	$(RUN) proto/generate.py --check
	$(RUN) tools/lock.py --check
	$(RUN) docs/generate.py --check

isolated: setup  ## each distribution alone in a fresh environment
	$(RUN) tools/isolated.py

proto: setup  ## regenerate the contracts
	$(RUN) proto/generate.py

lock: setup  ## resolve requirements.lock anew, seeded with itself
	$(RUN) tools/lock.py

bench: setup  ## make bench NAME=wake [QUICK=1]
	@$(RUN) bench/run.py $(NAME)

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove what was made here; caches outside stay
	rm -rf $(VENV) bench/out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
