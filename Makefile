# make train   the environment, then the quickstart        make lint types   ruff, the floors, mypy
# make test    the environment, then the tests             make notebooks    run every notebook
# make test-all  the tests with every case, such as all model types of transformers
# make docs    the documentation site in site/, strictly
# make lowest  the tests with the lowest versions that pyproject.toml allows (asks for uv); TORCH_BACKEND= takes torch from
#              the registry like all else, with CUDA, where PyTorch's own cannot be reached
# make wheel   dist/*.whl                                  make clean        remove what these made
#
# ARGS goes to the command:        make train ARGS="trainer.max_steps=50", make test ARGS="tests/cli -x"
# TORCH chooses the build of it:   make train TORCH="torch --index-url https://download.pytorch.org/whl/cpu"

VENV   ?= .venv
TORCH  ?= torch==2.13.0
EXTRAS ?= quickstart,test
JOBS   ?= 2
ARGS   ?=
TORCH_BACKEND ?= cpu

NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
ifndef PYTHON
PYTHON := $(or $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) $(NEW_ENOUGH) 2>/dev/null && echo $(p)))),python3)
endif

# Ready: an installation of just these, in this folder, ran to its end. UNFINISHED stands from before the first
# package until then and names the make at work, so that one that was killed is made anew, not built upon.
BIN        := $(VENV)/bin
READY      := $(VENV)/.ready-$(shell echo '$(CURDIR) $(TORCH) $(EXTRAS)' | cksum | cut -d' ' -f1)
UNFINISHED := $(VENV)/.unfinished
# An environment whose interpreter is gone (a system upgrade) is not ready either.
$(shell $(BIN)/python $(NEW_ENOUGH) 2>/dev/null || rm -f $(VENV)/.ready-*)

.PHONY: train test test-all lint types notebooks docs lowest wheel environment clean

train: environment
	$(BIN)/embedlab train experiment=quickstart $(ARGS)

# One thread a worker: the workers share the cores already.
test: environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-all: environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --whole $(ARGS)

lint: $(READY)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)-dev
	$(BIN)/mypy

notebooks: $(READY)-notebooks
	$(BIN)/python -m pytest -p no:cacheprovider --nbmake --nbmake-timeout=600 notebooks $(ARGS)

docs: $(READY)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The lowest versions that pyproject.toml allows, in an environment of their own.
lowest:
	uv venv --quiet --clear --python $(PYTHON) $(VENV).lowest
	uv pip install --quiet --python $(VENV).lowest --resolution lowest-direct $(TORCH_BACKEND:%=--torch-backend %) --editable '.[$(EXTRAS)]'
	OMP_NUM_THREADS=1 $(VENV).lowest/bin/python -m pytest -n $(JOBS) $(ARGS)

wheel: environment
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

environment: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) $(NEW_ENOUGH) 2>/dev/null || { \
	  echo "embedlab needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1)." \
	       "Fix: make PYTHON=/path/to/python3.11"; exit 1; } >&2
	@! { test -e $(UNFINISHED) && kill -0 $$(cat $(UNFINISHED)) 2>/dev/null; } || { \
	  echo "another make (process $$(cat $(UNFINISHED))) is installing in $(VENV): wait for it"; exit 1; } >&2
	@test ! -e $(UNFINISHED) || { rm -rf $(VENV).broken; mv $(VENV) $(VENV).broken; }
	@rm -rf $(VENV).broken
	@rm -f $(VENV)/.ready-*
	@$(BIN)/python $(NEW_ENOUGH) 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || $(PYTHON) -m venv --clear $(VENV)
	@echo $$PPID > $(UNFINISHED)
	@echo "Installing $(TORCH), then embedlab[$(EXTRAS)], in $(VENV); once, and it takes some minutes."
	@$(BIN)/python -m pip install --quiet $(TORCH)
	@$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@$(BIN)/embedlab --version
	@rm $(UNFINISHED)
	@touch $@

# What only some targets need comes on top of the same environment.
$(READY)-%: $(READY)
	@$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV).broken $(VENV).lowest dist build site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find embedlab tests -name __pycache__ -type d -prune -exec rm -rf {} +
