#!/usr/bin/env bash
# Installs the verifiers package into a virtual environment of its own; it clashes with asyncrl's extras.
#
#   launchers/install_verifiers.sh VERSION [FOLDER [EXTRA ...]]    0.2.1: the classic API; 0.4.0: the v1 API
#
# FOLDER is .venv-verifiers by default. EXTRAs are verifiers' own, such as openenv, harbor and ta. PYTHON names the
# interpreter to build it with (default python3.11; harbor needs 3.12). With the v1 API uv is installed too: its
# harnesses prepare their programs with it. Prints the new interpreter's path, which is what `agent.args.python` and the
# tests take. A second call with the same version and extras does nothing. Needs 0.7 GB and about a minute; torch is not
# among it.
set -euo pipefail

version=${1:?"which version of verifiers? 0.2.1 (classic API) or 0.4.0 (v1 API)"}
venv=${2:-.venv-verifiers}
extras=$(printf '%s\n' "${@:3}" | sort -u | paste -sd, -)
python=${PYTHON:-python3.11}

stamp="$venv/.asyncrl-verifiers"
wanted="verifiers${extras:+[$extras]}==$version"
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  echo "$venv/bin/python"
  exit 0
fi
if [[ ,$extras, == *,harbor,* ]] && ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
  echo "install verifiers: the extra harbor needs Python 3.12, and $python is older: name a newer one, PYTHON=python3.12" >&2
  exit 2
fi

{
  "$python" -m venv "$venv"
  rm -f "$stamp"
  pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  ! command -v uv >/dev/null || pip=(uv pip install --quiet --python "$venv/bin/python")
  packages=("$wanted")
  [[ $version == 0.[0-3].* ]] || packages+=(uv)
  "${pip[@]}" "${packages[@]}"
  "$venv/bin/python" - "$extras" <<'PY' || exit 2
import importlib.metadata, sys

known = importlib.metadata.metadata("verifiers").get_all("Provides-Extra") or []
if unknown := [extra for extra in sys.argv[1].split(",") if extra and extra not in known]:
    print(f"install verifiers: it has no extra {', '.join(unknown)}; choose from {', '.join(sorted(known))}", file=sys.stderr)
    sys.exit(1)
PY
  printf '%s' "$wanted" >"$stamp"
} >&2
echo "$venv/bin/python"
