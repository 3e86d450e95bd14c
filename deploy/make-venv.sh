#!/usr/bin/env bash
# Make the virtual environment from a complete lock: deploy/make-venv.sh [cpu|gpu] [FOLDER].
set -euo pipefail
kind=${1:-cpu}
venv=${2:-.venv}
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
cd "$(dirname "$0")/.."

if [ "$(uname -s)-$(uname -m)" != "Linux-x86_64" ]; then
  echo "The lock holds Linux x86-64 wheels; this is $(uname -s) $(uname -m)." >&2
  exit 1
fi
"$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || {
  echo "Python 3.11 or newer is needed; $python is $("$python" --version). Set PYTHON=/path/to/python3.11." >&2
  exit 1
}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Every file has to have a hash of the lock, and nothing is built but requirements/source.txt. --no-deps keeps out what the lock leaves out on purpose
# (requirements/overrides-cpu.txt).
locked=(--no-deps --require-hashes --only-binary ":all:")

# torch's CPU build lies on disk or in a configured index on some machines, elsewhere on PyTorch's own index only.
# That index is asked only when the first try failed: a dead index makes every install slow.
torch="requirements/torch-$kind.txt"
if [ -f "$torch" ]; then
  pip install -qq "${locked[@]}" -r "$torch" 2>/dev/null ||
    pip install -qq "${locked[@]}" --index-url "$torch_cpu_index" -r "$torch"
fi

pip install -qq "${locked[@]}" -r "requirements/$kind.txt"
pip install -qq --no-deps --require-hashes --no-build-isolation --use-pep517 --no-binary ":all:" -r requirements/source.txt
pip install -qq --no-deps --no-build-isolation -e .
touch "$venv/.ready-$kind"
