# Every target sets up what it needs: a virtual environment in .venv with pinned dependencies.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COMPOSE := $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: help setup demo up test test-compose lint format bench soak gpu-check images clean

help:
	@echo "make demo          two real replicas and a router; compares cache-aware with round robin; prints the report's path"
	@echo "make up            a local cluster on port 8000 until Ctrl-C"
	@echo "make test          lint, types, architecture and all tests that need no Docker"
	@echo "make test-compose  builds the Compose cluster, tests it for real, takes it down"
	@echo "make lint          ruff, mypy, import-linter      make format   rewrites files to ruff's taste"
	@echo "make bench         measures this machine          make clean    removes what make made"
	@echo "make soak          10 minutes of mixed load with faults, then a verdict on what leaks or fails (SOAK='--seconds 60')"
	@echo "make gpu-check     on a machine with a GPU: checks kernels, answers and transfers in a few minutes"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Warmroute needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up .venv (the first time takes a few minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/python -m loadtest.demo

up: setup
	@$(BIN)/warmroute up

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: lint
	@$(BIN)/pytest

test-compose: setup
	@$(BIN)/pytest tests/compose

images: setup
	@deploy/gather-wheels deploy/wheels
	@$(COMPOSE) build

bench: setup
	@$(BIN)/warmroute bench

soak: setup
	@$(BIN)/python -m loadtest.soak $(SOAK)

gpu-check: setup
	@$(BIN)/python -m loadtest.gpu_check

clean:
	rm -rf .venv build dist reports *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find deploy/wheels -name '*.whl' -delete
