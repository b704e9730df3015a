# Every target sets up what it needs, once. `make demo` and `make test` are all a new user types.
#
# On a machine whose python3 already has a torch that sees CUDA, .venv borrows that torch and triton.
# Elsewhere it gets the CPU builds that constraints.txt names. NO_VENV=1 installs nothing and uses
# python3 as it is (a GPU machine without a network).

PYTHON ?= python3
# An index with CPU builds of torch, for a machine without a GPU whose own index has only CUDA ones.
TORCH_INDEX ?=

HAS_CUDA = $(PYTHON) -c "import torch; assert torch.cuda.is_available()" 2>/dev/null
CHECK_PYTHON = $(PYTHON) -c "import sys; assert sys.version_info >= (3, 10), \
	f'attngen needs Python 3.10 or later, found {sys.version.split()[0]}: make PYTHON=python3.12'"
# Installed torch and triton as constraints, so that pip keeps them.
FREEZE = $(PYTHON) -c "import torch, triton; \
	print(f'torch=={torch.__version__}\ntriton=={triton.__version__}\nnumpy<2.4')"

# Torch comes first, alone: left to the rest, pip would take a CUDA build of several GB.
CPU_TORCH = PIP install -qq --no-deps --retries 1 -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch

ifdef NO_VENV
PY = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
READY =
INTEGRATIONS =
else
PY = .venv/bin/python
READY = .venv/ready
INTEGRATIONS = .venv/integrations
endif

PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest
NEWEST = OMP_NUM_THREADS=1 .venv-newest/bin/python

.PHONY: demo test accept accept-newest lint format golden gpu-test clean

demo: $(READY)
	$(PY) examples/demo.py

# 5 to 9 minutes on 2 cores.
test: lint
	$(PYTEST) -q -n 2 --dist worksteal -m "not gpu and not slow"

# Everything: the slow tests, every case in both dtypes, every shipped record compiled for its
# arch, the newest Triton that the package supports, and the libraries that it plugs into.
accept: lint accept-newest $(INTEGRATIONS)
	$(PYTEST) -q -n 2 --dist worksteal -m "not gpu" --durations=20

accept-newest: .venv-newest/ready
	$(NEWEST) -c "import triton; print('Triton', triton.__version__)"
	$(NEWEST) -m pytest -q -n 2 -m "not gpu" tests/test_cases.py tests/test_compile_only.py

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

golden: $(READY)
	$(PYTEST) -q tests/test_render.py tests/test_refusals.py --update-golden

# On a machine with a GPU; add `NO_VENV=1` where there is no network, GPU_JOBS="-n 4" to share it.
# The tuner and the host's time run by themselves: one compiles on all cores, the other is measured.
ALONE = tests/test_tuner_workers.py tests/gpu/test_host_time.py
gpu-test: $(READY)
	$(PY) -m pytest -q -m gpu tests/gpu -p no:benchmark --ignore tests/gpu/test_host_time.py $(GPU_JOBS)
	$(PY) -m pytest -q -m gpu $(ALONE) -p no:benchmark

clean:
	rm -rf .venv .venv-newest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/ready: pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	@if $(HAS_CUDA); then \
		echo "set-up: .venv with this machine's torch and triton"; \
		$(PYTHON) -m venv --system-site-packages .venv && \
		$(FREEZE) > .venv/constraints.txt && \
		.venv/bin/python -m pip install -qq -c .venv/constraints.txt -e ".[dev]"; \
	else \
		echo "set-up: .venv with CPU builds of torch and triton (a few minutes)"; \
		$(PYTHON) -m venv .venv && \
		$(subst PIP,.venv/bin/python -m pip,$(CPU_TORCH)) && \
		.venv/bin/python -m pip install -qq -c constraints.txt -e ".[dev]"; \
	fi
	@touch $@

# transformers and diffusers, whose tests are skipped without them; torch stays as it is.
.venv/integrations: .venv/ready
	.venv/bin/python -c "import torch, triton, numpy; \
		print(f'torch=={torch.__version__}\ntriton=={triton.__version__}\nnumpy=={numpy.__version__}')" \
		> .venv/installed.txt
	.venv/bin/python -m pip install -qq -c .venv/installed.txt -e ".[integrations]"
	@touch $@

# The same with the newest Triton that pyproject.toml allows; compiling for a GPU needs none.
.venv-newest/ready: pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	@echo "set-up: .venv-newest with the newest supported Triton"
	$(PYTHON) -m venv .venv-newest
	grep -v '^triton' constraints.txt > .venv-newest/constraints.txt
	$(subst PIP,.venv-newest/bin/python -m pip,$(CPU_TORCH))
	.venv-newest/bin/python -m pip install -qq -c .venv-newest/constraints.txt --upgrade \
		--upgrade-strategy eager -e ".[dev]"
	@touch $@
