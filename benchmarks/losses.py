"""Time and peak memory of every loss, correction, KL and advantage beside the log-softmax that feeds it.

One thread, fp32. The yardstick is what a trainer must do before any loss can be evaluated: log-softmax over the
vocabulary, the gather of the sampled tokens' log-probabilities and, where the loss has a backward pass, the backward
of both. It is measured at two vocabularies: 17, that of the demo's character tokenizer, the smallest anyone feeds, and
512. Those of real models are 60 to 500 times larger again, so both columns are upper bounds for them. Memory is the
peak of the bytes of tensors alive at once that the call itself creates.

    python benchmarks/losses.py [--quick]
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Table, parser, verdict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.algorithms.inputs import AdvantageInputs, CorrectionInputs, KLInputs, PolicyLossInputs, ValueLossInputs
from asyncrl.algorithms.objective import Objective
from asyncrl.algorithms.registry import WHOLE_DISTRIBUTIONS, Choice, ObjectiveSpec
from asyncrl.config.plugin_code.catalog import known, resolve

LIMIT = 3.0
"""No row may take more than this many times the yardstick."""
MEAN_LENGTH = 512
VOCABULARIES = (17, 512)


@dataclass(frozen=True)
class Row:
    """One measurement; `ratios` are to the yardsticks, by vocabulary, measured in the same run."""

    name: str
    seconds: float
    peak_mib: float
    ratios: dict[int, float]


class LiveBytes(TorchDispatchMode):
    """Tracks the bytes of storages created under it and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf) and leaf.untyped_storage()._cdata not in before | self._seen:
                self._track(leaf.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self.live += size
        self.peak = max(self.peak, self.live)
        self._seen.add(key)
        weakref.finalize(storage, self._release, size, key)

    def _release(self, size: int, key: int) -> None:
        self.live -= size
        self._seen.discard(key)


@dataclass(frozen=True)
class Data:
    """Random packed sequences, and groups of 8 samples."""

    policy: PolicyLossInputs
    advantage: AdvantageInputs
    ref_T: torch.Tensor


def make_data(num_tokens: int) -> Data:
    rng = np.random.default_rng(0)
    num_seqs = max(num_tokens // MEAN_LENGTH // 8, 1) * 8
    ends = np.sort(rng.choice(np.arange(1, num_tokens), num_seqs - 1, replace=False))
    seq_ids_T = torch.tensor(np.searchsorted(ends, np.arange(num_tokens), side="right"))
    torch.manual_seed(0)
    logprobs_T = -torch.rand(num_tokens) * 3
    near = [(logprobs_T + 0.2 * torch.randn(num_tokens)).clamp(max=-1e-3) for _ in range(3)]
    mask_T = torch.rand(num_tokens) < 0.8
    policy = PolicyLossInputs(
        logprobs_T.requires_grad_(),
        near[0],
        near[1],
        torch.randn(num_tokens),
        mask_T,
        seq_ids_T,
        num_seqs,
        torch.randint(0, 8, (num_tokens,)),
        8,
        torch.rand(num_tokens),
    )
    advantage = AdvantageInputs(
        torch.randn(num_seqs).round(),
        torch.arange(num_seqs) // 8,
        mask_T,
        seq_ids_T,
        num_seqs,
        torch.randn(num_tokens),
        torch.randn(num_seqs),
        torch.rand(num_seqs) < 0.3,
        torch.randn(num_tokens),
        torch.randn(num_seqs),
    )
    return Data(policy, advantage, near[2])


def yardstick(num_tokens: int, vocab: int, *, backward: bool) -> Callable[[], None]:
    logits_TV = torch.randn(num_tokens, vocab, requires_grad=backward)
    tokens_T1 = torch.randint(0, vocab, (num_tokens, 1))

    def run() -> None:
        picked_T = logits_TV.log_softmax(-1).gather(-1, tokens_T1)
        if backward:
            torch.autograd.grad(picked_T.sum(), logits_TV)

    return run


def cases(data: Data) -> list[tuple[str, bool, Callable[[], None]]]:
    """(name, has a backward pass, call) of every row."""
    p = data.policy
    assert p.prox_logprobs_T is not None
    correction = CorrectionInputs(
        p.prox_logprobs_T,
        p.behave_logprobs_T,
        p.mask_T,
        p.seq_ids_T,
        p.num_seqs,
        p.logprobs_T.detach(),
        p.advantages_T,
    )
    kl = KLInputs(p.logprobs_T, data.ref_T, p.mask_T, behave_logprobs_T=p.behave_logprobs_T)
    value = ValueLossInputs(torch.randn_like(data.ref_T, requires_grad=True), data.ref_T, data.ref_T, p.mask_T)

    def train(call: Callable[[], torch.Tensor], leaf: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            torch.autograd.grad(call().sum(), leaf)

        return run

    def policy(name: str) -> Callable[[], None]:
        loss = resolve("policy_loss", name)
        return train(lambda: loss(p).loss_T, p.logprobs_T)

    def objective(name: str) -> Callable[[], None]:
        whole = Objective(ObjectiveSpec(Choice(name), kl=Choice("k3"), kl_coef=0.01, entropy_coef=0.01), resolve)
        return train(lambda: whole(p, data.ref_T, 1.0)[0], p.logprobs_T)

    def kl_term(name: str) -> Callable[[], None]:
        estimate = resolve("kl", name)
        return train(lambda: estimate(kl), p.logprobs_T)

    def critic(name: str) -> Callable[[], None]:
        loss = resolve("value_loss", name)
        return train(lambda: loss(value).loss_T, value.values_T)

    sampled_kls = [name for name in known("kl") if name not in WHOLE_DISTRIBUTIONS]
    rows = [(f"policy_loss {name}", True, policy(name)) for name in known("policy_loss")]
    rows += [(f"objective {name}", True, objective(name)) for name in known("policy_loss")]
    rows += [
        (f"correction {name}", False, partial(resolve("correction", name), correction)) for name in known("correction")
    ]
    rows += [(f"kl {name}", True, kl_term(name)) for name in sampled_kls]
    rows += [(f"value_loss {name}", True, critic(name)) for name in known("value_loss")]
    rows += [
        (f"advantage {name}", False, partial(resolve("advantage", name), data.advantage)) for name in known("advantage")
    ]
    return rows


def timed(call: Callable[[], None], repeats: int) -> float:
    """Least seconds of `repeats` calls after one to warm up: the figure that other processes disturb least."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_mib(call: Callable[[], None]) -> float:
    with LiveBytes() as tracker:
        call()
    return float(tracker.peak) / 2**20


def measure(num_tokens: int, repeats: int) -> list[Row]:
    """All rows, the yardsticks first."""
    rows, base = [], {}
    for vocab in VOCABULARIES:
        for backward in (False, True):
            call = yardstick(num_tokens, vocab, backward=backward)
            base[vocab, backward] = timed(call, repeats)
            name = f"log_softmax+gather V={vocab}{' +backward' if backward else ''}"
            rows.append(Row(name, base[vocab, backward], peak_mib(call), {}))
    for name, backward, call in cases(make_data(num_tokens)):
        seconds = timed(call, repeats)
        ratios = {vocab: seconds / base[vocab, backward] for vocab in VOCABULARIES}
        rows.append(Row(name, seconds, peak_mib(call), ratios))
    return rows


def main() -> None:
    """Print the table; `--json` is read by the test that every algorithm has a row."""
    command = parser(__doc__)
    command.add_argument("--quick", action="store_true", help="8192 tokens, 3 repeats")
    command.add_argument("--json", type=Path, help="write the rows there")
    args = command.parse_args()
    torch.set_num_threads(1)
    rows = measure(*((8192, 3) if args.quick else (65536, 11)))
    table = Table("", "ms", "peak MiB", *(f"of log_softmax+gather, V={vocab}" for vocab in VOCABULARIES))
    for row in rows:
        ratios = [f"{ratio:.3f}" for ratio in row.ratios.values()] or [""] * len(VOCABULARIES)
        table.row(row.name, f"{row.seconds * 1e3:.2f}", f"{row.peak_mib:.1f}", *ratios)
    worst, name = max((ratio, row.name) for row in rows for ratio in row.ratios.values())
    # small runs measure the cost of a call, not of tokens
    print(f"highest ratio: {worst:.2f} ({name})" + ("" if args.quick else f"; limit {LIMIT}: {verdict(worst, LIMIT)}"))
    if args.json:
        args.json.write_text(json.dumps({"rows": [vars(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
