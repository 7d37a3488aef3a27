#!/usr/bin/env bash
# Make a virtual environment with asyncrl in it: launchers/setup.sh [FOLDER, default .venv] [EXTRAS, default dev]
# Without an NVIDIA GPU it takes PyTorch's CPU build, a tenth of the size. PYTHON names the interpreter (3.11 or newer).
# Installs with uv where there is one, in a fifth of pip's time.
# Versions are those that were tested, launchers/tested.txt; CONSTRAINTS=/dev/null takes the newest that pyproject.toml allows.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv}
extras=${2:-dev}
torch=${TORCH:-torch==2.13.0}
python=${PYTHON:-python3}
stamp="$venv/.asyncrl-$(cat pyproject.toml launchers/setup.sh launchers/tested.txt | cksum | cut -d' ' -f1)-$extras"
cpu_index=https://download.pytorch.org/whl/cpu

[ -e "$stamp" ] && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "asyncrl needs Python 3.11 or newer; $python is $("$python" --version). Name another: PYTHON=python3.12 make run" >&2
    exit 2
}
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
    touch "$venv/.made-by-setup" # so that `make clean` may remove it
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
! command -v uv >/dev/null || pip=(uv pip install --quiet --python "$venv/bin/python")

echo "installing $torch into $venv"
if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1 || ! "$venv/bin/python" - "$cpu_index" <<'PY'
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=5).close()
except OSError:
    sys.exit(1)
PY
then "${pip[@]}" "$torch"
else "${pip[@]}" "$torch" --index-url "$cpu_index"
fi
echo "installing asyncrl and what it needs"
"${pip[@]}" "$torch" --editable ".[$extras]" --constraint "${CONSTRAINTS:-launchers/tested.txt}"
touch "$stamp"
