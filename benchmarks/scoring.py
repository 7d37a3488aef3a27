"""Time and peak memory of scoring sampled tokens, forward and backward, from hidden states to the head's gradient.

Three forms on the same data, equal in their results, which is checked:

    whole     the logits of all tokens at once, by autograd
    plain     tokens in chunks within the budget, each step from logits to log-probabilities by autograd
    scoring   `trainer.model.scoring.token_logprobs`: the same chunks, from logits to log-probabilities in one step

Memory is the peak of the bytes of tensors alive at once that the call itself creates, the head's gradient among them.

    python benchmarks/scoring.py [--tokens 2048] [--hidden 896] [--vocab 512 151936] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from losses import LiveBytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncrl.models.chunked_logprobs import MAX_LOGITS_BYTES, EntropyMode, token_logprobs

Form = Callable[[Tensor, Tensor, nn.Linear, EntropyMode], tuple[Tensor, Tensor]]
TEMPERATURE = 0.7


def step_by_step(hidden_NH: Tensor, targets_N: Tensor, head: nn.Linear, entropy: EntropyMode) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies by autograd."""
    all_NV = torch.log_softmax(head(hidden_NH).float() / TEMPERATURE, dim=-1)
    logprobs_N = all_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    if entropy == EntropyMode.constant:
        all_NV = all_NV.detach()
    return logprobs_N, -(all_NV.exp() * all_NV).sum(-1)


def plain(
    hidden_NH: Tensor, targets_N: Tensor, head: nn.Linear, entropy: EntropyMode, limit: int = MAX_LOGITS_BYTES
) -> tuple[Tensor, Tensor]:
    """`step_by_step` in chunks, recomputed in the backward pass where there are several."""
    rows = max(1, limit // (4 * head.out_features))
    if rows >= len(targets_N):
        return step_by_step(hidden_NH, targets_N, head, entropy)
    parts = [
        checkpoint(step_by_step, hidden, targets, head, entropy, use_reentrant=False, preserve_rng_state=False)
        for hidden, targets in zip(hidden_NH.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def scoring(hidden_NH: Tensor, targets_N: Tensor, head: nn.Linear, entropy: EntropyMode) -> tuple[Tensor, Tensor]:
    """The trainer's."""
    logprobs_N, entropy_N = token_logprobs(hidden_NH, targets_N, head, temperature=TEMPERATURE, entropy=entropy)
    assert entropy_N is not None
    return logprobs_N, entropy_N


def gradients(form: Form, hidden_NH: Tensor, targets_N: Tensor, head: nn.Linear, entropy: EntropyMode) -> list[Tensor]:
    """One forward and backward pass."""
    logprobs_N, entropy_N = form(hidden_NH, targets_N, head, entropy)
    bonus = entropy_N.sum() if entropy == EntropyMode.differentiable else 0.0
    return list(torch.autograd.grad(logprobs_N.sum() + bonus, [hidden_NH, head.weight]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocab", type=int, nargs="+", default=[512, 151936])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype, rows = getattr(torch, arguments.dtype), []
    print(f"{arguments.tokens} tokens, hidden size {arguments.hidden}, {arguments.dtype}, {arguments.device}, 1 thread")
    print(f"{'vocabulary':>10} {'entropy':>15} {'form':>8} {'s':>8} {'peak MiB':>9}")
    for vocab in arguments.vocab:
        torch.manual_seed(0)
        head = nn.Linear(arguments.hidden, vocab, bias=False, device=arguments.device, dtype=dtype)
        hidden_NH = torch.randn(arguments.tokens, arguments.hidden, device=arguments.device, dtype=dtype)
        hidden_NH.requires_grad_()
        targets_N = torch.randint(0, vocab, (arguments.tokens,), device=arguments.device)
        for entropy in (EntropyMode.constant, EntropyMode.differentiable):
            expected: list[Tensor] | None = None
            for form in (step_by_step, plain, scoring):
                call = partial(gradients, form, hidden_NH, targets_N, head, entropy)
                with LiveBytes() as tracker:
                    got = call()
                peak = tracker.peak / 2**20
                if expected is not None and dtype == torch.float32:
                    for a, b in zip(got, expected, strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
                expected = got
                times = []
                for _ in range(arguments.repeats):
                    start = time.process_time() if arguments.device == "cpu" else time.perf_counter()
                    call()
                    if arguments.device != "cpu":
                        torch.cuda.synchronize()
                    times.append((time.process_time() if arguments.device == "cpu" else time.perf_counter()) - start)
                name = "whole" if form is step_by_step else form.__name__
                print(f"{vocab:10} {entropy!s:>15} {name:>8} {min(times):8.3f} {peak:9.0f}", flush=True)
                rows.append({"vocab": vocab, "entropy": entropy, "form": name, "s": min(times), "peak_mib": peak})
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"tokens": arguments.tokens, "hidden": arguments.hidden, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
