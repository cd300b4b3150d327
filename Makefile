# `make train` and `make test` on a fresh machine. Everything also works without make: see README.md.
PYTHON ?= python3
ARGS   ?=
# Tests run on so many workers that share nothing, one per core.
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
PYTEST   = python -m pytest --numprocesses $(WORKERS) --dist loadgroup
# What torchrun would choose, without its warning. With cores to spare on a CPU: make train OMP_NUM_THREADS=8
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-slow test-cuda test-cuda-slow mutants chaos gpu-report lint

# One process per GPU, or two CPU processes; flags go in ARGS: make train ARGS="--steps 50 --out runs/try". Muon, because it
# learns in two minutes on a CPU what AdamW, the recipe's default, learns in four.
train: .venv/installed
	.venv/bin/torchrun --nproc_per_node $$(.venv/bin/python -c "import torch; print(torch.cuda.device_count() or 2)") train_llama3.py --optimizer muon --lr 6e-3 $(ARGS)

test: .venv/installed-dev
	.venv/bin/$(PYTEST) -m "not slow and not gpu and not nullcuda" $(ARGS)

test-slow: .venv/installed-dev
	.venv/bin/$(PYTEST) -m "slow and not gpu and not nullcuda" $(ARGS)

# The GPU paths without a GPU: torch's CUDA build (5 GB) on a device that computes nothing, see tests/nullcuda/run.py. It gets an
# environment of its own, unless CUDA_VENV names one that has it: make test-cuda CUDA_VENV=~/cuda
ifndef CUDA_VENV
CUDA_VENV = .venv-cuda
test-cuda test-cuda-slow: .venv-cuda/installed
endif

test-cuda:
	$(CUDA_VENV)/bin/$(PYTEST) tests/nullcuda -m "nullcuda and not slow" $(ARGS)

test-cuda-slow:
	$(CUDA_VENV)/bin/$(PYTEST) tests/nullcuda -m "nullcuda and slow" $(ARGS)

# Do the tests notice a change of one operator, constant, keyword or line? Seconds for one that is caught, a minute for a survivor: runs/mutants.jsonl
mutants: .venv/installed-dev
	.venv/bin/python benchmarks/mutants.py $(ARGS)

# What this machine's GPUs do with it, in 20 minutes at most: runs/gpu_report/report.md. Flags: make gpu-report ARGS="--minutes 5"
gpu-report: .venv/installed
	.venv/bin/python benchmarks/gpu_report.py $(ARGS)

# kill -9 of everything, 20 times, at random moments of one run; CHAOS_KILLS=100 make chaos
chaos: .venv/installed-dev
	CHAOS_KILLS=$${CHAOS_KILLS:-20} .venv/bin/python -m pytest tests/distributed/test_launch.py -s -m slow -k test_chaos $(ARGS)

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python tests/check_types.py

# The stamp files make the next start instant: pip runs again only when a requirements file changes.
.venv/installed: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python ' + sys.version.split()[0] + ' is too old: needs 3.11 or newer; type: make train PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --requirement requirements.txt
	@touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	.venv/bin/python -m pip install --requirement requirements-dev.txt
	@touch $@

# Three equal signs ask for the CUDA build; with two, an index of CPU builds would answer with 2.13.0+cpu.
.venv-cuda/installed: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv-cuda
	sed "s/^torch==/torch===/" requirements.txt > .venv-cuda/requirements.txt
	grep "^pytest" requirements-dev.txt >> .venv-cuda/requirements.txt
	.venv-cuda/bin/python -m pip install --requirement .venv-cuda/requirements.txt
	@.venv-cuda/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is None and 'this is no CUDA build of torch')"
	@touch $@
