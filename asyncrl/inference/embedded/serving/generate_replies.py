"""Build `/generate` replies in SGLang's form."""

from __future__ import annotations

import base64
import time
from itertools import repeat
from typing import Any

from asyncrl.api import FinishReason, Tokenizer
from asyncrl.inference.embedded.engine_io import Finish, GenerationOutput
from asyncrl.inference.embedded.serving.requests import GenerateCall


def finish_reason(finish: Finish | None, length: int) -> dict[str, Any] | None:
    """Return SGLang's finish_reason object; None while the sample is still being streamed."""
    if finish is None:
        return None
    if finish.reason == FinishReason.length:
        return {"type": "length", "length": length}
    if finish.reason == FinishReason.stop:
        return {"type": "stop", "matched": finish.matched}
    if finish.queued:
        return {"type": "abort", "message": "Abort in waiting queue"}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _triples(
    logprobs: list[float] | list[float | None], tokens: list[int] | tuple[int, ...]
) -> list[tuple[float | None, int, None]]:
    return list(zip(logprobs, tokens, repeat(None, len(tokens)), strict=True))


def _text(output: GenerationOutput, tokenizer: Tokenizer, trim_stop: bool) -> str:
    text = tokenizer.decode(output.output_ids)
    finish = output.finish
    if trim_stop and finish is not None and isinstance(finish.matched, str):
        return text.partition(finish.matched)[0]
    return text


def sample_reply(
    call: GenerateCall, index: int, output: GenerationOutput, tokenizer: Tokenizer | None, received: float
) -> dict[str, Any]:
    """Return the JSON object of sample `index`; `received` is the call's arrival on the monotonic clock."""
    length = len(output.output_ids)
    finish = output.finish
    meta: dict[str, Any] = {"id": output.rid, "finish_reason": finish_reason(finish, length)}
    if finish is None or not finish.queued:
        meta["prompt_tokens"] = output.prompt_tokens
        meta["cached_tokens"] = output.cached_tokens
        meta["cached_tokens_details"] = None
        meta["num_retractions"] = output.num_retractions
    meta["weight_version"] = output.weight_version
    if call.return_logprob:
        request = call.inputs[index]
        prompt = request.input_ids[request.prompt_logprobs_from :]
        scored = output.prompt_logprobs
        meta["input_token_logprobs"] = [] if scored is None else _triples(scored, prompt)
        meta["output_token_logprobs"] = _triples(output.logprobs, output.output_ids)
        meta["output_token_logprobs_length"] = length
    if output.routing is not None:
        meta["routed_experts"] = base64.b64encode(output.routing.astype("<i4").tobytes()).decode("ascii")
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = length
    meta["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in output.spans]
    meta["dp_rank"] = None
    meta["e2e_latency"] = time.monotonic() - received
    meta["response_sent_to_client_ts"] = time.time()
    reply: dict[str, Any] = {} if tokenizer is None else {"text": _text(output, tokenizer, call.trim_stop)}
    reply["output_ids"] = output.output_ids
    reply["meta_info"] = meta
    return reply
