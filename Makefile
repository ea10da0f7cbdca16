# make demo   quantize a real 135M model end to end and print the result (about 3 minutes on 2 cores, after downloads)
# make test   the test suite; make test-all adds the runs of real models; make lint checks style and types
# make kernels  compile every instance of every kernel for every GPU generation, no GPU needed
# Each sets up what it needs in .venv first, from the versions pinned in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# one test process a core; tests/conftest.py gives each one thread
PYTEST := $(BIN)/python -m pytest -n auto
READY := $(VENV)/.ready

.PHONY: demo test kernels test-all lint setup clean
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

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy scripts

clean:
	rm -rf $(VENV) build dist
