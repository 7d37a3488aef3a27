"""The table of all figures in the lines of `observed/`, which each process writes about itself.

`asyncrl.observe.observer` writes the lines. Names and meanings for Prometheus, Grafana and
`docs/metrics.md` are taken from this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure in the lines of `observed/`: of all processes, or of one kind of them.

    Attributes:
        grows: True for a counter, of which a reader takes differences.
    """

    name: str
    of: str
    unit: str
    meaning: str
    grows: bool = False


ALL = "every process"
OBSERVED: tuple[Figure, ...] = (
    Figure("cpu_s", ALL, "s", "Processor time that the process has used.", grows=True),
    Figure(
        "no_core_s", ALL, "s", "Time in which threads of the process could run and had no core, added up.", grows=True
    ),
    Figure("threads", ALL, "threads", "Threads of the process."),
    Figure("rss", ALL, "bytes", "Resident memory of the process."),
    Figure("host_free", ALL, "bytes", "Memory of the host that is still available."),
    Figure("late_s", ALL, "s", "Longest delay of the process's clock thread since the line before."),
    Figure(
        "names_away_s", ALL, "s", "Time for which name resolution has not answered the process; missing if it does."
    ),
    Figure("loop_late_s", ALL, "s", "Longest delay of the process's event loop since the line before."),
    Figure(
        "clock_ahead_s",
        "staging_server",
        "s",
        "By how much the clock of its host is ahead of the launcher's host; times from there are corrected by it.",
    ),
    Figure("clock_within_s", "staging_server", "s", "By how much at most `clock_ahead_s` is wrong."),
    Figure("gpu_used", "model_worker", "bytes", "Memory of the GPU that is in use, by any process."),
    Figure("gpu_bytes", "model_worker", "bytes", "Memory that the GPU has."),
    Figure("gpu_peak", "model_worker", "bytes", "Most memory of the GPU that the process has reserved so far."),
    Figure("computing_s", "model_worker", "s", "Time that the rank has spent in the calls of steps.", grows=True),
    Figure(
        "flops_total",
        "model_worker",
        "FLOP",
        "Operations of matrix products that the rank has done in them.",
        grows=True,
    ),
    Figure("peak_flops", "model_worker", "FLOP/s", "Peak of the rank's device, of which `mfu` is a share."),
    Figure("mfu", "model_worker", "share", "Share of the peak that the rank reached in the calls of its newest step."),
    Figure("encoded_total", "encoder_server", "clips", "Clips that the server has embedded.", grows=True),
    Figure(
        "encoder_hits_total",
        "encoder_server",
        "clips",
        "Clips that it had in its cache when they were asked for.",
        grows=True,
    ),
    Figure("encoder_waiting", "encoder_server", "clips", "Clips that wait for the encoder."),
    Figure("rollouts", "rollout_worker", "rollouts", "Rollouts that the worker plays now."),
    Figure("places", "rollout_worker", "rollouts", "Rollouts that the worker may play at a time."),
    Figure("running", "generation_server", "samples", "Samples that the server generates now."),
    Figure("queued", "generation_server", "samples", "Samples that wait for room in the server's batch."),
    Figure("paused", "generation_server", "samples", "Samples that are held during a weight update."),
    Figure("tokens_per_s", "generation_server", "tokens/s", "Tokens that the server generates each second."),
    Figure("generated_total", "generation_server", "tokens", "Tokens that the server has generated.", grows=True),
    Figure(
        "prompt_total", "generation_server", "tokens", "Tokens of prompts that the server has taken in.", grows=True
    ),
    Figure(
        "cached_total",
        "generation_server",
        "tokens",
        "Tokens of prompts that the server found in its prefix cache.",
        grows=True,
    ),
    Figure(
        "prefilled_total",
        "generation_server",
        "tokens",
        "Tokens of prompts that the embedded engine computed, those that several samples share once.",
        grows=True,
    ),
    Figure(
        "kept_tokens",
        "generation_server",
        "tokens",
        "Positions of the embedded engine's KV cache that hold earlier requests for later ones that begin alike.",
    ),
    Figure(
        "retracted_total",
        "generation_server",
        "samples",
        "Samples that lost their place, as the KV cache was full.",
        grows=True,
    ),
    Figure(
        "aborted_total",
        "generation_server",
        "samples",
        "Requests that were ended before their answer was complete.",
        grows=True,
    ),
    Figure("busy_s", "generation_server", "s", "Time that the server has spent in steps of its engine.", grows=True),
    Figure("max_running", "generation_server", "samples", "Samples that the server generates at a time at most."),
    Figure("max_tokens", "generation_server", "tokens", "Positions of the server's KV cache."),
    Figure("kv_share", "generation_server", "share", "Share of the KV cache that is in use."),
    Figure("silent", "generation_server", "", "1 while the engine does not answer."),
    Figure("answers_total", "rollout_worker", "answers", "Answers that the worker's agents have received.", grows=True),
    Figure("training", "master_worker", "", "1 while a step is being trained."),
    Figure("rollouts_running", "gserver_manager", "rollouts", "Rollouts that run."),
    Figure("finished_untrained", "gserver_manager", "rollouts", "Rollouts that have finished and are not trained yet."),
    Figure("submitted_total", "gserver_manager", "rollouts", "Rollouts that the gate has admitted.", grows=True),
    Figure("trained_total", "gserver_manager", "rollouts", "Rollouts that were trained.", grows=True),
    Figure("dropped_total", "gserver_manager", "rollouts", "Rollouts that were dropped, for any reason.", grows=True),
    Figure(
        "gate_limit", "gserver_manager", "rollouts", "Rollouts that the gate admits up to now: (η + version + 1) · B."
    ),
    Figure("idle_s", "gserver_manager", "s", "Time in which no rollout ran, as the gate let none begin.", grows=True),
    Figure("served_version", "gserver_manager", "", "Oldest version of the policy that requests are sent to."),
    Figure("trained_version", "gserver_manager", "", "Version of the policy that the trainer has."),
    Figure("workers", "gserver_manager", "workers", "RolloutWorkers that are alive."),
    Figure("servers_serving", "gserver_manager", "servers", "Servers that take requests."),
    Figure("servers_draining", "gserver_manager", "servers", "Servers that finish requests before a weight update."),
    Figure("servers_updating", "gserver_manager", "servers", "Servers that load new weights."),
    Figure("servers_releasing", "gserver_manager", "servers", "Guests that give their memory back to the trainer."),
    Figure("servers_resting", "gserver_manager", "servers", "Guests that rest while the trainer has their devices."),
    Figure("servers_quarantined", "gserver_manager", "servers", "Servers that are left out after a fault."),
)
NO_FIGURES = frozenset({"at", "pid", "stage", "activity", "since", "ended", "failed", "shortage"})
"""Further keys in a line of `observed/`: its time, the process that wrote it, and what the process does."""
_FIGURES = {figure.name: figure for figure in OBSERVED}


def find_figure(name: str) -> Figure | None:
    """Return the entry of the figure `name` of a line in `observed/`; None if the table does not have it."""
    return _FIGURES.get(name)
