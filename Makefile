# `make demo`, `make check` and `make test` work on a fresh machine with Python and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests that `make check` leaves out, and folders that run in a second pytest process.
LEFT_OUT := gpu or subprocess or database or browser or interpreter or slow
CHECK_SECOND := tests/evaluation tests/family tests/masks tests/properties
TEST_SECOND := tests/kernels

.PHONY: env demo check test test-gpu lint format bench docs clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# A classifier in Python, a language model on the command line, then a page about each.
demo: env
	$(BIN)/python examples/digits.py --out runs/digits
	$(BIN)/afterdrop train pydoc-small --out runs/words
	$(BIN)/afterdrop evaluate runs/words --num-samples 16 --alphas 0 0.5 1 \
		--multipliers 0 0.5 0.8 1 --stripes 8 --overwrite
	$(BIN)/afterdrop select runs/words
	$(BIN)/afterdrop test runs/words --overwrite
	$(BIN)/afterdrop report runs/digits
	$(BIN)/afterdrop report runs/words

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# $(call side_by_side,FOLDERS,OPTIONS): the tests of FOLDERS in one process, the others in another.
# Each has one thread: the tests are small, and more threads than cores wait for each other.
define side_by_side
	@export OMP_NUM_THREADS=1; \
	$(BIN)/python -m pytest -q -p no:cacheprovider $(2) $(1) > $(VENV)/second.log 2>&1 & second=$$!; \
	$(BIN)/python -m pytest -q $(2) $(addprefix --ignore=,$(1)); first=$$?; \
	wait $$second; second=$$?; echo "== $(1)"; cat $(VENV)/second.log; \
	exit $$((first + second))
endef

# Everything that is fast: the gate before a commit.
check: lint docs
	$(call side_by_side,$(CHECK_SECOND),-m "not ($(LEFT_OUT))")

# Everything: the gate before a merge, and what CI runs.
test: lint docs
	$(call side_by_side,$(TEST_SECOND),)

# On a machine with a GPU: its own tests, and those of the kernels on the device itself.
test-gpu: env
	$(BIN)/python -m pytest tests/gpu tests/kernels

bench: env
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Links of the Markdown pages lead to files, and the names and files that they use exist.
docs: env
	$(BIN)/python docs/check.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
