# make demo       set-up and the main job: the recipe, then a text classifier in fp32 and in AMP
# make test       set-up and every test of the two-core budget
# make test-all   the long tests too
# make docs       the site in build/site; any broken link or name is an error
# make wheel      a wheel in build/wheels with the CPU kernels compiled for several processors
# make compat     the suite on another torch: make compat TORCH=2.15.0
# make sanitize   the compiled kernels under AddressSanitizer and UBSan, 20,000 generated calls
# make fuzz       generated programs beside plain torch, until one differs; N=2000 runs as many
# make check      what CI checks: format, lint, types, import layers, documentation blocks, tests
# make gpu        on a machine with a GPU: every test marked cuda, every benchmark against its peers, the page of figures, and what was predicted
# make offline    what the GPU kernels cost a thread, compiled for four GPUs without one
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup demo test test-all check format lint types docs wheel compat sanitize fuzz gpu offline clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/mezzo demo --out runs/demo

test: setup
	$(BIN)/pytest -q -n 3 --dist worksteal

test-all: setup
	$(BIN)/pytest -q -n 3 --dist worksteal -m "not cuda"

format: setup
	$(BIN)/ruff format src tests

lint: setup
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests

types: setup
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: setup
	MEZZO_KERNELS=1 $(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheels .

compat:
	$(PYTHON) benchmarks/compat.py $(TORCH)

sanitize: setup
	PYTHONPATH=. $(BIN)/python -m tests.kernels.test_sanitizers

fuzz: setup
	PYTHONPATH=. $(BIN)/python -m tests.fuzz $(N)

gpu: setup
	$(BIN)/pip install --quiet -c constraints.txt -e ".[peers]"
	$(BIN)/pytest -q -m cuda
	$(BIN)/mezzo bench all --device cuda --out benchmarks/results
	$(BIN)/python benchmarks/performance.py
	$(BIN)/python benchmarks/gpu_model.py --against benchmarks/results/*.json

offline: setup
	$(BIN)/python benchmarks/offline_kernels.py --every

check: lint types docs test

clean:
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
