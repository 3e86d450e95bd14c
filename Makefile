# The two commands of the README are `make demo` and `make test`; each sets itself up.
VENV ?= .venv
PY := $(VENV)/bin/python
SEED ?= 0

.PHONY: demo test lint venv lock docs bench-store bench-gateway bench-judge bench-trainer bench-staleness clean

venv: $(VENV)/.ready-cpu

$(VENV)/.ready-cpu: requirements/cpu.txt pyproject.toml deploy/make-venv.sh
	deploy/make-venv.sh cpu $(VENV)

demo: venv
	$(PY) -m examples.tictactoe.demo --seed $(SEED) --run-dir runs/demo

test: venv
	$(PY) -m pytest

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: venv
	$(PY) -m pipeline.docs
	$(PY) -m store.docs

bench-store bench-gateway bench-judge bench-trainer bench-staleness: bench-%: venv
	$(PY) -m benchmarks.$*

# Needs uv (from PyPI). The CPU lock names torch's CPU build; where no configured index has it, add --extra-index-url.
lock:
	uv pip compile pyproject.toml --extra cpu --extra dev --override requirements/overrides-cpu.txt \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-annotate -o requirements/cpu.txt
	uv pip compile pyproject.toml --extra gpu \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-annotate -o requirements/gpu.txt
	uv pip compile requirements/compat.in \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-annotate -o requirements/compat.txt

clean:
	rm -rf $(VENV) .venv-compat tests/rollout_gateway/agents/node/node_modules runs build *.egg-info
