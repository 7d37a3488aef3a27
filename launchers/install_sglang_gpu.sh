#!/usr/bin/env bash
# Installs SGLang into a virtual environment of its own on a machine with NVIDIA GPUs.
#
#   launchers/install_sglang_gpu.sh [FOLDER]        default .venv-sglang
#
# Of its own, because SGLang pins other versions of torch and transformers than asyncrl needs. PYTHON names the
# interpreter to build it with (default python3.11). Prints the new interpreter's path, which `generation.sglang.python`
# takes. A second call with the same version does nothing. Without a GPU: launchers/install_sglang_cpu.sh.
set -euo pipefail

venv=${1:-.venv-sglang}
python=${PYTHON:-python3.11}
wanted="sglang==0.5.23"

stamp="$venv/.asyncrl-sglang"
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  echo "$venv/bin/python"
  exit 0
fi

{
  "$python" -m venv "$venv"
  rm -f "$stamp"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wanted"
  "$venv/bin/python" - <<'PY'
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__}, which SGLang pins, finds no GPU: it is built for CUDA {torch.version.cuda}, and "
             "`nvidia-smi` shows the newest that the driver takes")
PY
  printf '%s' "$wanted" >"$stamp"
} >&2
echo "$venv/bin/python"
