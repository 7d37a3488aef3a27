"""`python -m asyncrl.inference.embedded --model-path DIR`: the embedded engine as a separate server."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import uvloop
from transformers import AutoTokenizer

from asyncrl.config.setting import Dtype
from asyncrl.data.tokenizers import HuggingFaceTokenizer
from asyncrl.inference.embedded.engine import CHUNKED_PREFILL_SIZE, GenerationEngine
from asyncrl.inference.embedded.host import load_model
from asyncrl.inference.embedded.server import serve
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.picture_rules import PictureModelError
from asyncrl.models.pictures import Pictures


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.inference.embedded", description=__doc__)
    parser.add_argument("--model-path", required=True, help="folder of a Hugging Face causal LM")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free port, printed at the start")
    parser.add_argument("--api-key", help="bearer token asked of every call but health, readiness and metrics")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", choices=list(Dtype), default=Dtype.auto, type=Dtype)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the computation")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--max-total-tokens", type=int, help="bound of the KV cache; default rows x context length")
    parser.add_argument(
        "--chunked-prefill-size", type=int, default=CHUNKED_PREFILL_SIZE, help="longest part of a prompt"
    )
    parser.add_argument("--context-length", type=int, help="longest prompt + output; default the model's own")
    parser.add_argument("--weight-version", default="default", help="label of the weights at the start")
    parser.add_argument("--record-routing", action="store_true", help="report the experts that each token used")
    parser.add_argument("--text-only", action="store_true", help="take no pictures, whatever the model takes")
    parser.add_argument("--skip-tokenizer-init", action="store_true", help="token ids only, no text in or out")
    return parser.parse_args(arguments)


async def run(options: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM."""
    tokenizer = None
    if not options.skip_tokenizer_init:
        tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(options.model_path, local_files_only=True))
    path = Path(options.model_path)
    model = load_model(path, device=options.device, dtype=options.dtype, threads=options.threads)
    engine = GenerationEngine(
        model,
        max_running_requests=options.max_running_requests,
        max_model_len=options.context_length,
        max_total_tokens=options.max_total_tokens,
        weight_version=options.weight_version,
        model_path=str(Path(options.model_path)),
        detokenize=None if tokenizer is None else tokenizer.decode_all,
        record_routing=options.record_routing,
        chunked_prefill_size=options.chunked_prefill_size,
        pictures=None if options.text_only else Pictures.of(model, path),
    )
    engine.start()
    server = await serve(engine, host=options.host, port=options.port, token=options.api_key, tokenizer=tokenizer)
    print(f"listening on {server.url}", flush=True)
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    await stop.wait()
    await server.close()
    engine.close()


def main(arguments: list[str]) -> int:
    """Entry point."""
    try:
        uvloop.run(run(parse_arguments(arguments)))
    except (UnsupportedModelError, PictureModelError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
