"""A generation back end of one's own: transformers' plain forward pass behind the endpoints of docs/backends.md.

    python own_backend.py MODEL_FOLDER       prints its address, and then a line of JSON for each weight update

It is slow and complete: tokens, log-probabilities and versions are exact, answers go on across updates of the weights.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

Json = dict[str, Any]


@dataclass(eq=False)
class Request:
    """A running request: what it generated, and whether it is to end."""

    rid: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    aborted: bool = False


class Backend:
    """One model, and the requests that it answers one token at a time."""

    def __init__(self, folder: str) -> None:
        self.requests: list[Request] = []
        self.going = asyncio.Event()
        self.going.set()
        self.one_at_a_time = asyncio.Lock()
        self.updates = 0
        self.load(folder, "0")

    def load(self, folder: str, label: str) -> None:
        """Serve the weights in `folder` as `label`."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.folder, self.label = folder, label

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[positions, vocabulary]"""
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0]

    async def step(self, prompt: list[int], request: Request, params: Json) -> None:
        """Add one token; the weights cannot change meanwhile."""
        async with self.one_at_a_time:
            logits = (await asyncio.to_thread(self.logits, prompt + request.token_ids))[-1]
            temperature = params.get("temperature", 1.0)
            logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
            if temperature:
                position = params.get("custom_params", {}).get("seed_offset", 0) + len(request.token_ids)
                seed = hash((params.get("sampling_seed", 0), position))
                stream = torch.Generator().manual_seed(seed)
                token = int(torch.multinomial(logprobs.exp(), 1, generator=stream))
            else:
                token = int(logprobs.argmax())
            request.token_ids.append(token)
            request.logprobs.append(float(logprobs[token]))
            request.versions.append(self.label)

    async def answer(self, rid: str, prompt: list[int], params: Json) -> Json:
        """Generate until a token ends the answer, it is as long as it may be, or it is aborted."""
        known = {"temperature", "max_new_tokens", "sampling_seed", "custom_params", "stop_token_ids", "ignore_eos"}
        if params.keys() - known:
            raise web.HTTPBadRequest(text=f"unknown to this server: {sorted(params.keys() - known)}")
        ends = set(params.get("stop_token_ids", ()))
        if not params.get("ignore_eos") and (end := self.model.config.eos_token_id) is not None:
            ends |= {end} if isinstance(end, int) else set(end)
        request = Request(rid)
        self.requests.append(request)
        finish = "length"
        while len(request.token_ids) < params["max_new_tokens"]:
            await self.going.wait()
            if request.aborted:
                finish = "abort"
                break
            await self.step(prompt, request, params)
            if request.token_ids[-1] in ends:
                finish = "stop"
                break
        self.requests.remove(request)
        spans: list[Json] = []
        for at, version in enumerate(request.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"start": at, "end": at, "version": version})
            spans[-1]["end"] = at + 1
        pairs = zip(request.logprobs, request.token_ids, strict=True)
        meta = {"id": rid, "finish_reason": {"type": finish}, "weight_version": self.label, "weight_versions": spans}
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        return {"output_ids": request.token_ids, "meta_info": meta}

    async def score(self, token_ids: list[int], start: int) -> Json:
        """Log-probabilities at temperature 1 of the tokens after position `start`."""
        async with self.one_at_a_time:
            logprobs = torch.log_softmax(await asyncio.to_thread(self.logits, token_ids), dim=-1)
        entries = [[None, token_ids[start], None]]
        entries += [
            [float(logprobs[at - 1, token_ids[at]]), token_ids[at], None] for at in range(start + 1, len(token_ids))
        ]
        return {"output_ids": [], "meta_info": {"input_token_logprobs": entries, "weight_version": self.label}}

    # The endpoints.

    async def generate(self, call: web.Request) -> web.Response:
        """One prompt or a list of them; answered once the last is done."""
        body = await call.json()
        prompts, params, rids = body["input_ids"], body["sampling_params"], body.get("rid") or ""
        if isinstance(prompts[0], int):
            if not params["max_new_tokens"]:
                return web.json_response(await self.score(prompts, body["logprob_start_len"]))
            return web.json_response(await self.answer(rids, prompts, params))
        each = [params] * len(prompts) if isinstance(params, dict) else params
        answers = (self.answer(*one) for one in zip(rids, prompts, each, strict=True))
        return web.json_response(await asyncio.gather(*answers))

    def end(self, prefix: str) -> None:
        for request in self.requests:
            request.aborted |= request.rid.startswith(prefix)

    async def pause(self, call: web.Request) -> web.Response:
        """Nothing is generated until continued; requests that run go on then, or end now with what they have."""
        if (await call.json()).get("mode", "abort") == "abort":
            self.end("")
            while self.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        self.going.clear()
        return web.json_response({})

    async def resume(self, call: web.Request) -> web.Response:
        self.going.set()
        return web.json_response({})

    async def abort(self, call: web.Request) -> web.Response:
        body = await call.json()
        self.end("" if body.get("abort_all") else body["rid"])
        return web.json_response({})

    async def update(self, call: web.Request) -> web.Response:
        """New weights; nothing that is cached for the old ones may be used afterwards, and nothing is cached here."""
        body = await call.json()
        async with self.one_at_a_time:
            await asyncio.to_thread(self.load, body["model_path"], body["weight_version"])
        self.updates += 1
        print(json.dumps({"version": body["weight_version"], "running": len(self.requests)}), flush=True)
        return web.json_response({"success": True})

    async def model_info(self, call: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label, "model_path": self.folder})

    async def server_info(self, call: web.Request) -> web.Response:
        return web.json_response({"disable_radix_cache": True})


async def main(folder: str) -> None:
    """Serve until killed."""
    torch.set_num_threads(1)
    backend, app = Backend(folder), web.Application(client_max_size=1 << 26)
    for path, handler in {
        "/generate": backend.generate,
        "/pause_generation": backend.pause,
        "/continue_generation": backend.resume,
        "/abort_request": backend.abort,
        "/update_weights_from_disk": backend.update,
    }.items():
        app.router.add_post(path, handler)
    app.router.add_get("/model_info", backend.model_info)
    app.router.add_get("/server_info", backend.server_info)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
