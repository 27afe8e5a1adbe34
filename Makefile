# `make tune` and `make test` set themselves up: a virtual environment in .venv, made once, renewed when
# pyproject.toml or constraints.txt change. An interrupted set-up leaves no stamp and is finished by the next call.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup tune test check sanitize report screens docs clean

VENV ?= .venv
# --system-site-packages uses the torch that PYTHON already has, whatever its version.
VENV_ARGS ?=
CONFIG ?= configs/mace-mp-medium.toml
# Further options, for example: make tune ARGS="--budget 5m --device cpu"
ARGS ?=
# Test processes: as many as cores, at most 8.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))

# Python keeps the bytecode of what it imports, in .venv, also where the environment forbids that beside the sources:
# else each process compiles torch and e3nn again, for seconds.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode

# The first Python that is recent enough and can make a virtual environment with pip in it.
ADEQUATE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
    $$p -c '$(ADEQUATE)' 2>/dev/null && echo $$p && break; done)
endif
# GPU=no leaves the GPU's packages out where there is one.
ifndef GPU
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes || echo no)
endif

STAMP := $(VENV)/.ready-gpu-$(GPU)
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c $(VENV)/constraints.txt

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 18

setup: $(STAMP)  ## set up .venv only

tune: $(STAMP)  ## tune CONFIG for this machine, write results/ and reports/
	@$(BIN)/equitune tune $(CONFIG) $(ARGS)

# A second -m replaces the first: ARGS="-m slow" runs the tests that are left out.
test: $(STAMP)  ## run the tests but those marked slow (ARGS="-m slow" for these; gpu needs a CUDA device)
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

check: $(STAMP)  ## lint, formatting, types, known vulnerabilities, links of the documents
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/audit
	$(BIN)/python .ci/links

sanitize: $(STAMP)  ## compute-sanitizer over every kernel form, on a GPU
	@$(BIN)/python tests/tools/sanitize.py $(ARGS)

report: $(STAMP)  ## rebuild reports/ from results/ alone
	@$(BIN)/equitune report $(ARGS)

screens: $(STAMP)  ## take the documentation's pictures of a terminal again (minutes)
	@$(BIN)/python docs/screens.py $(ARGS)

docs: $(STAMP)  ## build the documentation site in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)
	echo "site/index.html"

clean:  ## remove what make made: .venv, caches, build output (never results/ or reports/)
	@rm -rf "$(VENV)" build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find autotune kernelgen tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt setup.py
	@if [ -z "$(PYTHON)" ]; then
	    echo "make: no Python >= 3.10 with venv found; install one (Debian, Ubuntu: apt-get install python3-venv)" \
	         "or name it: make PYTHON=/path/to/python3" >&2
	    exit 2
	fi
	echo "setting up $(VENV) with $(PYTHON) (GPU: $(GPU)); this takes minutes the first time"
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV_ARGS) "$(VENV)"
	cp constraints.txt "$(VENV)/constraints.txt"
	if grep -q 'include-system-site-packages = true' "$(VENV)/pyvenv.cfg" && \
	   found=$$($(BIN)/python -c 'import torch; print(torch.__version__)' 2>/dev/null); then
	    echo "using torch $$found of $(PYTHON)"
	    sed -i "s/^torch==.*/torch==$$found/" "$(VENV)/constraints.txt"
	fi
	if [ "$(GPU)" = yes ]; then
	    sed -i -E '/^(cuda|nvidia)-/d' "$(VENV)/constraints.txt"
	fi
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[test]'
	if [ "$(GPU)" = yes ]; then
	    $(PIP) --no-build-isolation --editable '.[peers-gpu]' || \
	        echo "note: cuEquivariance's GPU kernels could not be installed; its column will say so"
	fi
	# The first start would compile all that it imports to bytecode, twice at once, within its budget.
	$(BIN)/python -c "import optuna.storages, torch._dynamo, autotune.report, autotune.tune.run, autotune.measure.timing"
	rm -f "$(VENV)"/.ready-*
	touch $@
