"""Number of environments that one RolloutWorker plays at once, and its costs.

    python benchmarks/environments.py [--number 200] [--how loop process vectorized]

`VLAAgent` plays groups of eight with answers that are made up. No answer is given before every environment has shown
its first picture, so all of them are open at the same time; a command that ends has shown it. `loop` is the task of
`embodied_srpo`, whose methods are coroutines; `process` is the same with a process for each environment; `vectorized`
is MiniGrid, with a vector environment for each group. It prints, in Markdown, the CPU time and the memory (shared pages
counted once) of the worker's components and all their processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import time
from pathlib import Path

from asyncrl.api import GenerationRequest, GenerationResult
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.launch.before_start.rehearsal import MadeUpPolicy
from asyncrl.plugins.datasets.queue.order import PromptRef
from asyncrl.rollout.episode import RetryLimits
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.runtime.supervisor import descendants

GROUP, LIMIT_S = 8, 600.0
WORDS = "[left, right, up, down, ., toggle, done]"
HOW = {
    "loop": [],
    "process": ["env.run_in=process"],
    "vectorized": [
        "env.path=gymnasium:minigrid:MiniGrid-Empty-5x5-v0",
        "env.vectorized=true",
        f"env.args={{actions: {WORDS}, kwargs: {{render_mode: rgb_array, tile_size: 8}}}}",
    ],
}


class AllAtOnce(MadeUpPolicy):
    """Gives its first answer once `number` requests wait for one.

    Attributes:
        memory: of this process and all below it at that time, in bytes.
    """

    def __init__(self, components: UserComponents, number: int) -> None:
        super().__init__(components.tokenizer, 0)
        self._number, self._all = number, asyncio.Event()
        self.requests = self.memory = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Answer `request`."""
        self.requests += 1
        if self.requests == self._number:
            self.memory = sum(map(_memory, [os.getpid(), *(each.pid for each in descendants(os.getpid()))]))
            self._all.set()
        await self._all.wait()
        return await super().generate(request)


def _memory(pid: int) -> int:
    """Proportional set size of a process, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


async def play(how: str, number: int) -> str:
    """Play `number` episodes at once; return a row of the table."""
    settings = [f"group_size={GROUP}", f"env.processes={number}", "rewards=[]", "rollout.filters=[]"]
    config = load_experiment("embodied_srpo", [*settings, *HOW[how], "rollout.sampling.max_new_tokens=2"])
    before, began = _cpu_s(), time.monotonic()
    assert isinstance(config, ExperimentConfig)
    components = UserComponents(config)
    policy = AllAtOnce(components, number)
    async with asyncio.timeout(LIMIT_S), components.runner, components.tools:
        prompts = [components.prompts.train(PromptRef(f"p{row}", row, row)) for row in range(number // GROUP)]
        playing = (components.play_to_train(prompt, policy, RetryLimits()) for prompt in prompts)
        groups = [samples for samples, _ in await asyncio.gather(*playing)]
    samples = [sample for group in groups for sample in group]
    episodes = sum(len({sample.episode for sample in group}) for group in groups)
    steps = sum(sample.metrics["steps"] for group in groups for sample in {s.episode: s for s in group}.values())
    figures = f"{episodes} | {len(samples)} | {steps:.0f} | {_cpu_s() - before:.0f} | {policy.memory / 1e6:,.0f}"
    return f"| {how} | {figures} | {time.monotonic() - began:.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help=f"environments, a multiple of {GROUP}")
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW))
    args = parser.parse_args()
    if args.number < GROUP or args.number % GROUP:
        parser.error(f"--number={args.number}: give a multiple of {GROUP}")
    print("| environments | episodes at once | turns | steps | CPU s | memory (MB) | seconds |")
    print("|---" + "|--:" * 6 + "|")
    for how in args.how:
        print(asyncio.run(play(how, args.number)), flush=True)


if __name__ == "__main__":
    main()
