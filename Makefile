# The commands of this project; `make help` lists them. The first one that needs it makes the environment in .venv.

PYTHON ?= python3
# Without a torch the worker's range would take the newest; this one is what the tests are run with.
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/made

# Two OpenMP threads that spin while another process wants the core run ten times slower than one thread.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo bench bench-quick eval train test test-long chaos soak lint typecheck format protos protos-baseline gpu-check clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1 \2/p' Makefile | while read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done

venv: $(STAMP) ## make the environment in .venv (1 to 2 minutes, once)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "making the environment in .venv: takes a minute or two, once"
	@$(PYTHON) -m venv .venv
	@echo "  installing $(TORCH)"
	@$(BIN)/python -m pip install --quiet '$(TORCH)'
	@echo "  installing fdfo with the extras scheduler, worker, client, bench, dev"
	@$(BIN)/python -m pip install --quiet --editable '.[scheduler,worker,client,bench,dev]'
	@touch $@
	@echo "  done"

demo: $(STAMP) ## start both services, send 12 prompts at once, compare FDFO with sync
	@$(BIN)/python tools/demo.py

test: lint typecheck ## lint, types and all tests but the long ones (CI runs this)
	$(BIN)/python -m pytest

test-long: $(STAMP) ## what is slow or downloads (up to 40 minutes)
	$(BIN)/python -m pytest -m long

chaos: $(STAMP) ## faults against real processes, all but the soak, and the table (up to 20 minutes)
	@$(BIN)/python -m tests.chaos all

soak: $(STAMP) ## 20 minutes at saturation: memory, descriptors and speed stay as they are
	@$(BIN)/python -m tests.chaos soak

lint: $(STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

typecheck: $(STAMP) ## mypy, strict
	$(BIN)/mypy

format: $(STAMP) ## put the code into its form, mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/buf format --write

protos: $(STAMP) ## regenerate the stubs in fdfo/ with the pinned tools
	$(BIN)/python tools/generate_stubs.py

protos-baseline: $(STAMP) ## at a release: take today's protos as what must not break
	$(BIN)/buf build --exclude-source-info --output protos/baseline.binpb

# On a machine with its own torch for CUDA and no .venv, that Python is used.
bench: $(STAMP) ## measure everything against its baselines (up to 25 minutes)
	@$(BIN)/python -m bench --json bench.json --markdown docs/figures.md

bench-quick: $(STAMP) ## most of it with five short runs each (about 3 minutes)
	@$(BIN)/python -m bench --quick

eval: $(STAMP) ## the shipped modes give the answers of one request at a time (about 2 minutes)
	@$(BIN)/python -m bench.evaluate

train: $(STAMP) ## make a small model in build/tiny-llada2 (two cores, up to 2 hours; goes on where it was stopped)
	@$(BIN)/python -m tools.train_tiny

gpu-check: ## torch attention on CUDA against the CPU; needs a GPU
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/gpu_check.py

clean: ## remove the environment and all caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
