# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone.
# Another Python, or another folder for the environment:  make test PYTHON=python3.12 VENV=/tmp/venv

PYTHON ?= python3
VENV ?= .venv
DATA ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
# pip takes the newest versions; uv can take the lowest that pyproject.toml allows. Without the extras `peft` and
# `privacy`, whose libraries need newer versions than the package itself.
comma := ,
INSTALL_LOWEST := $(INSTALL) uv==0.12.24 && $(BIN)/uv pip install -q --python $(BIN)/python --resolution lowest-direct
# Files that Python and pytest have compiled stay, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=
# One worker per core, with one thread each, and at most eight workers. Each worker begins with consecutive files, so
# workers make the objects shared by tests of a file once. A worker without tests takes tests from another worker.
JOBS ?= $(shell $(PYTHON) -c "import os; print(min(os.cpu_count() or 1, 8))")
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal --durations 10

.PHONY: help venv demo test test-pages test-slow test-gpu test-oldest test-master test-networks test-projects test-portable rehearse lint types docs check-results tutorials dist clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(STAMP) ## install the package and its tools into .venv

# Again only where pyproject.toml has changed.
$(STAMP): pyproject.toml
	@echo "Installing into $(VENV): about two minutes and 6 GB, most of it torch."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(LOWEST),$(INSTALL_LOWEST) -e ".[demo$(comma)flower$(comma)tests]",$(INSTALL) -e ".[dev]")
	@touch $@

demo: $(STAMP) ## DeepLabV3+ on 24 clients, about two minutes; on CamVid with DATA=folder
	$(BIN)/lightning-fed demo $(if $(DATA),--data "$(DATA)") $(ARGS)

test: $(STAMP) ## the tests but for the slow ones, and those of the pages
	$(PYTEST) -m "not slow and not prose" $(ARGS)

test-pages: $(STAMP) ## the tests of what the pages say: links, numbers, names, code, English
	$(PYTEST) -m "prose and not slow" tests/test_pages.py tests/test_results_pages.py tests/test_tutorials.py \
		tests/test_prose.py $(ARGS)

test-slow: $(STAMP) ## the slow tests: reproductions that take minutes
	$(PYTEST) -m slow $(ARGS)

test-gpu: $(STAMP) ## the tests that need a GPU; without one they are skipped
	$(BIN)/pytest -m gpu $(ARGS)

test-oldest: ## the tests on the oldest Python and dependencies allowed, in .venv-oldest
	$(MAKE) test PYTHON=python3.11 VENV=.venv-oldest LOWEST=yes

rehearse: $(STAMP) ## 10,000 rehearsed deployments with faults, an hour on four cores; fewer with ARGS="--seeds 500"
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rehearsal_seeds.py $(ARGS)

test-master: ## what leans on Lightning's own parts, on its master branch, in .venv-master
	$(MAKE) venv VENV=.venv-master
	.venv-master/bin/python -m pip install -qq "lightning @ git+https://github.com/Lightning-AI/pytorch-lightning@master"
	.venv-master/bin/pytest tests/lightning/test_internals.py tests/rounds/test_fused_visits.py tests/test_invariants.py \
		-m "not slow" $(ARGS)

test-networks: ## the tests on Flower (FLOWER=1.42, or its newest) and NVFLARE, in .venv-networks
	$(MAKE) venv VENV=.venv-networks
	.venv-networks/bin/python -m pip install -qq --upgrade nvflare $(if $(FLOWER),"flwr==$(FLOWER).*",flwr)
	.venv-networks/bin/pytest tests/backends -m "not slow" $(ARGS)

test-projects: ## real packages of others, plain and federated, in .venv-projects: a quarter of an hour, 7 GB
	test -x .venv-projects/bin/python || $(PYTHON) -m venv .venv-projects
	.venv-projects/bin/python -m pip install -qq --disable-pip-version-check -e . flwr-datasets pytest==9.2.0 \
		pytest-timeout==2.4.0 hypothesis==6.170.15
	OMP_NUM_THREADS=1 .venv-projects/bin/python -m pytest tests/partitions/test_flower_partition.py
	OMP_NUM_THREADS=1 .venv-projects/bin/python -m tests.projects.packages --out benchmarks/results/projects.md $(ARGS)

test-portable: $(STAMP) ## the tests under settings that stand for other machines: hours
	$(BIN)/python tests/portable.py $(ARGS)

lint: $(STAMP) ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## types
	$(BIN)/mypy

docs: test-pages ## those tests, and the documentation as HTML, in site/
	$(INSTALL) -e ".[docs]"
	$(BIN)/zensical build --strict --config-file mkdocs.yml
	$(BIN)/python docs/_ext/equations.py site

check-results: $(STAMP) ## compute the results' tables again from stored scores; list tables without stored scores
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python benchmarks/check_results.py

tutorials: $(STAMP) ## run the tutorials; write what they print and draw into their pages: some minutes
	OMP_NUM_THREADS=1 $(BIN)/python docs/_ext/tutorials.py $(ARGS)

dist: ## wheel and sdist in dist/, and the wheel tried in an environment of its own
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install -qq --disable-pip-version-check build==1.6.1 twine==7.0.0
	rm -rf dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
	PYTHON=$(PYTHON) .ci/smoke dist/*.whl $(LIBRARIES)

clean: ## remove what the targets made, but for .venv
	rm -rf .mypy_cache .pytest_cache .ruff_cache build dist site runs lightning_logs checkpoints
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
