"""Cost of the death of one training rank: all ranks restart, against the others rebuilding their process group.

    python benchmarks/rank_death.py [--ranks 2 4] [--engines flat sharded] [--rounds 3] [--json FILE]

A rank of a real training world (gloo) is killed in a step. `restart` is what a run does: the others end too, all begin
again as processes, meet, load the model and the last step, and make the step again. `rebuild` leaves the others alive:
their collective fails, they leave the group, build their engines on a new one with the one rank that is started again,
and load the last step. Printed are medians over the rounds, in seconds since the death, and the processor time that all
ranks together used from there to the end of the next step, which other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODES = ("restart", "rebuild")
LIMIT_S = 300.0
LENGTH = 64
"""Length of a sample in tokens."""


def rank_main(worker: int, folder: Path, generation: int, ranks: int, engine: str) -> None:
    """One rank; prints a line `what generation time processor-seconds` for each thing done."""
    import gc

    import numpy as np
    import torch

    from asyncrl.api.trajectory import Sample, Trajectory
    from asyncrl.comm.name_resolve import NameBackend, make_resolver
    from asyncrl.config.experiment import ExperimentConfig
    from asyncrl.master.graph.builtin import load_graph
    from asyncrl.trainer.batches.step_batch import build_step_batch
    from asyncrl.trainer.functions.model_functions import CallContext, find_function, run_call
    from asyncrl.trainer.messages import SaveCheckpoint
    from asyncrl.trainer.parallel.placement import placement
    from asyncrl.trainer.parallel.rank_position import World
    from asyncrl.trainer.parallel.world import training_world
    from asyncrl.trainer.rank.roles import build_rank
    from asyncrl.trainer.rank.training_rank import TrainingRank

    def tell(what: str) -> None:
        print(what, generation, time.time(), time.process_time(), flush=True)

    torch.set_num_threads(1)
    config = ExperimentConfig(train_batch_size=ranks, group_size=4)
    config.model.path = str(folder / "model")
    config.trainer.parallel, config.trainer.engine = f"d{ranks}", engine
    config.trainer.ppo_minibatches = 4
    graph = load_graph(config)
    placed = placement(config, graph)
    root = folder / "state"

    def samples(version: int) -> list[Trajectory]:
        rng = np.random.default_rng([version, worker])
        made = []
        for order in range(4):
            each = []
            for episode in range(4):
                mask = (np.arange(LENGTH) >= 16).astype(np.uint8)
                tokens = rng.integers(0, 500, LENGTH).astype(np.int32)
                versions = np.where(mask, version, -1).astype(np.int32)
                logprobs = (-6.2 * mask).astype(np.float32)
                each.append(Sample(tokens, mask, logprobs, versions, reward=float(rng.random()), episode=episode))
            made.append(Trajectory(f"{version}-{worker}-{order}", f"p{order}", order, tuple(each)))
        return made

    def step(rank: TrainingRank, version: int) -> None:
        batch = build_step_batch(samples(version), list(range(4)), version=version, num_minibatches=4)
        for call in graph.order():
            context = CallContext(
                call.name, call.role, call.reads, call.writes, call.args, config, rank.engines,
                rank.world.place(call.role).data, rank.state,
            )  # fmt: skip
            run_call(find_function(call.function), context, batch)

    def keep(rank: TrainingRank, version: int) -> None:
        path = root / f"v{version}"
        rank.save_checkpoint(SaveCheckpoint(str(path), version, {"version": version}, in_memory=True))
        share = rank.memory_writer.share(path).result()
        from msgspec import json as encoding

        from asyncrl.models.weights.versions.manifest import FileEntry

        files: dict[str, FileEntry] = {}
        for written in rank.world.everyone.all_gather_bytes(encoding.encode(share)):
            files |= encoding.decode(written, type=dict[str, FileEntry])
        if rank.folders.leads:
            rank.memory_writer.commit(path, files, keep=1, protected=())
        rank.world.everyone.together(lambda: None, "keeping")

    def live(world: World) -> None:
        tell("met")
        rank = build_rank(config, graph, world, torch.device("cpu"))
        tell("built")
        state: Any = rank.load_memory_checkpoint(root, invalid=False)
        version = 0 if state is None else state["version"]
        tell("loaded")
        while True:
            step(rank, version)
            version += 1
            tell("step")
            keep(rank, version)

    tell("imported")
    while True:
        names = make_resolver(NameBackend.file, str(folder / f"names-{generation}"))
        try:
            with training_world(config, worker, placed, torch.device("cpu"), folder, names) as world:
                try:
                    live(world)
                except Exception as error:  # what a peer's death raises, whichever it is
                    failed = f"{type(error).__name__}: {error}"
                    tell("failed")
                    print(failed.splitlines()[0][:150], file=sys.stderr, flush=True)
        finally:
            names.close()
        tell("left")
        gc.collect()
        generation += 1


class Rank:
    """A rank's process, and what it has told."""

    def __init__(self, worker: int, folder: Path, generation: int, ranks: int, engine: str) -> None:
        command = [sys.executable, __file__, "--be", str(worker), str(folder), str(generation), str(ranks), engine]
        self.log = folder / f"rank-{worker}-{time.time_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def told(self, what: str, generation: int, count: int = 1) -> tuple[float, float] | None:
        """When it did `what` for the `count`-th time, and the processor time that it had used."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        times = [(float(line[2]), float(line[3])) for line in lines if line[:2] == [what, str(generation)]]
        return times[count - 1] if len(times) >= count else None

    def wait(self, what: str, generation: int, count: int = 1) -> tuple[float, float]:
        """Wait for it."""
        deadline = time.monotonic() + LIMIT_S
        while (when := self.told(what, generation, count)) is None:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"no {what} of generation {generation}: {self.log.read_text()[-2000:]}")
            time.sleep(0.01)
        return when


def one_death(mode: str, engine: str, ranks: int, model: Path) -> dict[str, float]:
    """Seconds from the death of the last rank to what followed, the latest of all ranks."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        (folder / "model").symlink_to(model)
        alive = [Rank(worker, folder, 0, ranks, engine) for worker in range(ranks)]
        try:
            for rank in alive:
                rank.wait("step", 0, 3)
            time.sleep(0.2)  # somewhere in the next step
            before, died = 0.0, time.time()
            alive[-1].process.send_signal(signal.SIGKILL)
            alive[-1].process.wait()
            if mode == "restart":
                for rank in alive[:-1]:
                    rank.process.kill()
                    rank.process.wait()
                alive = [Rank(worker, folder, 1, ranks, engine) for worker in range(ranks)]
            else:
                alive[-1] = Rank(ranks - 1, folder, 1, ranks, engine)
            found: dict[str, float] = {}
            if mode == "rebuild":
                found["failed"] = max(rank.wait("failed", 0)[0] for rank in alive[:-1]) - died
                found["left"] = max(rank.wait("left", 0)[0] for rank in alive[:-1]) - died
                before = sum(rank.wait("failed", 0)[1] for rank in alive[:-1])
            for what in ("met", "built", "loaded", "step"):
                found[what] = max(rank.wait(what, 1)[0] for rank in alive) - died
            return found | {"processor": sum(rank.wait("step", 1)[1] for rank in alive) - before}
        finally:
            for rank in alive:
                rank.process.kill()
                rank.process.wait()


def save_model(folder: Path) -> None:
    """A small model: what is measured here grows with the processes, not with their parameters."""
    code = (
        "import torch, sys; from transformers import AutoModelForCausalLM, Qwen2Config; torch.manual_seed(0);"
        "from pathlib import Path; from asyncrl.plugins.datasets.tokenizers import CharTokenizer;"
        "c = Qwen2Config(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,"
        "intermediate_size=256, vocab_size=512, tie_word_embeddings=True);"
        "AutoModelForCausalLM.from_config(c).save_pretrained(sys.argv[1]);"
        "CharTokenizer().save(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--engines", nargs="+", default=["flat", "sharded"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        for ranks in args.ranks:
            for engine in args.engines:
                for mode in args.modes:
                    found = [one_death(mode, engine, ranks, Path(name)) for _ in range(args.rounds)]
                    medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
                    rows.append({"ranks": ranks, "engine": engine, "mode": mode, **medians})
                    told = ", ".join(f"{key} {value:.1f}" for key, value in medians.items())
                    print(f"{ranks} ranks, {engine}, {mode}: {told}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be"]:
        rank_main(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    else:
        main()
