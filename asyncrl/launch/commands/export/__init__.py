"""`asyncrl export RUN [--step N] OUT`: the policy of a step as a plain Hugging Face folder; see `policy`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.variants import CRITIC
from asyncrl.launch.commands import refuse
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_OK


def main(argv: Sequence[str], program: str) -> int:
    """Run the command with the arguments after `export`; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"{program} export", description="Write a policy as a Hugging Face folder.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run: <fileroot>/<experiment>/<trial>")
    parser.add_argument("--step", type=int, metavar="N", help="train steps of the policy; the newest by default")
    parser.add_argument("--adapter", action="store_true", help="of a run with model.lora: the adapters alone, for peft")
    parser.add_argument(
        "--policy", default="", metavar="NAME", help="one of `policies` that the run trains too, or critic"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; it must not exist")
    args = parser.parse_intermixed_args(argv)
    # These import torch: not for --help or a wrong option.
    from asyncrl.launch.commands.export.policy import export
    from asyncrl.weights.manifest import ManifestError, WeightUpdateError
    from asyncrl.weights.stored import ExportError

    try:
        run, out = args.run.expanduser(), args.out.expanduser()
        step = export(run, args.step, out, adapter=args.adapter, policy=args.policy)
    except (ExportError, WeightUpdateError, ManifestError, ValueError, OSError) as error:
        refuse(error)
        return EXIT_FAILED
    named = f"the policy {args.policy}" if args.policy else "the policy"
    if args.policy.endswith(CRITIC):
        named = f"{args.policy}, its outputs before algorithm.critic.value_norm,"
    print(f"{args.out}: {named} after {step} steps of {args.run}")
    return EXIT_OK
