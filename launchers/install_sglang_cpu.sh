#!/usr/bin/env bash
# Installs SGLang into a virtual environment of its own on a machine without a GPU.
#
#   launchers/install_sglang_cpu.sh [FOLDER]        default .venv-sglang
#
# PYTHON names the interpreter to build it with (3.11; default python3.11). Prints the new interpreter's path, which is
# what `generation.sglang.python` and the tests' ASYNCRL_SGLANG_PYTHON take. A second call with the same versions does
# nothing. Needs 3.2 GB and about 3 minutes, with uv on the PATH a quarter of a minute.
set -euo pipefail

venv=${1:-.venv-sglang}
python=${PYTHON:-python3.11}

torch="torch==2.13.0"
# Their metadata asks for CUDA builds: they go in without dependencies, and what they really import is listed below.
bare=(sglang==0.5.23 triton==3.9.0 torchvision==0.28.0 xgrammar==0.2.7 outlines==0.1.11 outlines_core)
needed=(transformers==5.19.0 tokenizers==0.23.2 compressed-tensors==0.18.0 numba==0.65.1 apache-tvm-ffi==0.1.11
  openai==2.8.0 openai-harmony==0.0.4 sentencepiece==0.2.1 soundfile==0.13.1 "anthropic>=0.20" "llguidance>=1.7.6,<2"
  "prometheus-client>=0.20" "uvicorn>=0.51" "python-dateutil<3" "pyzmq>=25.1.2"
  aiohttp datasets distro einops fastapi gguf httpx interegular IPython jsonschema msgspec numpy orjson packaging
  partial_json_parser pillow psutil pybase64 pydantic python-multipart regex requests scipy setproctitle tiktoken tqdm
  uvloop watchfiles xxhash zstandard)

stub=$(dirname -- "${BASH_SOURCE[0]}")/sgl_kernel_cpu_stub/sgl_kernel
stamp="$venv/.asyncrl-sglang"
wanted="$torch ${bare[*]} ${needed[*]} $(cksum <"$stub/__init__.py")"
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  echo "$venv/bin/python"
  exit 0
fi

{
  "$python" -m venv "$venv"
  rm -f "$stamp"
  pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  ! command -v uv >/dev/null || pip=(uv pip install --quiet --python "$venv/bin/python")
  "${pip[@]}" "$torch"
  "${pip[@]}" --no-deps "$torch" "${bare[@]}"
  "${pip[@]}" "$torch" "${needed[@]}"
  # This wheel registers operators of its CUDA extension at import, which a CPU torch refuses.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  rm -f "$site/torchvision/_meta_registrations.py" # uv's cache and other environments may hold the same file
  : >"$site/torchvision/_meta_registrations.py"
  # In place of the CUDA kernels, which do not exist for a CPU.
  rm -rf "$site/sgl_kernel" && cp -r "$stub" "$site/sgl_kernel"
  printf '%s' "$wanted" >"$stamp"
} >&2
echo "$venv/bin/python"
