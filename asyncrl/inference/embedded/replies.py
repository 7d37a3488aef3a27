"""Building `/generate` replies in SGLang's form."""

from __future__ import annotations

import time
from itertools import repeat
from typing import Any

from asyncrl.inference.embedded.requests import GenerateCall, TextCodec
from asyncrl.inference.embedded.types import FinishReason, GenerationOutput


def finish_reason(reason: FinishReason | None, length: int) -> dict[str, Any] | None:
    """SGLang's finish_reason object; None while the sample is still being streamed."""
    if reason is None:
        return None
    if reason.kind == "length":
        return {"type": "length", "length": length}
    if reason.kind == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.queued:
        return {"type": "abort", "message": "Abort in waiting queue"}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _triples(
    logprobs: list[float] | list[float | None], tokens: list[int] | tuple[int, ...], tokenizer: TextCodec | None
) -> list[tuple[float | None, int, str | None]]:
    texts = repeat(None) if tokenizer is None else (tokenizer.decode([token]) for token in tokens)
    return list(zip(logprobs, tokens, texts, strict=False))


def _text(output: GenerationOutput, tokenizer: TextCodec, trim_stop: bool) -> str:
    text = tokenizer.decode(output.output_ids)
    reason = output.finish_reason
    if trim_stop and reason is not None and isinstance(reason.matched, str):
        return text.partition(reason.matched)[0]
    return text


def sample_reply(
    call: GenerateCall, index: int, output: GenerationOutput, tokenizer: TextCodec | None, received: float
) -> dict[str, Any]:
    """The JSON object of sample `index`; `received` is the call's arrival on the monotonic clock."""
    length = len(output.output_ids)
    reason = output.finish_reason
    meta: dict[str, Any] = {"id": output.rid, "finish_reason": finish_reason(reason, length)}
    if reason is None or not reason.queued:
        meta["prompt_tokens"] = output.prompt_tokens
        meta["cached_tokens"] = output.cached_tokens
        meta["cached_tokens_details"] = None
        meta["num_retractions"] = output.num_retractions
    meta["weight_version"] = output.weight_version
    if call.return_logprob:
        names = tokenizer if call.text_in_logprobs else None
        request = call.inputs[index]
        prompt = request.input_ids[request.prompt_logprobs_from :]
        scored = output.prompt_logprobs
        meta["input_token_logprobs"] = [] if scored is None else _triples(scored, prompt, names)
        meta["output_token_logprobs"] = _triples(output.logprobs, output.output_ids, names)
        meta["output_token_logprobs_length"] = length
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
