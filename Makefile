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

.PHONY: demo test faults test-unit test-integration test-megatron test-deepspeed test-sglang test-frameworks test-transports test-vllm rl lint format docs bench bench-cluster clean help

help:
	@echo "make demo              real weights, two trainers, two engines; ARGS=--json for one JSON document"
	@echo "make test              all but the integration tests, with coverage"
	@echo "make test-unit         tests/unit only"
	@echo "make faults            the fault matrix: 10,000 random schedules in virtual time, then every cell with real processes"
	@echo "make test-integration  the slow tests with real engines"
	@echo "make test-megatron     megatron-core's GPTModel and Megatron-Bridge in an environment of its own (.venvs/megatron)"
	@echo "make test-deepspeed    DeepSpeed's ZeRO-3 engine in an environment of its own (.venvs/deepspeed, 1.3 GB)"
	@echo "make test-sglang       SGLang's Qwen3-MoE class in an environment of its own (.venvs/sglang)"
	@echo "make test-frameworks   Ray, verl and TRL with their own classes, in an environment of their own (.venvs/frameworks, 2 GB)"
	@echo "make test-transports   the transports nixl and mooncake over loopback, in an environment of their own (.venvs/transports)"
	@echo "make test-vllm         updates into real vLLM engines on CPU, in an environment of its own (.venvs/vllm, 3.6 GB)"
	@echo "make rl                GRPO on real weights, FSDP2 trainers and a vLLM engine (15 minutes); ARGS='--steps 5 --stage-send'"
	@echo "make lint              ruff, mypy --strict, import contracts"
	@echo "make format            let ruff rewrite"
	@echo "make docs              the documentation site into build/site, in an environment of its own (.venvs/docs)"
	@echo "make bench             the benchmarks; ARGS=name for one"
	@echo "make bench-cluster     the emulated cluster (root; about an hour), tables and plots into docs; ARGS=scenarios for some"
	@echo "make clean             remove .venv, caches and build products"

$(STAMP): $(SETUP_INPUTS)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
	@touch $@

demo: $(STAMP)
	@$(BIN)/weightbridge demo $(ARGS)

test: $(STAMP)
	@bash scripts/test.sh $(BIN)/python $(COVERAGE_FLOOR) $(PYTEST_ARGS)

# Every fault at every worker in every phase, 36 random schedules each: 10,000 in all, about two minutes.
faults: $(STAMP)
	@WEIGHTBRIDGE_SCHEDULES=36 $(BIN)/python -m pytest tests/faults/test_virtual_matrix.py $(PYTEST_ARGS)
	@$(BIN)/python -m tests.faults.matrix $(ARGS)

test-unit: $(STAMP)
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

# pytest ends with 5 when a folder holds no test; that is no failure of this target.
test-integration: $(STAMP)
	@if [ -d tests/integration ]; then \
	    $(BIN)/python -m pytest tests/integration --timeout=600 $(PYTEST_ARGS) || [ $$? -eq 5 ]; \
	else echo "no integration tests: tests/integration does not exist"; fi

# Engines in environments of their own, for the tests of what their real loaders do.
ENGINES := tests/integration/engines

.venvs/%/.installed: $(ENGINES)/requirements-%.txt $(ENGINES)/requirements-%-bare.txt $(ENGINES)/setup.sh
	@PYTHON="$(PYTHON)" bash $(ENGINES)/setup.sh $*

test-megatron: $(STAMP) .venvs/megatron/.installed
	@$(BIN)/python -m pytest tests/integration/test_real_loaders_megatron.py --timeout=600 $(PYTEST_ARGS)

test-deepspeed: $(STAMP) .venvs/deepspeed/.installed
	@$(BIN)/python -m pytest tests/integration/test_real_loaders_deepspeed.py --timeout=600 $(PYTEST_ARGS)

test-sglang: $(STAMP) .venvs/sglang/.installed
	@$(BIN)/python -m pytest tests/integration/test_real_loaders_sglang.py tests/integration/test_frameworks_sglang.py \
	    --timeout=600 $(PYTEST_ARGS)

# Ray, verl and TRL; the library itself is run from src. One process for each: a Ray cluster and TRL's threads are theirs.
test-frameworks: $(STAMP) .venvs/frameworks/.installed
	@for name in ray verl trl; do OMP_NUM_THREADS=1 .venvs/frameworks/bin/python -m pytest \
	    tests/integration/test_frameworks_$$name.py --timeout=600 $(PYTEST_ARGS) || exit $$?; done

# The packages of the transports nixl and mooncake; the library itself is run from src.
.venvs/transports/.installed: requirements/constraints.txt scripts/setup_transports.sh
	@PYTHON="$(PYTHON)" bash scripts/setup_transports.sh
	@touch $@

test-transports: $(STAMP) .venvs/transports/.installed
	@OMP_NUM_THREADS=1 .venvs/transports/bin/python -m pytest tests/conformance/test_transport_nixl.py \
	    tests/conformance/test_transport_mooncake.py --timeout=120 $(PYTEST_ARGS)

VLLM := .venvs/vllm

$(VLLM)/.installed: scripts/setup_vllm.sh $(SETUP_INPUTS)
	@PYTHON="$(PYTHON)" VLLM_VENV="$(VLLM)" bash scripts/setup_vllm.sh
	@touch $@

test-vllm: $(VLLM)/.installed
	@$(VLLM)/bin/python -m pytest tests/integration/test_vllm_core.py tests/integration/test_vllm_versions.py \
	    tests/integration/test_vllm_engines.py --timeout=600 $(PYTEST_ARGS)

# Trainers in $(VENV), the engine in vLLM's environment. `python -m examples.rl.suite` runs all modes and controls.
rl: $(STAMP) $(VLLM)/.installed
	@$(BIN)/python -m examples.rl $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The sources are read for it, not imported: .venv is not needed. What is wrong with a link or a reference is an error.
.venvs/docs/.installed: requirements/docs.txt scripts/setup_docs.sh
	@PYTHON="$(PYTHON)" bash scripts/setup_docs.sh
	@touch $@

docs: .venvs/docs/.installed
	@NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/python -m mkdocs build --strict --clean

bench: $(STAMP)
	@bash scripts/bench.sh $(BIN)/python $(ARGS)

# With Mooncake's transfer engine as one of the methods; without its environment that method is left out.
bench-cluster: $(STAMP) .venvs/transports/.installed
	@bash scripts/bench_cluster.sh $(BIN)/python $(ARGS)

clean:
	rm -rf $(VENV) .venvs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.egg-info' -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete
