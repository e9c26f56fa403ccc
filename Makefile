# make demo | test | lint on a bare machine: each makes .venv itself, needing Python 3.11 or newer and nothing else.
#
#   PYTHON=python3.12   the interpreter for .venv; otherwise the first of python3.11 ... python3 that is new enough
#   TORCH_INDEX=URL     an extra index for torch, e.g. https://download.pytorch.org/whl/cpu or .../whl/cu130
#   CONSTRAINTS=FILE    versions to install; constraints-ci.txt (with torch for the CPU) where nvidia-smi finds no GPU
#   WORKERS=2           test files side by side in so many processes
#   PYTEST_ARGS="..."   more arguments for pytest

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
CONSTRAINTS ?= $(if $(shell nvidia-smi -L 2>/dev/null),,constraints-ci.txt)
TORCH_INDEX ?=
WORKERS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip

.PHONY: help setup demo test test-gpu lint format clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

# Installed anew when what is asked for changed. A .venv that stopped half-way has no stamp and is gone through again.
$(STAMP): pyproject.toml $(wildcard constraints-*.txt)
	@[ -n "$(PYTHON)" ] || { echo "error: no Python 3.11 or newer on this machine"; \
		echo "  why: tried python3.11 to python3.14 and python3"; \
		echo "  next: install one, or name it: make PYTHON=/path/to/python3"; exit 3; } >&2
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment"; \
		echo "  why: its venv or ensurepip module is missing (Debian and Ubuntu ship it apart)"; \
		echo "  next: install python3-venv, then run make again"; exit 3; } >&2
	$(PIP) install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	@$(BIN)/python -m dz demo

test: $(STAMP)
	@$(BIN)/python -m pytest -m "not gpu" --durations=10 $(if $(WORKERS),-n $(WORKERS) --dist loadfile) $(PYTEST_ARGS)

test-gpu: $(STAMP)
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis
