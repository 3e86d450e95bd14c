#!/usr/bin/env bash
# Make the virtual environment from a complete lock: deploy/make-venv.sh [cpu|gpu] [FOLDER].
# uv installs it where there is one (a minute), else pip (some minutes). PYTHON names the interpreter, INSTALLER=pip or uv the installer.
set -euo pipefail
kind=${1:-cpu}
venv=${2:-.venv}
installer=${INSTALLER:-$(command -v uv >/dev/null && echo uv || echo pip)}
torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
cd "$(dirname "$0")/.."

if [ "$(uname -s)-$(uname -m)" != "Linux-x86_64" ]; then
  echo "The lock holds Linux x86-64 wheels; this is $(uname -s) $(uname -m). The SDK runs here: pip install ." >&2
  exit 1
fi
python=
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || {
  echo "Python 3.11, 3.12 or 3.13 is needed, and ${PYTHON:-what is on PATH} is none of them. Set PYTHON=/path/to/python3.12." >&2
  exit 1
}

if [ "$installer" = uv ]; then
  # uv reads no settings of pip.
  export UV_FIND_LINKS=${UV_FIND_LINKS-${PIP_FIND_LINKS-}} SSL_CERT_FILE=${SSL_CERT_FILE-${PIP_CERT-}}
  [ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
  [ -x "$venv/bin/python" ] || uv venv --quiet --seed --python "$python" "$venv"
  install() { uv pip install --quiet --python "$venv/bin/python" "$@"; }
else
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  install() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --quiet "$@"; }
fi

# Every file has to have a hash of the lock, and nothing is built but requirements/source.txt. --no-deps keeps out what the lock leaves out on purpose
# (requirements/overrides-cpu.txt).
locked=(--no-deps --require-hashes --only-binary ":all:")

# torch's CPU build lies on disk or in a configured index on some machines, elsewhere on PyTorch's own index only.
# That index is asked only when the first try failed: a dead index makes every install slow.
torch="requirements/torch-$kind.txt"
if [ -f "$torch" ]; then
  install "${locked[@]}" -r "$torch" 2>/dev/null ||
    install "${locked[@]}" --index-url "$torch_cpu_index" -r "$torch"
fi

install "${locked[@]}" -r "requirements/$kind.txt"
install --no-deps --require-hashes --no-build-isolation --no-binary ":all:" -r requirements/source.txt
install --no-deps --no-build-isolation -e .
touch "$venv/.ready-$kind"
