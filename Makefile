# `make` prints this menu. Everything is installed into .venv, nothing outside the checkout.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := menu
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: menu
menu: ## Print this menu
	@echo "Stillhouse"; echo
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' \
	  | awk -F '\t' '{printf "  make %-18s %s\n", $$1, $$2}'

.PHONY: python
python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) was not found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1); Stillhouse needs Python 3.10 or newer. Name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) has no venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (about a minute with a warm cache, several without) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' \
	  || { echo "make: the installation failed. The lines above say which package; with no network, point pip at a mirror (PIP_INDEX_URL)." >&2; exit 1; }
	@touch $@

.PHONY: install
install: $(INSTALLED) ## Create .venv and install everything into it

.PHONY: demo
demo: $(INSTALLED) ## Run the whole pipeline on real reviews: teacher, student, promotion, prediction
	$(BIN)/stillhouse demo $(ARGS)

.PHONY: up
up: $(INSTALLED) ## Start the platform on this machine: no Docker, Ctrl-C stops it
	$(BIN)/stillhouse up $(ARGS)

.PHONY: test
test: $(INSTALLED) ## Run all tests; the servers that they need are started
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

BROWSER := .stillhouse/browser

$(BROWSER)/.installed: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(BROWSER) \
	  playwright==1.65.2 greenlet==3.5.6
	@touch $@

.PHONY: browser-test
browser-test: $(INSTALLED) $(BROWSER)/.installed ## Drive the console in a real Chromium (apt-get install chromium-headless-shell)
	OMP_NUM_THREADS=1 PYTHONPATH=$(BROWSER) $(BIN)/python -m pytest -m browser tests/console $(ARGS)

.PHONY: test-pretrained
test-pretrained: $(INSTALLED) ## Train, distil and serve whole pretrained models (minutes; 700 MB in .stillhouse/models)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m pretrained $(ARGS)

PEERS := .stillhouse/peers

$(PEERS)/.installed: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(PEERS) \
	  sentence-transformers==6.2.0 scikit-learn==1.9.1 scipy==1.17.1 \
	  joblib==1.6.0 threadpoolctl==3.8.0 cloudpickle==3.1.3 narwhals==2.29.0
	@touch $@

.PHONY: test-peers
test-peers: $(INSTALLED) $(PEERS)/.installed ## Load artifacts with sentence-transformers, which nothing else needs
	OMP_NUM_THREADS=1 PYTHONPATH=$(PEERS) $(BIN)/python -m pytest -m peers tests/model $(ARGS)

COMPAT := .venv-compat
COMPAT_INSTALLED := $(COMPAT)/.installed

$(COMPAT_INSTALLED): pyproject.toml constraints.compat.txt | python
	@test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	@echo "Installing torch 2.5.1 and its companions into $(COMPAT) (several GB where pip takes the CUDA build) ..."
	@$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.compat.txt -e '.[dev]'
	@touch $@

.PHONY: compat
compat: $(COMPAT_INSTALLED) ## Run the rank and system tests on torch 2.5.1 (FSDP1), the stack of a DCU
	OMP_NUM_THREADS=1 $(COMPAT)/bin/python -m pytest -n 2 --dist loadfile tests/model tests/training tests/trainer tests/distiller tests/system $(ARGS)

.PHONY: env
env: python ## Write .env for this machine and create the first API key, for docker compose
	$(PYTHON) docker/write_env.py .

.PHONY: compose-test
compose-test: $(INSTALLED) ## Build the images and test the whole pipeline in containers, restarting and killing each service
	$(BIN)/python -m tests.docker.end_to_end $(ARGS)
	$(BIN)/python -m tests.docker.vendor_base

N ?= 300
SEED ?=

.PHONY: faults
faults: $(INSTALLED) ## Inject N random faults into a running platform (an hour for 300; SEED=n repeats them)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.campaign --draws $(N) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: month
month: $(INSTALLED) ## Simulate a month: jobs, promotions and predictions; memory, tables and disk must not grow (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.longevity.month $(ARGS)

.PHONY: adversary
adversary: $(INSTALLED) ## Attack a running API on loopback as a hostile client would, and print what held (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.adversary.run $(ARGS)

.PHONY: restore-test
restore-test: $(INSTALLED) ## Destroy a running platform and restore it from a backup (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.restoration $(ARGS)

.PHONY: check
check: $(INSTALLED) ## Check formatting, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(INSTALLED) ## Format with ruff and apply its automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench-distil
bench-distil: $(INSTALLED) ## Measure the benefit of distillation on the reviews (takes long)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.distillation --write docs/distillation.md $(ARGS)

.PHONY: bench-distil-speed
bench-distil-speed: $(INSTALLED) ## Measure the time saved by caching the teacher's outputs (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.distillation_speed --write docs/distillation.md $(ARGS)

.PHONY: bench-pretrained
bench-pretrained: $(INSTALLED) ## Measure a fine-tuned pretrained model against n-gram counts on few labels (takes long)
	OMP_NUM_THREADS=2 $(BIN)/python -m tests.bench.pretrained --write docs/distillation.md $(ARGS)

SKLEARN := .stillhouse/bench/sklearn

$(SKLEARN)/.installed: | python
	@test -x $(SKLEARN)/bin/python || $(PYTHON) -m venv $(SKLEARN)
	@$(SKLEARN)/bin/python -m pip install --quiet --disable-pip-version-check scikit-learn==1.9.1
	@touch $@

.PHONY: bench-baseline
bench-baseline: $(INSTALLED) $(SKLEARN)/.installed ## Compare the n-gram baseline with scikit-learn's (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.baseline --peer-python $(SKLEARN)/bin/python --write docs/distillation.md $(ARGS)

.PHONY: bench-trainer
bench-trainer: $(INSTALLED) ## Measure our training step against a hand-written loop (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 tests/bench/bench_trainer.py $(ARGS)

.PHONY: bench-data
bench-data: $(INSTALLED) ## Measure a million rows from the upload to the first step (minutes)
	$(BIN)/python -m tests.bench.large_dataset $(ARGS)

.PHONY: bench-serving
bench-serving: $(INSTALLED) ## Measure serving against other servers (minutes; 2 GB in .stillhouse/bench)
	$(BIN)/python -m tests.bench.serving $(ARGS)

.PHONY: bench-encoder
bench-encoder: $(INSTALLED) ## Measure a real encoder against ONNX Runtime and padded transformers (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.encoder $(ARGS)

.PHONY: bench-memory
bench-memory: $(INSTALLED) ## Measure the memory of the API over 20,000 predictions (ARGS="--requests 1000000")
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.serving_memory $(ARGS)

.PHONY: bench-queue
bench-queue: $(INSTALLED) ## Measure the API and the store with ten thousand queued jobs (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.job_queue --write docs/queue.md $(ARGS)

FUZZ := .stillhouse/fuzz/venv

$(FUZZ)/.installed: tests/fuzz/requirements.txt constraints.txt | python
	@test -x $(FUZZ)/bin/python || $(PYTHON) -m venv $(FUZZ)
	@$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/fuzz/requirements.txt
	@touch $@

.PHONY: fuzz
fuzz: $(INSTALLED) $(FUZZ)/.installed ## Fuzz every route of a running API with thousands of requests (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run $(FUZZ)/bin/schemathesis $(ARGS)

.PHONY: fuzz-logs
fuzz-logs: $(INSTALLED) ## Diagnose 20,000 mutated logs: none may raise (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.logs $(ARGS)

AUDIT := .stillhouse/audit/venv

$(AUDIT)/.installed: | python
	@test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	@touch $@

.PHONY: audit
audit: $(AUDIT)/.installed ## Check every pinned version against the advisory database (needs the network)
	@# --strict: a package that could not be looked up is a failure, not a pass.
	for pins in constraints.txt constraints.compat.txt tests/fuzz/requirements.txt; do \
	  $(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r $$pins $(ARGS); \
	done

.PHONY: clean
clean: ## Remove the virtual environment and caches (data directories stay)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
