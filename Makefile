# Two commands do everything, set-up included: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test coverage lint clean

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

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
