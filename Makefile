# Two commands do everything, set-up included: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test coverage lint clients clean

demo: $(VENV)/.core
	$(BIN)/faircopy demo

test: $(VENV)/.test lint
	$(BIN)/python -m pytest --numprocesses 2

coverage: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses 2 --cov=faircopy --cov-report=term:skip-covered

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check faircopy tests benchmarks runs
	$(BIN)/mypy

# torch first and by itself: its pinned version decides which build is taken.
$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[bench]"
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) --editable ".[test]"
	touch $@

# Clients that take minutes to install; docs/serving.md keeps what they print.
clients: $(VENV)/.test
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-clients/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		schemathesis "lm-eval[api]" transformers guidellm
	$(BIN)/python -m benchmarks.serve_clients --bin .venv-clients/bin

clean:
	rm -rf $(VENV) .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .schemathesis .coverage
