# Everything runs from a virtual environment of its own, made by `make setup` (idempotent).
#   make setup       the CPU stack where there is no GPU, the GPU extra where there is one; PYTHON= names the Python.
#                    STACK=users|next|latest|newest makes another set of versions in .venv_STACK, here and in what follows;
#                    STACK=verl-git VERL=PATH has a checkout of verl in place of the released one
#   make quickstart  GRPO on a tiny Mixture-of-Experts, start to end
#   make test        the whole test suite
#   make test-fast   the core's tests, for the inner loop: no vLLM, no Ray (under 3 min)
#   make test-stack  the tests that a stack is for (any of .ci/stacks/)
#   make test-long   the tests that the suite leaves out for their time
#   make parity      every family on every mesh against the plain model; prints and writes the table (about 20 min)
#   make kernels     compiles every Triton kernel for GPUs that are not there, and checks registers, spills, shared memory
#   make memory      peak memory of a step beside the prediction
#   make bench-experts  the experts layer beside transformers', torchtitan's and SonicMoE's (about 5 min)
#   make bench-step  the engine's step beside verl's fsdp2 engine, and its bytes on the wire (about 6 min)
#   make bench-rivals  an update beside transformers' own expert parallelism, in the stack newest (about 12 min)
#   make bench-blocks  an MoE block with expert parallelism beside torchtitan's (about 1 min)
#   make bench-sync  a weight sync beside verl's stock export (about 10 min)
#   make bench-scale  seconds of Python for syncs, plans and loads of published sizes, up to 1,024 ranks (about 3 min)
#   make peers       the environment of torchtitan and SonicMoE, for bench-experts and bench-blocks
#   make verl-scripts  verl's own example scripts with engine=epfsdp2 added (VERL=a checkout of verl; about 5 min)
#   make gpu-check  everything that a visit to a machine with a GPU can tell, in under ten minutes; without one, what can run
#   make gpu-run     GRPO by main_ppo with vLLM on one GPU, and again with CUDA graphs and offloading (about 10 min)
#   make gpu-site    collects in .gpu_run what gpu-run needs on a machine without a network (about 10 min)
#   make gpu-wheels  collects in .whl what that machine may lack (GPU_PYTHON=its Python, 3.12)
#   make lint        ruff check, ruff format, mypy

PYTHON ?=
STACK ?= default
GPU_PYTHON ?= 3.12
VENV := .venv$(if $(filter-out default,$(STACK)),_$(STACK))
PEERS := .venv_peers
BIN := $(VENV)/bin

.PHONY: help setup quickstart test test-fast test-stack test-long parity kernels memory peers bench-experts bench-step \
	bench-rivals bench-blocks bench-sync bench-scale verl-scripts gpu-check gpu-run gpu-site gpu-wheels lint clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml .ci/setup $(wildcard .ci/stacks/*.txt)
	PYTHON=$(PYTHON) bash .ci/setup $(STACK)
	@touch $@

quickstart: setup
	$(BIN)/python -m epfsdp2.recipes.quickstart $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not long" -n 2 --durations=25 $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m "fast and not long" -n 2 --durations=10 $(ARGS)

test-stack: setup
	$(BIN)/python -m pytest -m "not long" -n 2 $(shell cat .ci/stacks/$(STACK).tests 2>/dev/null) $(ARGS)

test-long: setup
	$(BIN)/python -m pytest -m long $(ARGS)

parity: setup
	$(BIN)/python -m tests.parity $(ARGS)

memory: setup
	$(BIN)/python -m benchmarks.update.memory $(ARGS)

peers: $(PEERS)/.ready

$(PEERS)/.ready: .ci/setup_peers benchmarks/experts/peers.txt
	PYTHON=$(PYTHON) bash .ci/setup_peers $(PEERS)
	@touch $@

bench-experts: setup peers
	$(BIN)/python -m benchmarks.experts.compare $(ARGS)

bench-step: setup
	$(BIN)/python -m benchmarks.update.step $(ARGS)

bench-rivals:
	$(MAKE) setup STACK=newest
	.venv_newest/bin/python -W ignore -m benchmarks.rivals.compare $(ARGS)

bench-blocks: peers
	$(PEERS)/bin/python -W ignore -m benchmarks.rivals.blocks $(ARGS)

bench-sync: setup
	$(BIN)/python -m benchmarks.weights.weight_sync $(ARGS)

bench-scale: setup
	$(BIN)/python -m benchmarks.weights.scale $(ARGS)

kernels: setup
	$(BIN)/python -m pytest -m long -k compile tests/engine/moe/gemm/test_compiled.py tests/engine/head tests/engine/dense \
		tests/rollout/quantise $(ARGS)

verl-scripts: setup
	$(BIN)/python -W ignore -m benchmarks.scripts.verl_scripts --verl $(VERL) $(ARGS)

gpu-check:
	bash .ci/gpu_check $(ARGS)

gpu-run:
	bash .ci/gpu_run $(ARGS)

gpu-site: setup
	$(BIN)/python -W ignore -m benchmarks.gpu.gpu_site $(ARGS)

gpu-wheels: setup
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		--implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		-d .whl -r .ci/gpu_wheels.txt
	@ls -l .whl

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/typecheck.py

clean:
	rm -rf build runs outputs *.egg-info
