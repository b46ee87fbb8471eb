# Three commands: `make demo`, `make demo-keras` and `make test`. Each sets up .venv by itself, from pinned versions.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo demo-keras test test-slow soak bench bench-ranks gpu gpu-test gpu-bench lint docs clean

demo: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" demo/run.sh

demo-keras: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" demo/keras.sh

# Two files at a time: tests mostly wait for processes to start.
test: .venv/test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-slow: .venv/test .venv/docs
	$(BIN)/python -m tests.slow $(PARTS)

# About half an hour of injected faults on the demo's data; the last line compares every bit.
soak: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" demo/prepare.sh
	$(BIN)/python -m tests.soak --faults 50
	$(BIN)/python -m tests.soak --faults 20 --runs runs/soak/norm \
		--network tests.support.norm_network:NormNetwork
	$(BIN)/python -m tests.soak --faults 20 --runs runs/soak/sharded --fully-connected sharded

# Each part against its peer, on a CPU that should be otherwise idle; about an hour.
bench: .venv/bench
	$(BIN)/python -m benchmarks $(if $(BENCH),--only $(BENCH))

# Exchanges over ranks of MPI by every all-reduce, and predictions for more; about ten minutes.
bench-ranks: .venv/installed
	$(BIN)/python -m benchmarks.scaling $(BENCH)

# On a machine with a GPU: what it needs, without a CUDA toolkit. PyCUDA takes minutes to compile.
gpu: .venv/gpu
	@$(BIN)/python -c 'from tandem.config.hardware import missing_for_gpus as missing; \
	  print(missing() or "all that GPUs need is installed, but for the driver")'

# Tests and measurements there. GPU_PYTHON=python3 uses the packages already installed there.
GPU_PYTHON ?= $(BIN)/python

# Each part ends within ten minutes; PART="step compiled" runs these two.
PART ?= memory exchange step compiled runs killed ranks parallel

gpu-test: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/gpu)
	@failed=; for part in $(PART); do \
	  echo "tests/gpu/test_$$part.py"; \
	  timeout 600 $(GPU_PYTHON) -m pytest -m gpu tests/gpu/test_$$part.py || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "error: failed or longer than ten minutes:$$failed"; exit 1; }

gpu-bench: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/gpu)
	$(GPU_PYTHON) -m benchmarks.gpu $(BENCH)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Pages from docs/ and from the docstrings, in docs/_build/html; a warning is an error.
docs: .venv/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --fresh-env -d docs/_build/doctrees docs docs/_build/html

clean:
	rm -rf docs/_build docs/api .venv runs/demo runs/demo-keras runs/soak data/demo data/demo-keras

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or later is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name another with 'make PYTHON=python3.12 ...'"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# Compilers of GPU code, which need no GPU: tests compile every kernel.
.venv/test: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[gpu-compile]"
	touch $@

.venv/gpu: .venv/installed gpu/build_pycuda.py
	$(BIN)/python gpu/build_pycuda.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[gpu]"
	touch $@

.venv/bench: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[bench]"
	touch $@

.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	touch $@
