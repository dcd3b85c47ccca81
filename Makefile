# Every target does its own set-up in .venv from nothing (scripts/setup.sh) and is quick when that is done.
# Variables: ARGS (for demo and bench), PYTEST_ARGS (for the tests), PYTHON (the interpreter .venv is made with).

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
# Lowest line coverage `make test` accepts, in percent, of what runs inside the test processes.
COVERAGE_FLOOR ?= 80

STAMP := $(VENV)/.installed
SETUP_INPUTS := pyproject.toml scripts/setup.sh requirements/constraints.txt $(wildcard setup.py) \
    $(wildcard src/weightbridge/kernels/*.c src/weightbridge/kernels/*.h src/weightbridge/kernels/*build*.py)

.PHONY: demo test test-unit test-integration lint format bench clean help

help:
	@echo "make demo              real weights, two trainers, two engines; ARGS=--json for one JSON document"
	@echo "make test              all but the integration tests, with coverage"
	@echo "make test-unit         tests/unit only"
	@echo "make test-integration  the slow tests with real engines"
	@echo "make lint              ruff, mypy --strict, import contracts"
	@echo "make format            let ruff rewrite"
	@echo "make bench             the benchmarks; ARGS=name for one"
	@echo "make clean             remove .venv, caches and build products"

$(STAMP): $(SETUP_INPUTS)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
	@touch $@

demo: $(STAMP)
	@$(BIN)/weightbridge demo $(ARGS)

test: $(STAMP)
	@bash scripts/test.sh $(BIN)/python $(COVERAGE_FLOOR) $(PYTEST_ARGS)

test-unit: $(STAMP)
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

# pytest ends with 5 when a folder holds no test; that is no failure of this target.
test-integration: $(STAMP)
	@if [ -d tests/integration ]; then \
	    $(BIN)/python -m pytest tests/integration --timeout=600 $(PYTEST_ARGS) || [ $$? -eq 5 ]; \
	else echo "no integration tests: tests/integration does not exist"; fi

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@bash scripts/bench.sh $(BIN)/python $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.egg-info' -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete
