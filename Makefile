# Two commands matter: `make demo` trains the example on two ranks, `make test` runs the tests.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
MPI_STAMP := .venv/.installed-mpi
INTEROP_STAMP := .venv/.installed-interop

.PHONY: setup demo test test-slow test-interop test-cluster lint format bench clean

setup: $(STAMP)

# torch is pinned in the development set-up alone; the package itself allows 2.11 to 2.14.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

demo: setup
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu and not cluster and not interop"

test-slow: setup
	$(BIN)/python -m pytest -m slow

$(INTEROP_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[test,interop]' torch==2.13.0
	touch $@

# Real models and loops of transformers, peft, Accelerate and Fabric; optimizers of bitsandbytes and torchao.
test-interop: $(INTEROP_STAMP)
	$(BIN)/python -m pytest -m interop tests/interop

$(MPI_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[test,mpi]'
	touch $@

# Real launchers on hosts that are network namespaces; needs root. A tier that this machine can run must not be skipped.
test-cluster: $(MPI_STAMP)
	tiers="$$(tests/cluster/prepare.sh)" && \
	SHARDMP_CLUSTER_REQUIRED="$$tiers" $(BIN)/python -m pytest -rs -m cluster tests/cluster

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python benchmarks/step.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
