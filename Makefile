# A fresh machine needs Python 3.11 or newer, its venv module and make; all else goes into .venv.
# Another Python:     make demo PYTHON=python3.12
# Options for pytest: make test ARGS="-k cumsum"

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check -qq
ARGS   ?=

.PHONY: help demo test lint docs clean

help:
	@echo "make demo   run the bundled model in both graphs"
	@echo "make test   run the whole test suite"
	@echo "make lint   ruff and mypy"
	@echo "make docs   the support tables docs/ops.md and docs/ops/*.csv"
	@echo "make clean  remove .venv, build folders and caches of the checkout"

demo: $(VENV)/.installed
	@$(PY) -m pyggml demo

test: $(VENV)/.installed-test
	@$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

lint: $(VENV)/.installed-test
	@$(PY) -m ruff check .
	@$(PY) -m mypy

docs: $(VENV)/.installed-test
	@$(PY) -m pyggml test-ops support --write-docs docs

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pyggml models tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The files below say how far .venv has come; each is written last, so a step that failed is done again.

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "pyggml needs Python 3.11 or newer: no $(PYTHON) here; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("pyggml needs Python 3.11 or newer: $(PYTHON) is %d.%d; name another with PYTHON=..." % v)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module: install it (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "installing pyggml and the packages it runs on into $(VENV)"
	@$(PIP) install -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/.created
	@echo "installing pyggml and its test tools into $(VENV)"
	@$(PIP) install -e '.[test]'
	@touch $(VENV)/.installed $@
