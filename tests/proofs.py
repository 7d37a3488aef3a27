"""Models that tests build again and again are proven once: a proof is about the code of a model, and says the same each
time.

Each engine compares a model that it loads with transformers' own forward, which takes most of the time of a test that
builds one of two layers and trains a step. The result is kept where the layout that is tried first is right: for models
of the same code and config, and engines with the same settings. What a proof refuses or warns of is proven anew each
time. The tests of the proofs themselves keep nothing (`PROOFS`).

Processes of whole runs that `warm.py` forks keep results as well, all of them in one folder.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import marshal
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KEPT = ("tests/device", "tests/integration", "tests/unit/inference", "tests/unit/trainer", "tests/unit/weights")
"""Folders of tests that build engines."""
PROOFS = ("tests/unit/trainer/model",)
"""Folders of tests of the proofs, beside `tests/unit/models`."""


def keeps_proofs(file: Path) -> bool:
    """True if tests of this file build engines, and are not about the proofs."""
    repository = Path(__file__).parents[1]
    place = file.relative_to(repository).as_posix() if file.is_relative_to(repository) else ""
    return place.startswith((*KEPT, "tests/unit/test_reference_loop")) and not place.startswith(PROOFS)


def _settings(owner: object) -> dict[str, str]:
    plain = bool, int, float, str, enum.Enum, type(None)
    return {
        name: repr(value) if isinstance(value, plain) else type(value).__qualname__
        for name, value in vars(owner).items()
    }


def _code(function: object) -> bytes:
    """Return what `function` does, if it is written in Python: in another process its `id` may be another's."""
    code = getattr(function, "__code__", None)
    return b"" if code is None else marshal.dumps(code)


def _digest(owner: Any, model: Any, given: object) -> str:
    """Tell `model` and the engine `owner` from all others, the code of their forward included. Weights count where
    there are pictures: a model may not look at them.
    """
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    modules = [
        (
            name,
            type(module).__module__,
            type(module).__qualname__,
            id(type(module).forward),
            _code(type(module).forward),
            id(vars(module).get("forward")),
            module.training,
            len(module._forward_hooks) + len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    ]
    functions = sorted((name, id(function)) for name, function in ALL_ATTENTION_FUNCTIONS.items())
    code = type(owner).__qualname__, _settings(owner), id(type(owner).__dict__.get("together"))
    reported = hashlib.sha256(repr((code, given, modules, functions, str(model.dtype))).encode())
    reported.update(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        reported.update(repr((name, tensor.dtype, tensor.shape)).encode())
        if owner.pictures is not None and tensor.numel():
            reported.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return reported.hexdigest()


@contextlib.contextmanager
def proven_once(folder: Path) -> Iterator[None]:
    """Within the block, results of proofs are kept in `folder`, which processes that are forked in it use too."""
    with pytest.MonkeyPatch.context() as patch:
        keep_proofs(patch, folder)
        yield


def keep_proofs(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have `patch` make this process keep results of proofs in `folder`, and use those that are there."""
    import asyncrl.inference.embedded.engine as embedded
    import asyncrl.trainer.engines.flat as flat
    import asyncrl.trainer.engines.sharded.loader as sharded
    from asyncrl.models.transformers_internals import set_attention
    from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
    from asyncrl.trainer.model import layout_parity
    from asyncrl.trainer.model.layout_parity import STREAM_ATTENTION, SequenceLayout, layouts

    select, check = layout_parity.select_attention, embedded.check_parity

    def selected(engine: Any, setting: Any, **given: Any) -> SequenceLayout:
        file = folder / _digest(engine, engine.network, (setting, sorted(given.items())))
        if file.exists():
            kind, attention = json.loads(file.read_text())
            layout = SequenceLayout(AttentionKind(kind), attention)
            set_attention(engine.network, layout.attention)
            engine.attention = layout.kind
            return layout
        layout = select(engine, setting, **given)
        first = next(
            each
            for each in layouts(setting)
            if (given.get("share_prefixes", True) or not each.kind.shares_prefixes)
            and layout_parity._runs_on(engine.network, each)
            and (not given.get("one_stream") or each.attention in STREAM_ATTENTION)
        )
        if layout == first:
            _write(file, json.dumps([layout.kind.value, layout.attention]))
        return layout

    def checked(forward: Any, longest: int) -> None:
        runner = forward.runner
        file = folder / _digest(runner, runner.model, longest)
        if file.exists():
            runner.find_states()
            return
        before = runner.masks.pattern, forward.supports_continuation
        check(forward, longest)
        if (runner.masks.pattern, forward.supports_continuation) == before:
            _write(file, "")

    for module in (flat, sharded):
        patch.setattr(module, "select_attention", selected)
    patch.setattr(embedded, "check_parity", checked)


def _write(file: Path, text: str) -> None:
    """Whole, or not at all: several ranks may write the same."""
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(file)
