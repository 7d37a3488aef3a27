#!/usr/bin/env bash
# Installs the verifiers package into a virtual environment of its own; it clashes with asyncrl's extras.
#
#   launchers/install_verifiers.sh VERSION [FOLDER]        0.2.1: the classic API; 0.4.0: the v1 API
#
# FOLDER is .venv-verifiers by default. PYTHON names the interpreter to build it with (3.11; default python3.11). Prints
# the new interpreter's path, which is what `agent.args.python` and the tests take. A second call with the same version
# does nothing. Needs 0.7 GB and about a minute; torch is not among it.
set -euo pipefail

version=${1:?"which version of verifiers? 0.2.1 (classic API) or 0.4.0 (v1 API)"}
venv=${2:-.venv-verifiers}
python=${PYTHON:-python3.11}

stamp="$venv/.asyncrl-verifiers"
wanted="verifiers==$version"
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  echo "$venv/bin/python"
  exit 0
fi

{
  "$python" -m venv "$venv"
  rm -f "$stamp"
  pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  ! command -v uv >/dev/null || pip=(uv pip install --quiet --python "$venv/bin/python")
  "${pip[@]}" "$wanted"
  printf '%s' "$wanted" >"$stamp"
} >&2
echo "$venv/bin/python"
