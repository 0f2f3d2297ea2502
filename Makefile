# The commands of this project; `make help` lists them. The first one that needs it makes the environment in .venv.

PYTHON ?= python3
# Without a torch the worker's range would take the newest; this one is what the tests are run with.
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/made
# For the test that binds our calls to FlashInfer's signatures, 22 MB. Without what it declares, which is hundreds of
# megabytes for a GPU; the rest of what `import flashinfer` needs is there with torch and the extras.
SIGNATURES := flashinfer-python==0.6.18.post1 'apache-tvm-ffi>=0.1.6,<0.2' nvidia-ml-py

# Two OpenMP threads that spin while another process wants the core run ten times slower than one thread.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo trace-picture dashboard-picture bench bench-quick docs eval train test test-long openai-check k8s-check k8s-run chaos soak lint typecheck format protos sync-client protos-baseline gpu-check clean

help: ## list the commands
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/\1 \2/p' Makefile | while read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done

venv: $(STAMP) ## make the environment in .venv (1 to 2 minutes, once)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "making the environment in .venv: takes a minute or two, once"
	@$(PYTHON) -m venv .venv
	@echo "  installing $(TORCH)"
	@$(BIN)/python -m pip install --quiet '$(TORCH)'
	@echo "  installing fdfo with the extras scheduler, worker, client, bench, gateway, tracing, docs, dev"
	@$(BIN)/python -m pip install --quiet --editable '.[scheduler,worker,client,bench,gateway,tracing,docs,dev]'
	@$(BIN)/python -m pip install --quiet --no-deps $(SIGNATURES)
	@touch $@
	@echo "  done"

demo: $(STAMP) ## start both services, send 12 prompts at once, compare FDFO with sync
	@$(BIN)/python tools/demo.py

trace-picture: $(STAMP) ## the picture of `fdfo trace` in the README, anew; needs Chromium
	$(BIN)/fdfo trace --html fdfo-trace.html --trace-events fdfo-trace.json
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1440,1262 --virtual-time-budget=3000 \
	  --screenshot=docs/pictures/trace.png "file://$(CURDIR)/fdfo-trace.html#0/0/0"

test: lint typecheck ## lint, types and all tests but the long ones (CI runs this)
	$(BIN)/python -m pytest

test-long: $(STAMP) ## what is slow or downloads (up to 40 minutes)
	$(BIN)/python -m pytest -m long

openai-check: $(STAMP) ## the package openai through the gateway smg (half a minute; part of make test)
	$(BIN)/python -m pytest -v tests/e2e/test_openai.py tests/scheduler/test_gateway.py

chaos: $(STAMP) ## faults against real processes, all but the soak, and the table (up to 20 minutes)
	@$(BIN)/python -m tests.chaos all

soak: $(STAMP) ## 20 minutes at saturation: memory, descriptors and speed stay as they are
	@$(BIN)/python -m tests.chaos soak

docs: $(STAMP) ## the site of docs/ into build/site; fails on a warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html; with its search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

lint: $(STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

typecheck: $(STAMP) ## mypy, strict
	$(BIN)/mypy

format: $(STAMP) ## put the code into its form, mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/buf format --write

protos: $(STAMP) ## regenerate the stubs in fdfo/ and the protocol reference with the pinned tools
	$(BIN)/python tools/generate_stubs.py
	$(BIN)/python tools/protocol_reference.py

sync-client: $(STAMP) ## make the blocking client anew from the async one
	$(BIN)/python tools/generate_sync_client.py

protos-baseline: $(STAMP) ## at a release: take today's protos as what must not break
	$(BIN)/buf build --exclude-source-info --output protos/baseline.binpb

# On a machine with its own torch for CUDA and no .venv, that Python is used.
bench: $(STAMP) ## measure everything against its baselines (up to 25 minutes)
	@$(BIN)/python -m bench --json bench.json --markdown docs/figures.md

bench-quick: $(STAMP) ## most of it with five short runs each (about 3 minutes)
	@$(BIN)/python -m bench --quick

eval: $(STAMP) ## the shipped modes give the answers of one request at a time (about 3 minutes)
	@$(BIN)/python -m bench.evaluate

dashboard-picture: $(STAMP) ## docs/pictures/dashboard.png anew; needs Prometheus (about 2 minutes)
	$(BIN)/python -m tools.dashboard_picture

k8s-run: $(STAMP) ## the pods of overlays/dev-cpu run under podman, as root (10 minutes the first time, then 2)
	@$(BIN)/python -m tools.k8s_run --torch "$(TORCH)"

k8s-check: $(STAMP) ## the manifests and Dockerfiles in deploy/ against schemas and against the code (part of make test)
	$(BIN)/python -m pytest tests/deploy

train: $(STAMP) ## make a small model in build/tiny-llada2 (two cores, up to 2 hours; goes on where it was stopped)
	@$(BIN)/python -m tools.train_tiny

gpu-check: ## CUDA against the CPU, FlashInfer, graphs, then a 16B model's speed; needs a GPU (8 minutes)
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/gpu_check.py

clean: ## remove the environment and all caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
