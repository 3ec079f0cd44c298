# Needs only make and Python 3.11 or newer; the rest goes into .venv.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
RUN_STAMP := $(VENV)/.installed-run
TEST_STAMP := $(VENV)/.installed-test
DOCS_STAMP := $(VENV)/.installed-docs

.DEFAULT_GOAL := test
.PHONY: demo test test-all test-gpu types docs format clean
.NOTPARALLEL:

# Tests start many processes: each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

# What running Regard needs.
$(RUN_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e .
	touch $@

# What testing it needs; this covers running it too. Modules are compiled when they are imported: most of them never are.
$(TEST_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --no-compile -c constraints.txt -e '.[test]'
	# by themselves: labml asks for torchtext, which ended with PyTorch 2.3, and timm for torchvision, which has no CPU build
	$(PIP) install -q --no-compile --no-deps -c constraints.txt labml labml-nn timm
	touch $(RUN_STAMP) $@

# What building the documentation needs.
$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e '.[docs]'
	touch $(RUN_STAMP) $@

demo: $(RUN_STAMP)
	$(VENV)/bin/python -m regard demo

# Two pytest workers share the cores, so each keeps to one thread. The types are checked meanwhile, and reported last.
test: $(TEST_STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python > $(VENV)/types.txt & types=$$!; \
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.txt; exit $$((tests | types))

# What pyright says of the annotations.
types: $(TEST_STAMP)
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# Also every check on every example: what to run before a change is called done.
test-all: $(TEST_STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --exhaustive

# On a machine with a GPU: what `make test` leaves out. What fails is named at once, and in the file with its traceback.
test-gpu: $(TEST_STAMP)
	REGARD_GPU=1 REGARD_FAILURES=$(VENV)/failures.txt OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m gpu

# Into site/. A warning is a failure, and so is anything that a page would load from elsewhere.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m mkdocs -q build --strict
	@echo "The documentation is in site/: open site/index.html, or for its search: $(VENV)/bin/python -m http.server -d site"

format: $(TEST_STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
