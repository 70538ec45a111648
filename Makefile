# Two commands on a fresh machine: `make demo` and `make test`. Each sets up .venv first (`make setup` alone does only that).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Processes that compute tests at the same time. Where a Slurm is installed one more waits for its clusters.
WORKERS ?= 2
WAITING := $(if $(shell PATH="$$PATH:/usr/sbin" command -v slurmctld 2>/dev/null),1,0)
PYTEST := $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder --numprocesses

# Compiled tests are kept between runs, also where the environment says otherwise: compiling them takes several seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test quick check-all all-tests part lint typecheck check format redraw notebooks clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m sweep run +grid=tiny name=demo launcher=local
	$(BIN)/python -m analysis.report results/demo --out report/demo

# All that a change can break: samples and parts, drawn by a seed, of what has very many cases or long tests alike. With
# PART_SECONDS also about so many seconds of the tests that only check-all runs, drawn by the seed, too.
SEED = $(or $(TESTS_SEED),$(shell date +%F))
test: setup
	$(PYTEST) $$(($(WORKERS) + $(WAITING))) $(if $(PART_SECONDS),--exhaustive-part "$(PART_SECONDS)/$(SEED)",-m "not exhaustive")

# Everything: style, types, every pair of larger layouts, every recorded sweep, what writes pages, notebooks and curves.
check-all: lint typecheck all-tests

all-tests: setup
	$(PYTEST) $$(($(WORKERS) + $(WAITING)))

# That part alone.
part: setup
	$(PYTEST) $(WORKERS) --exhaustive-part "$(or $(PART_SECONDS),60)/$(SEED)" -m exhaustive

# A quick answer while you change code: style, and a part of the tests from every folder.
quick: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) $(WORKERS) -m "not slow and not browser and not slurm and not gpu and not multi_gpu and not exhaustive"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup
	$(BIN)/mypy

check: lint typecheck test

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pictures of the documents, from the recorded sweeps.
redraw: setup
	rm -rf report/engine_rows
	mkdir -p report/engine_rows
	cp -r results/recorded/h200x1_engines results/recorded/h200x2_engines report/engine_rows
	$(BIN)/python -m analysis.report report/engine_rows --out report/engines --figures best_configurations
	cp report/engines/figures/engines_side_by_side.png docs/figures/
	$(BIN)/python -m analysis.compare results/recorded/h200x2_captured_before results/recorded/h200x2_captured --out report/compared
	cp report/compared/figures/compare.png docs/figures/

# The notebooks' outputs. STUDY: the study's table, which is not shipped; without it study.ipynb stays as it is.
notebooks: setup
	$(BIN)/python -m tests.analysis.run_notebooks $(if $(STUDY),--study $(STUDY))

clean:
	rm -rf $(VENV) build report .pytest_cache .mypy_cache .ruff_cache
