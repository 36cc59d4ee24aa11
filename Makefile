# `make demo`, `make check` and `make test` work on a fresh machine with Python and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

PYTEST := $(BIN)/python -m pytest -q

# Tests that `make check` leaves out, and folders that run in a process of their own.
LEFT_OUT := gpu or subprocess or database or browser or interpreter or slow
CHECK_APART := tests/evaluation tests/family tests/masks tests/properties
TEST_APART := tests/chaos tests/kernels tests/report tests/scale tests/tune
TEST_THIRD := tests/e2e tests/fuzz

.PHONY: env demo check test test-gpu test-harness fuzz chaos lint format bench docs wheel clean

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

# $(call side_by_side,COMMANDS,OTHERS,MORE): all at the same time; what the first print comes last.
# Each has one thread: the tests are small, and more threads than cores wait for each other. Three
# keep two cores busy, since some tests only wait for other processes.
define side_by_side
	@export OMP_NUM_THREADS=1; \
	( $(1) ) > $(VENV)/first.log 2>&1 & first=$$!; \
	( :; $(3) ) > $(VENV)/third.log 2>&1 & third=$$!; \
	( $(2) ); second=$$?; \
	wait $$third; third=$$?; cat $(VENV)/third.log; \
	wait $$first; first=$$?; cat $(VENV)/first.log; \
	exit $$((first + second + third))
endef

# Everything that is fast: the gate before a commit.
check: lint
	$(call side_by_side,\
	  $(PYTEST) -p no:cacheprovider -m "not ($(LEFT_OUT))" $(CHECK_APART),\
	  $(BIN)/python docs/check.py && $(PYTEST) -m "not ($(LEFT_OUT))" $(addprefix --ignore=,$(CHECK_APART)))

# Everything: the gate before a merge, and what CI runs.
test: env
	$(call side_by_side,\
	  $(PYTEST) -p no:cacheprovider $(TEST_APART),\
	  $(MAKE) lint && $(PYTEST) $(addprefix --ignore=,$(TEST_APART) $(TEST_THIRD)),\
	  $(PYTEST) -p no:cacheprovider $(TEST_THIRD) && $(MAKE) docs wheel)

# On a machine with a GPU: its own tests, and those of the kernels on the device itself, which set
# Triton's precision for their process.
test-gpu: env
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python -m pytest tests/kernels
	AFTERDROP_CHAOS_DEVICE=cuda $(BIN)/python -m pytest tests/chaos -k "not tuning"

# lm-evaluation-harness on a local task, in an environment of its own: it needs older packages.
test-harness: env
	$(PYTHON) -m venv $(VENV)/harness
	$(VENV)/harness/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 \
		'.[lm-eval]' pytest
	$(VENV)/harness/bin/python -m pytest -q tests/integrations/test_integrations_lm_eval.py
	rm -rf $(VENV)/harness

# Damaged files of every kind, 2,000 per kind; the tests try 115.
fuzz: env
	AFTERDROP_FUZZ=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/fuzz

# Kills and crashes, 20 times as many as the tests have; with killed ranks and workers, 5 times.
chaos: env
	AFTERDROP_CHAOS=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/chaos
	@for round in 1 2 3 4 5; do OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q \
		tests/scale/test_scale_killed.py tests/tune/test_tune_workers.py || exit 1; done

bench: env
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# The documentation site, in build/site: links, names and files exist, and the examples run.
docs: env
	$(BIN)/python docs/check.py
	$(BIN)/python -m sphinx -c docs -b html -q -W --keep-going . build/site

# The wheel, installed in a clean environment: only torch is pinned, everything else is the newest.
wheel: env
	rm -rf dist $(VENV)/wheel
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv $(VENV)/wheel
	$(VENV)/wheel/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 dist/*.whl
	$(VENV)/wheel/bin/python -W error examples/quick_start.py
	$(VENV)/wheel/bin/afterdrop --help > /dev/null
	$(VENV)/wheel/bin/afterdrop doctor
	rm -rf $(VENV)/wheel

clean:
	rm -rf build dist docs/gallery docs/generated $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
