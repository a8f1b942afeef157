# All that a machine needs is Python 3.11 or newer (with venv and pip) and make: everything else goes into .venv.

PYTHON ?= python3
BENCH_ARGS ?=
PYTEST_ARGS ?=
TWO_AT_A_TIME := --numprocesses=2 --max-worker-restart=0 --dist=loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
# Byte code is made when a module is first imported: of torch's thousands, which take pip a minute, few ever are.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
CREATED := $(VENV)/.stamp-created
CORE := $(VENV)/.stamp-core
DEV := $(VENV)/.stamp-dev
BENCH := $(VENV)/.stamp-bench
WHEEL := $(VENV)/.stamp-wheel
SOURCES := $(shell find src -name '*.py') setup.py mypyc.ini
COMPILED := build/compiled

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-compiled check gputest bench soak wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(CORE)  ## three senders and a receiver: a table and a picture (needs no torch)
	@$(BIN)/crossfade demo

# Two files of tests at a time; PYTEST_ARGS="--numprocesses=0" runs all in one process, as a debugger needs it. Tests start a
# thousand processes, so byte code is kept, whatever the environment says: else each of them would compile crossfade again.
test: export PYTHONDONTWRITEBYTECODE :=
test: check  ## checks, then unit tests and tests with processes
	@$(BIN)/python -m pytest $(TWO_AT_A_TIME) tests/unit tests/cpu $(PYTEST_ARGS)

# The tests of what values pass, over the modules that setup.py names as C extensions.
HOT_TESTS := $(foreach name,asyncio at_once calls channels codec copy_ahead copy_engine copy_graphs debug default dump edges_compiles \
  edges_kept edges_leaks edges_values faults fuzz handler host_copies interrupts kills local_engine p2p random session_ends \
  several static tcp teardown turns_graphs value_cases what_stays,$(wildcard tests/cpu/test_$(name)*.py))
test-compiled: export PYTHONDONTWRITEBYTECODE :=
test-compiled: export PYTHONPATH := $(COMPILED)
test-compiled: $(COMPILED)/.stamp  ## tests of what values pass, over the compiled build (needs a C compiler)
	@$(BIN)/python -m pytest $(TWO_AT_A_TIME) --override-ini pythonpath=. tests/unit $(sort $(HOT_TESTS)) $(PYTEST_ARGS)

check: $(DEV)  ## format, lint, types
	@$(BIN)/ruff format --quiet --check --diff .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --num-workers=2 --no-error-summary

gputest: $(DEV)  ## tests on 1, 2 and 4 GPUs; skipped, with the reason, where there are fewer
	@$(INSTALL) --editable '.[dev,gpu,batches]'
	@$(BIN)/python -m pytest tests/gpu1 tests/gpu2 tests/gpu4 $(PYTEST_ARGS)

bench: $(BENCH)  ## latency of a hop beside Ray Compiled Graph's (BENCH_ARGS="--quick", "--report")
	@$(BIN)/python -m benchmarks.hop_latency $(BENCH_ARGS)

wheel: $(WHEEL)  ## the compiled wheel for this Python, in dist/ (needs a C compiler)
	@rm -rf build/wheel
	@CROSSFADE_COMPILE=1 $(BIN)/python -m build --no-isolation --wheel --outdir build/wheel . >build/wheel.log 2>&1 || \
	  { tail -30 build/wheel.log; exit 1; } >&2
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --strip --wheel-dir dist build/wheel/*.whl
	@ls dist/*.whl

LONG := --hypothesis-profile=soak --timeout=3600
soak: $(DEV)  ## thousands of random graphs, ten minutes of each fuzz test; takes long
	@$(BIN)/python -m pytest tests/unit tests/cpu -m 'hypothesis or soak' $(LONG) $(PYTEST_ARGS)
	@CROSSFADE_FUZZ_S=$${CROSSFADE_FUZZ_S:-600} $(BIN)/python -m pytest tests/soak $(LONG) $(PYTEST_ARGS)

clean:  ## remove .venv and everything that was made
	@rm -rf $(VENV) build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# A virtual environment that was begun and not finished has no stamp, and is begun again.
$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "crossfade needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`"; \
	    echo "hint: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; } >&2
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(CORE): $(INPUTS) | $(CREATED)
	@echo "installing crossfade into $(VENV)"
	@$(INSTALL) --editable .
	@touch $@

$(DEV): $(INPUTS) | $(CREATED)
	@echo "installing crossfade with the extras dev, torch, batches and ray into $(VENV)"
	@$(INSTALL) --editable '.[dev,torch,batches,ray]'
	@touch $@ $(CORE)

$(WHEEL): $(INPUTS) | $(CREATED)
	@echo "installing what builds the compiled wheel into $(VENV)"
	@mkdir -p build
	@$(INSTALL) --editable '.[wheel]'
	@touch $@ $(CORE)

$(COMPILED)/.stamp: $(SOURCES) $(DEV)
	@rm -rf $(COMPILED)
	@mkdir -p $(COMPILED)
	@echo "compiling the hot modules into $(COMPILED)"
	@CROSSFADE_COMPILE=1 $(BIN)/python setup.py -q build --build-lib $(COMPILED) >build/compiled.log 2>&1 || \
	  { tail -30 build/compiled.log; exit 1; } >&2
	@touch $@

$(BENCH): $(INPUTS) | $(CREATED)
	@echo "installing crossfade with the extra bench into $(VENV)"
	@$(INSTALL) --editable '.[bench]'
	@touch $@ $(CORE)
