# Needs python3 (3.11 to 3.13), make and a package index. Every target makes .venv from the pinned requirements if it is missing.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
VLLM ?= 0.26.0 0.33.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help check test lint format clean

help:
	@echo "make check    run the main job: a small model through its own attention and through ours, and compare"
	@echo "make test     run the tests (ARGS='-k cache' passes arguments to pytest)"
	@echo "make lint     ruff (lint, format) and mypy"
	@echo "make format   let ruff rewrite what it can"
	@echo "make clean    remove caches and .venv"

check: $(VENV)/.run-stamp
	@$(BIN)/sparsemla check $(ARGS)

test: $(VENV)/.dev-stamp $(VENV)/.vllm-stamp
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev-stamp
	@status=0; set -x; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy || status=1; \
	{ set +x; } 2>/dev/null; exit $$status

format: $(VENV)/.dev-stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch goes in first and alone; see requirements/torch.txt.
$(VENV)/.run-stamp: requirements/torch.txt requirements/run.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "sparsemla needs Python 3.11 to 3.13, $(PYTHON) is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/torch.txt
	$(PIP) -r requirements/run.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev-stamp: requirements/dev.txt $(VENV)/.run-stamp
	$(PIP) -r requirements/dev.txt
	@touch $@

# The Python files of real vLLM releases for tests/test_vllm.py, a folder each, as two cannot share a process. Where they cannot
# be had those tests skip and say so, and the next `make test` tries again.
$(VENV)/.vllm-stamp: requirements/vllm.txt | $(VENV)/.run-stamp
	@rm -rf $(VENV)/vllm
	@{ $(PIP) --no-deps --no-compile --target $(VENV)/vllm/common -r requirements/vllm.txt && \
	for release in $(VLLM); do \
	  $(PIP) --no-deps --no-compile --target $(VENV)/vllm/$$release vllm==$$release && \
	  find $(VENV)/vllm/$$release -type f ! -name '*.py' ! -path '*.dist-info/*' -delete || exit 1; \
	done && touch $@; } || echo "vLLM $(VLLM): not installed, tests/test_vllm.py skips what needs it"
