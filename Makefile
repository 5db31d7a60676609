# `make demo` shows KVPP at work in a real vLLM engine, `make test` tests it in minutes, and
# `make test-full` tests everything. Each makes the virtual environments that it needs by itself;
# the second time that costs nothing.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-contract test-ascend-sim test-ascend-classes test-vllm023 test-matrix bench soak faults traffic lint wheel docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready ## make the virtual environment

$(VENV)/.ready: pyproject.toml .ci/setup .ci/overrides.txt .ci/memcache.txt
	@bash .ci/setup

demo: $(VENV)/.ready ## run KVPP off and on in a real engine and compare
	@$(BIN)/kvpp demo $(ARGS)

# Every test is in one of these sets: tests/contract/test_targets.py says so.
FAST := smoke or not (engine or process or network or grid or faults or vllm023)
REST := not ($(FAST)) and not (faults or vllm023)

test: lint ## lint, type-check and run the fast tests (minutes)
	@$(BIN)/python -m pytest -m "$(FAST)" $(ARGS)

test-full: test docs ## make test, then the site, engines, servers, grids, releases, benchmarks, vLLM 0.23, NPU
	@$(BIN)/python -m pytest -m "$(REST)" $(ARGS)
	@$(MAKE) bench ARGS=--quick
	@$(MAKE) traffic ARGS="--minutes 2"
	@$(MAKE) test-vllm023 ARGS=
	@$(MAKE) test-ascend-sim ARGS=
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
		$(MAKE) test-ascend-classes ARGS=; fi

test-matrix: $(VENV)/.ready ## print where KVPP on = off, for all models, modes and ranks (hours; ARGS="--only mla eager")
	@$(BIN)/python -m tests.matrix $(ARGS)

test-contract: $(VENV)/.ready ## check the hooks in released wheels of vLLM and vllm-ascend
	@$(BIN)/python -m pytest tests/contract/test_hooks.py tests/contract/test_vllm_wheels.py \
		tests/contract/test_ascend_wheels.py $(ARGS)

test-vllm023: $(VENV)-vllm023/.ready ## KVPP, P/D and a pool on vLLM 0.23 as vllm-ascend runs it (no NPU)
	@$(VENV)-vllm023/bin/kvpp doctor
	@$(VENV)-vllm023/bin/python -m pytest -m vllm023 tests/v023 $(ARGS)

$(VENV)-vllm023/.ready: $(VENV)/.ready .ci/setup .ci/overrides-vllm023.txt
	@bash .ci/setup vllm023

test-ascend-sim: $(VENV)-ascend-sim/.ready ## torch-npu over a simulated CANN (ARGS=mutations breaks every ordering once)
	@$(VENV)-ascend-sim/bin/python -m tests.ascend_sim $(ARGS)

$(VENV)-ascend-sim/.ready: .ci/setup .ci/ascend-sim.txt
	@bash .ci/setup ascend-sim

test-ascend-classes: $(VENV)-ascend-sim/classes/.ready ## layouts and hooks on vllm-ascend's own classes (Python 3.11)
	@$(BIN)/python -m tests.ascend_sim.classes $(ARGS)

$(VENV)-ascend-sim/classes/.ready: $(VENV)/.ready .ci/ascend-classes.txt
	@bash .ci/setup ascend-classes

bench: $(VENV)/.ready ## every benchmark, a quarter of an hour (ARGS=--quick: three minutes, does everything work?)
	@$(BIN)/python -m benchmarks all $(ARGS)

soak: $(VENV)/.ready ## random traffic on a small pool, KVPP on against off (ARGS="--minutes 10")
	@$(BIN)/python -m tests.soak $(ARGS)

faults: $(VENV)/.ready ## kill, stop and cut off engines, stores and masters; needs an idle machine
	@$(BIN)/python -m pytest -m faults $(ARGS)

traffic: $(VENV)/.ready ## minutes of traffic through the deployment while its engines are killed (ARGS="--minutes 10")
	@$(BIN)/python -m benchmarks soak $(ARGS)

lint: $(VENV)/.ready ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

wheel: $(VENV)/.ready ## build the wheel into dist/
	@$(BIN)/python -m build --wheel --outdir dist .

# Not --quiet: it hides warnings from --strict, too.
docs: $(VENV)-docs/.ready ## build docs/ as a site into site/; a dead link or anchor is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

$(VENV)-docs/.ready: .ci/docs.txt
	@bash .ci/setup docs

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) $(VENV)-uv $(VENV)-docs $(VENV)-ascend-sim $(VENV)-vllm023 dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
