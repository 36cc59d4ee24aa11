# make demo and make test are all that a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: env demo test test-gpu lint format bench docs clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# First a classifier in Python, then a language model on the command line, then a page about each.
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

# One thread: the tests are many and small, and threads of a busy machine wait for each other. Those
# of the kernels, which Triton interprets, take a third of the time and run beside the others.
test: lint docs
	@export OMP_NUM_THREADS=1; \
	$(BIN)/python -m pytest -p no:cacheprovider tests/kernels > $(VENV)/kernels.log 2>&1 & kernels=$$!; \
	$(BIN)/python -m pytest --ignore=tests/kernels; others=$$?; \
	wait $$kernels; kernels=$$?; echo "== tests/kernels"; cat $(VENV)/kernels.log; \
	exit $$((others + kernels))

# Where there is a GPU: its own tests, and those of the kernels on the device itself.
test-gpu: env
	$(BIN)/python -m pytest tests/gpu tests/kernels

bench: env
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# The docs are Markdown; what can be checked is that their links and the names they use exist.
docs: env
	$(BIN)/python docs/check.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
