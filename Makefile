PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Packages are installed without byte code, which halves the time that takes; Python then caches what is imported,
# also where the environment tells it not to.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test peers lint docs coverage clean

help: ## list these commands
	@sed -n 's/^\([a-z]*\):.*## /\1:/p' Makefile | awk -F: '{ printf "make %-9s %s\n", $$1, $$2 }'
	@echo 'ARGS="..." is passed on to train, test and coverage; PYTHON=... picks the interpreter (3.11 or newer).'

train: $(INSTALLED) ## train ViT-S/16 in JAX on the handwritten digits
	$(BIN)/python -m train.jax --config vit_s16 $(ARGS)

test: $(INSTALLED) ## run the tests, one process a core
	$(BIN)/python -m pytest -q -n auto $(ARGS)

peers: $(VENV)/.peers ## install timm, transformers, OpenCLIP and torchvision, against which `test` then proves the formats

lint: $(INSTALLED) ## check style, layout and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(INSTALLED) ## build the documentation site in build/docs; warnings are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo 'build/docs/index.html'

# --cov is last: it would take the first of ARGS as its value.
coverage: $(INSTALLED) ## run the tests and list the lines and branches that none reached
	$(BIN)/python -m pytest -q -n auto $(ARGS) --cov

clean: ## remove the environment, caches and build products, but no training run
	rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# Everything at the pinned versions, once, and again when what is declared or pinned changes. pip comes first because
# the one that Python brings is slower, setuptools because with it here no second environment is made for the build.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt --upgrade pip setuptools
	$(BIN)/python -m pip install -qq --no-compile --no-build-isolation -c constraints.txt -e '.[all]'
	@touch $@

$(VENV)/.peers: $(INSTALLED)
	$(BIN)/python -m pip install -qq --no-compile --no-build-isolation -c constraints.txt -e '.[peers]'
	@touch $@
