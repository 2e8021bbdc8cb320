# The commands of this project. All of them install what they need into .venv first.
# SHELL options: a recipe stops at its first failing command.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo up down test test-slow lint catalog-from-models clean

# The newest Python that the pins were made for comes first; `make demo PYTHON=/path/to/python3.11` names another.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,$(if $(shell command -v $(name)),$(name))))
VENV_PYTHON := .venv/bin/python
PORT ?=
DIR ?=
OUTPUT ?= .demo/catalog
CATALOG ?=
# Most tests wait for processes and databases, so that a second one has room; all on the real Airflow share one.
IN_PARALLEL := -n 2 --dist loadgroup

define install
	@command -v "$(PYTHON)" > /dev/null || { \
	  echo "install: no Python found$(if $(PYTHON), at $(PYTHON)); install Python 3.11" \
	    "(Debian, Ubuntu: apt install python3.11 python3.11-venv)" >&2; exit 1; }
	@"$(PYTHON)" scripts/install.py $(1)
endef

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

demo:  ## product catalogue in, 3D models out, on a real Airflow (CATALOG=file.csv for another catalogue)
	$(call install,examples)
	@exec $(VENV_PYTHON) -m scripts.demo $(if $(CATALOG),--catalog "$(CATALOG)")

up:  ## keep the same Airflow running for the browser (PORT=8090 for another port)
	$(call install,examples)
	@exec $(VENV_PYTHON) -m scripts.background up $(if $(PORT),--port $(PORT))

down:  ## end what `make up` started, or what a crash left
	@if [ -x $(VENV_PYTHON) ]; then exec $(VENV_PYTHON) -m scripts.background down; else echo "no stack was running"; fi

test: lint  ## style, types, layers and the whole test suite
	$(VENV_PYTHON) -m pytest $(IN_PARALLEL) -m "not slow"

test-slow: lint  ## the same with the slow tests
	$(VENV_PYTHON) -m pytest $(IN_PARALLEL)

lint:  ## style, types and import layers only
	$(call install,examples lint test)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	.venv/bin/lint-imports

catalog-from-models:  ## photograph the 3D models in DIR=folder into the catalogue OUTPUT/catalog.csv
	@if [ -z "$(DIR)" ]; then echo "catalog-from-models: name the folder of models, DIR=path" >&2; exit 1; fi
	$(call install,examples)
	$(VENV_PYTHON) -m scripts.render_catalog --models "$(DIR)" --output "$(OUTPUT)"
	@echo "now run: make demo CATALOG=$(OUTPUT)/catalog.csv"

clean:  ## remove the environment, the demo and all caches
	@if [ -x $(VENV_PYTHON) ] && [ -e .demo/airflow/stack.json ]; then $(VENV_PYTHON) -m scripts.background down; fi
	rm -rf .venv .demo dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
