# `make demo` and `make test` on a fresh clone need Python ≥ 3.11, make and git; everything else is
# put in .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check lint types contracts quick unit coverage docs serve format package faults audit versions clean
.DELETE_ON_ERROR:

demo: .venv/lab
	$(BIN)/mssar demo

# Minutes. `check` is everything, a quarter of an hour and more, and what must pass before a change lands.
test: lint types contracts quick

check: lint types contracts unit

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/dev
	$(BIN)/mypy

contracts: .venv/dev
	$(BIN)/lint-imports --cache-dir .cache/importlinter

quick: .venv/dev
	$(BIN)/pytest -n auto --maxprocesses 8 -m "not slow"

unit: .venv/dev .venv/browser .venv/slurm
	$(BIN)/pytest -n auto --maxprocesses 8

# What no test reaches. It takes twice as long, and nothing fails by it: not part of `make check`.
coverage: .venv/dev .venv/browser .venv/slurm
	$(BIN)/pytest -n auto --maxprocesses 8 --cov --cov-report=term

docs: .venv/docs
	$(BIN)/mkdocs build --strict

serve: .venv/docs
	$(BIN)/mkdocs serve

format: .venv/dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Wheel and sdist in dist, as they would be published.
package: .venv/package
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	PYTHON=$(PYTHON) tools/try-wheel dist/*.whl

# Kills, full disks, torn files and the like, on purpose; minutes, so not part of `make test`.
faults: .venv/dev
	$(BIN)/python tools/inject-faults --write docs/reliability.md

# Known vulnerabilities of what is pinned. It asks PyPI, so it is not part of `make test`.
audit: .venv/audit
	tools/audit

# The oldest and the newest of what is supported, each in an environment of its own; gigabytes.
versions: .venv/nox
	$(BIN)/nox

clean:
	rm -rf .venv .cache site dist

# Installed once, and again when the requirements change.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"mssar needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv .venv

.venv/lab: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[lab]'
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/lab
	$(PIP) --no-build-isolation --editable '.[lab,dev]'
	@touch $@

.venv/package: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) build hatchling twine
	@touch $@

.venv/audit: | .venv/bin/python
	$(PIP) pip-audit
	@touch $@

.venv/nox: | .venv/bin/python
	$(PIP) nox
	@touch $@

.venv/browser: tools/browser | .venv/dev
	@tools/browser
	@touch $@

.venv/slurm: tools/slurm | .venv/dev
	@tools/slurm
	@touch $@

.venv/docs: pyproject.toml constraints.txt | .venv/dev
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@
