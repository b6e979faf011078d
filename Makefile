# Every target makes its own .venv and installs what it needs; the second run is quick.

PYTHON      ?= python3
VENV        ?= .venv
WORKERS     ?= 2
PYTEST_ARGS ?=
DEMO_ARGS   ?=
BENCH_ARGS  ?=
FAULTS_ARGS ?=
# of `make runs`, `make wrong-calls` and `make load`: how many, from which seed on, for how long
STEPS       ?= 1000000
CALLS       ?= 50000
SEED        ?= 1000
MINUTES     ?= 10
DEVICE      ?= cpu
GPU_WORKERS ?= 12
GPU_PEERS   ?= fla,flashqla,flashinfer,causal-conv1d,torch
RESULTS     ?= benchmarks/results
# address of the repository, for the links and addresses of a release
REPOSITORY  ?=
# distributions that `make wheel` builds: this one, and compiled kernels if `make kernels` made some
PACKAGES    ?= . $(patsubst %/sluice_kernels/manifest.json,%,$(wildcard packages/kernels/sluice_kernels/manifest.json))
# interpreters that the wheels are tried with, by `make wheel`; this one by default
PYTHONS     ?=
# of `make kernels`: the release of Triton that compiles them, and what packages/kernels/build.py takes
KERNELS_BY   := 3.6.0
KERNELS_ARGS ?=
# transformers releases tested beside the newest, always and by test-long; what they do not share
RELEASES      := 5.2.0
LONG_RELEASES := 5.12.1
RELEASE_NEEDS := huggingface-hub==1.33.0 tokenizers==0.22.2 httpx==0.28.1 httpcore==1.0.9 \
  certifi==2026.10.18 typer-slim==0.24.0
# the oldest releases that pyproject.toml allows, tried together by test-oldest, and what they serve:
# no names of newer Tritons, no Scan in onnx 1.18's own evaluator
OLDEST        := torch==2.9.0 triton==3.5.0 numba==0.60.0 transformers==5.0.0 onnx==1.18.0 \
  onnxruntime==1.29.0 onnxscript==0.7.0 safetensors==0.4.3
# torch for a CPU alone, about 200 MB, comes from PyTorch's own index. Where that cannot be reached, pip
# takes the package index's build: with CUDA, about 3 GB, since torch does not start without those libraries
OLDEST_TORCH  ?= --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
OLDEST_TESTS  := tests/test_private.py tests/test_cpu_numba_private.py tests/test_dispatch.py \
  tests/test_errors.py tests/test_contract.py tests/state_pool \
  tests/layers/test_drafts.py tests/layers/test_paths.py \
  tests/integrations/test_transformers.py tests/integrations/test_onnx_nodes.py
# the oldest Triton whose kernels are tested beside the newest, and the GPUs it compiles for
TRITONS       := 3.6.0
TRITON_TESTS  := "not sm_89 and not sm_100"
# where pip-audit looks versions up, by one that is there
ADVISORIES    := https://pypi.org/pypi/pip/25.0/json

PY  := $(VENV)/bin/python
# no bytecode of what nobody imports: an import writes its own
PIP_ALONE := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(PIP_ALONE) --constraint constraints.txt
PIP_OLDEST := $(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
# one thread per worker: WORKERS processes already fill the machine
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# a worker that has nothing left takes over from another; --long where `make test-long` asks for it
WORKERS_OF = -n $(WORKERS) --dist worksteal $(LONG)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo bench bench-gpu bench-docs dev test test-long releases test-oldest test-engines test-gpu test-shipped sanitize-gpu faults runs wrong-calls load audit lint format docs kernels wheel clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo-stamp  ## a Qwen3.5-shaped model: stock transformers and sluice side by side
	$(VENV)/bin/sluice demo $(DEMO_ARGS)

bench: $(VENV)/.dev-stamp  ## every operator beside transformers and ONNX Runtime on this CPU
	$(VENV)/bin/sluice bench --device cpu --json $(RESULTS)/cpu.json --html $(RESULTS)/cpu.html $(BENCH_ARGS)

# With the Python that has torch for the GPU: no .venv, nothing is installed. Peers that are not
# installed are found by BENCH_ARGS="--peer-path flashqla=DIR --peer-path flashinfer=DIR:DIR".
bench-gpu:  ## every operator beside the peers found, on this GPU, in under ten minutes
	PYTHONPATH=src $(PYTHON) -m sluice.cli bench --device cuda --peers $(GPU_PEERS) --time-limit 560 \
	  --json $(RESULTS)/gpu.json --html $(RESULTS)/gpu.html $(BENCH_ARGS)

bench-docs: $(VENV)/.dev-stamp  ## write the tables and the chart of the docs from the results
	$(VENV)/bin/sluice bench --update-docs $(wildcard $(RESULTS)/*.json) docs/benchmarks.md
	$(PY) tools/charts.py

dev: $(VENV)/.dev-stamp  ## only .venv, with what the tests and the linters need

# the whole suite; the GPU kernels in Triton's interpreter; older releases of transformers and Triton
test: $(VENV)/.dev-stamp $(if $(PYTEST_ARGS),,releases)  ## every test
	$(ONE_THREAD) $(PY) -m pytest $(WORKERS_OF) --durations=15 $(PYTEST_ARGS)
	@# the older releases beside the interpreter: half of their time is start and import
	jobs=; beside() { log=$(VENV)/$$1.log; shift; \
	  { $(ONE_THREAD) "$$@" > $$log 2>&1 || failed=1; cat $$log; exit $${failed:-0}; } & jobs="$$jobs $$!"; }; \
	for release in $(if $(PYTEST_ARGS),,$(RELEASES) $(if $(LONG),$(LONG_RELEASES))); do \
	  beside transformers-$$release env PYTHONPATH=$(abspath $(VENV))/transformers-$$release \
	    $(PY) -m pytest $(LONG) tests/integrations/test_transformers*.py \
	    --ignore tests/integrations/test_transformers_bf16.py; \
	done; \
	for release in $(if $(PYTEST_ARGS),,$(TRITONS)); do \
	  beside triton-$$release env PYTHONPATH=$(abspath $(VENV))/triton-$$release \
	    $(PY) -m pytest $(LONG) -k $(TRITON_TESTS) tests/gpu/test_releases.py \
	    tests/gpu/test_backward_compile.py::test_the_kernels_fit tests/gpu/test_backward_compile.py::test_hoppers_kernels_fit tests/gpu/test_untried.py tests/gpu/test_launch.py tests/test_private.py; \
	done; \
	$(ONE_THREAD) TRITON_INTERPRET=1 $(PY) -m pytest $(WORKERS_OF) -k "triton or bits" $(PYTEST_ARGS) \
	  tests/test_contract.py tests/test_borders.py tests/test_prefill_key.py tests/test_transitions.py tests/gpu/test_bits.py tests/gpu/test_sequences.py || failed=1; \
	for job in $$jobs; do wait $$job || failed=1; done; exit $${failed:-0}

test-long: LONG := --long
test-long: $(LONG_RELEASES:%=$(VENV)/transformers-%/.stamp) test  ## `make test` with every combination of options, where it takes some for all

releases: $(RELEASES:%=$(VENV)/transformers-%/.stamp) $(TRITONS:%=$(VENV)/triton-%/.stamp)

test-oldest: $(VENV)-oldest/.stamp  ## the oldest torch, numba, transformers and Triton, in an environment of their own
	$(ONE_THREAD) $(VENV)-oldest/bin/python -m pytest $(WORKERS_OF) --durations=15 -k "not triton and not evaluator" $(PYTEST_ARGS) \
	  $(OLDEST_TESTS)
	$(ONE_THREAD) TRITON_INTERPRET=1 $(VENV)-oldest/bin/python -m pytest $(WORKERS_OF) -k "triton" $(PYTEST_ARGS) \
	  tests/test_contract.py

# vLLM keeps to one process and one thread here, asks nobody, and gets 1 GB for its cache
ENGINES := VLLM_TARGET_DEVICE=cpu VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 \
  VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1

test-engines: $(VENV)-engines/.stamp  ## the plug-ins inside real engines, in an environment of their own
	for engine in vllm sglang; do \
	  $(ENGINES) $(ONE_THREAD) $(VENV)-engines/bin/python -m pytest --durations=15 $(PYTEST_ARGS) \
	    tests/engines/test_$$engine*.py || exit 1; \
	done

# With the Python that has torch for the GPU, as bench-gpu.
test-gpu:  ## the contract, every row of reliability, what is promised on a GPU, and transformers, on this GPU
	$(ONE_THREAD) PYTHONPATH=src $(PYTHON) -m pytest --long -n $(GPU_WORKERS) tests/gpu tests/test_contract.py \
	  tests/test_prefill_*.py tests/integrations/test_transformers*.py \
	  tests/training/test_triton.py tests/training/test_triton_layer.py tests/training/test_hopper.py \
	  tests/training/test_captured.py tests/training/test_deep.py \
	  --deselect tests/gpu/test_cross_compile.py --deselect tests/gpu/test_prefill_compile.py \
	  --deselect tests/gpu/test_releases.py $(PYTEST_ARGS)
	$(ONE_THREAD) PYTHONPATH=src $(PYTHON) -m pytest -n $(GPU_WORKERS) tests/reliability -k "triton or row_11" \
	  $(PYTEST_ARGS)
	@# alone: one of them fills the GPU's memory
	$(ONE_THREAD) PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/bad_luck $(PYTEST_ARGS)

# once with Triton, which compiles what the tests need, then where no process can import it
test-shipped:  ## the contract on shipped kernels, without Triton, on this GPU
	kept=$$(mktemp -d); $(ONE_THREAD) PYTHONPATH=.:src $(PYTHON) -m pytest -n $(GPU_WORKERS) \
	  -p tests.gpu.shipping --keep-kernels $$kept tests/test_contract.py tests/test_prefill_*.py && \
	PYTHONPATH=.:src $(PYTHON) -m tests.gpu.shipping $$kept && \
	$(ONE_THREAD) PYTHONPATH=tools/triton_is_missing:src SLUICE_KERNELS=$$kept \
	  $(PYTHON) -m pytest -n $(GPU_WORKERS) tests/test_contract.py tests/test_prefill_*.py

sanitize-gpu:  ## compute-sanitizer's four tools over every kernel
	for tool in memcheck synccheck initcheck; do \
	  PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool \
	    --error-exitcode 1 --print-limit 5 $(PYTHON) -m tests.gpu.every_kernel || exit 1; \
	done
	PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck \
	  --racecheck-report hazard --show-backtrace no --print-limit 1000000 \
	  $(PYTHON) -m tests.gpu.every_kernel | $(PYTHON) -m tests.gpu.races

# one fault at a time, and the tests that must notice it; SAMPLE=30: so many, drawn by the date
faults: $(VENV)/.dev-stamp  ## put every fault of tools/faults in, and see that a test notices
	$(PY) tools/faults/run.py --workers $(WORKERS) $(if $(SAMPLE),--sample $(SAMPLE)) $(FAULTS_ARGS)

# --strict: a package that cannot be looked up is an error, too
audit: $(VENV)/.torch-stamp  ## known vulnerabilities of the pinned versions; needs a network
	@$(PY) -c 'import urllib.request as web; web.urlopen("$(ADVISORIES)", timeout=20)' 2>/dev/null || \
	  { echo "make audit: $(ADVISORIES) does not answer: nothing was looked up" >&2; exit 1; }
	$(PIP_ALONE) --upgrade --target $(VENV)/audit pip-audit
	PYTHONPATH=$(abspath $(VENV))/audit $(PY) -m pip_audit --strict --disable-pip --no-deps \
	  --requirement constraints.txt

# DEVICE=cuda: on a GPU, with the Python that has torch for it, as bench-gpu
LONG_PY = $(if $(filter cpu,$(DEVICE)),$(PY),$(PYTHON))
$(if $(filter cpu,$(DEVICE)),runs load: $(VENV)/.dev-stamp)

runs:  ## random long runs compared with an oracle: STEPS=1000000 steps from SEED=1000 on; DEVICE=cuda
	$(ONE_THREAD) PYTHONPATH=src $(LONG_PY) -m tests.runs --steps $(STEPS) --seed $(SEED) --device $(DEVICE) \
	  --workers $(if $(filter cpu,$(DEVICE)),1,$(GPU_WORKERS))

wrong-calls: $(VENV)/.dev-stamp  ## CALLS=50000 wrong calls of every function and command, from SEED on
	$(ONE_THREAD) PYTHONPATH=src $(PY) -m tests.wrong_calls --calls $(CALLS) --seed $(SEED)

load:  ## 8 threads against one pool for MINUTES=10, then 200,000 calls of changing shapes; DEVICE=cuda
	PYTHONPATH=src $(LONG_PY) -m tests.load --minutes $(MINUTES) --device $(DEVICE)

lint: $(VENV)/.dev-stamp  ## ruff (rules and format) and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.dev-stamp  ## let ruff rewrite the files
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.docs-stamp  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

kernels: $(VENV)/.dev-stamp $(VENV)/triton-$(KERNELS_BY)/.stamp  ## GPU kernels, compiled for packages/kernels; no GPU is needed
	PYTHONPATH=$(abspath $(VENV))/triton-$(KERNELS_BY) $(PY) packages/kernels/build.py $(KERNELS_ARGS)

wheel: $(VENV)/.release-stamp  ## sdist and wheels in dist/, checked in an empty environment
	rm -rf build/lib build/bdist.* dist
	for package in $(PACKAGES); do \
	  SLUICE_REPOSITORY=$(REPOSITORY) $(PY) -m build --no-isolation --outdir dist $$package || exit 1; \
	done
	$(VENV)/bin/twine check --strict dist/*
	$(PY) tools/check_dist.py dist $(PYTHONS)

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) $(VENV)-engines $(VENV)-oldest build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch first and apart: it is the long download
$(VENV)/.torch-stamp: constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	  sys.exit(f"the pinned versions need Python 3.11 or newer, $(PYTHON) is {v}" if sys.version_info < (3, 11) else 0)'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing torch (about 200 MB for a CPU; a CUDA build is ten times that) ..."
	@$(PIP) setuptools torch
	@touch $@

$(VENV)/.demo-stamp: $(VENV)/.torch-stamp pyproject.toml constraints.txt
	@echo "installing sluice-gdn[demo] ..."
	@$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.torch-stamp pyproject.toml constraints.txt
	@echo "installing sluice-gdn[dev]: test tools, transformers, numba, linters ..."
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.docs-stamp: $(VENV)/.torch-stamp pyproject.toml constraints.txt
	@echo "installing sluice-gdn[docs]: mkdocs-material and mkdocstrings ..."
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

$(VENV)/.release-stamp: $(VENV)/.torch-stamp pyproject.toml constraints.txt
	@echo "installing sluice-gdn[release]: build and twine ..."
	@$(PIP) --no-build-isolation --editable '.[release]'
	@touch $@

$(VENV)-engines/.stamp: tests/engines/requirements.txt pyproject.toml
	@echo "creating $(VENV)-engines: torch, vLLM for a CPU and what it needs (3.3 GB on disk) ..."
	@$(PYTHON) -m venv $(VENV)-engines
	@$(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check 'setuptools>=77'
	@$(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --requirement tests/engines/requirements.txt
	@$(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --editable .
	@touch $@

$(VENV)-oldest/.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info[:2] in ((3, 11), (3, 12)) else \
	  f"the oldest versions need Python 3.11 or 3.12, $(PYTHON) is {v}: make test-oldest PYTHON=python3.11")'
	@echo "creating $(VENV)-oldest: $(OLDEST) ..."
	@$(PYTHON) -m venv --clear $(VENV)-oldest
	@$(PIP_OLDEST) --no-deps $(OLDEST_TORCH) $(filter torch==%,$(OLDEST))
	@$(PIP_OLDEST) 'setuptools>=77' pytest pytest-xdist hypothesis $(OLDEST)
	@$(PIP_OLDEST) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/transformers-%/.stamp: $(VENV)/.dev-stamp
	@echo "installing transformers $* beside the newest ..."
	@$(PIP_ALONE) --no-deps --target $(@D) transformers==$* $(RELEASE_NEEDS)
	@touch $@

$(VENV)/triton-%/.stamp: $(VENV)/.dev-stamp
	@echo "installing Triton $* beside the newest ..."
	@$(PIP_ALONE) --no-deps --target $(@D) triton==$*
	@touch $@
