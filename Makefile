# Two commands matter: `make demo` trains the example on two ranks, `make test` runs the tests.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
MPI_STAMP := .venv/.installed-mpi
INTEROP_STAMP := .venv/.installed-interop
BENCH_STAMP := .venv/.installed-bench

.PHONY: setup demo test test-slow test-fuzz test-interop test-cluster test-gpu cluster lint format bench clean

setup: $(STAMP)

# torch is pinned in the development set-up alone; the package itself allows 2.11 to 2.14.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

demo: setup
	OMP_NUM_THREADS=1 $(BIN)/shardmp launch --nproc-per-node 2 examples/train_gpt.py

test: setup
	$(BIN)/python -m pytest -m "not slow and not fuzz and not gpu and not cluster and not interop"

test-slow: setup
	$(BIN)/python -m pytest -m slow

# Calls interrupted at each of their lines, half an hour; then random trainings against the plain reference, some minutes.
test-fuzz: setup
	$(BIN)/python -m pytest -m fuzz -s
	$(BIN)/python tests/test_fuzz.py

$(INTEROP_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[test,interop,deepspeed]' torch==2.13.0
	touch $@

# Real models and loops of transformers, peft, Accelerate and Fabric; optimizers of bitsandbytes and torchao; checkpoints
# of DeepSpeed.
test-interop: $(INTEROP_STAMP)
	$(BIN)/python -m pytest -m interop tests/interop

$(MPI_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[test,mpi]'
	touch $@

# Real launchers on hosts that are network namespaces; needs root. A tier that this machine can run must not be skipped.
test-cluster: $(MPI_STAMP)
	tiers="$$(tests/cluster/prepare.sh)" && \
	SHARDMP_CLUSTER_REQUIRED="$$tiers" $(BIN)/python -m pytest -rs -m cluster tests/cluster

# Builds the image and trains on two containers of two ranks, on a Docker Engine that runs, or one of its own, or podman.
cluster: setup
	$(BIN)/python docker/cluster.py

# The central tests on this machine's GPUs, one rank for each, and what can be seen on CUDA alone.
test-gpu: setup
	SHARDMP_TEST_DEVICE=cuda $(BIN)/python -m pytest -rs -m gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[test,plot]' torch==2.13.0 deepspeed==0.19.8 ninja
	touch $@

# Each 16-bit product that shardmp chooses on this CPU beside the better of torch's and its own; then shardmp beside DDP,
# FSDP2, DeepSpeed and the machine's limits, some ten minutes: let nothing else run meanwhile.
bench: $(BENCH_STAMP)
	$(BIN)/python benchmarks/products.py
	$(BIN)/python benchmarks/peers.py --markdown runs/peers.md --chart docs/peers.png

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
