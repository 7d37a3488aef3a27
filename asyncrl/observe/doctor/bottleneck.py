"""Rules that name the stages which set the pace, each with what its relief gives at best (`Measured.step_if`).

Several hold at a time: a slow reward fills the places, an evaluation the servers. The bottleneck is the one whose
relief gains most; of equal ones that which comes first in `RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from asyncrl.observe.doctor.finding import Finding, Level
from asyncrl.observe.doctor.measured import LITTLE_WAITING, SERVES, Measured, ServerLoad, typical

Rule = Callable[[Measured], Finding | None]

EVALUATION_SHARE = 0.3
IDLE_SHARE = 0.3
CALL_SHARE = 0.4
LATE_S = 0.3
BUSY_ENGINE = 0.5
STARVED = 0.3
DEVICES_COST = 1.15
ADVICE_OF_CALL = {
    "reward": "Make it faster, or let more rollouts wait for it at once",
    "environment": "Make it faster, or let more rollouts wait for it at once",
    "tool": "Make it faster, or let more rollouts wait for it at once",
}


def bottlenecks(m: Measured) -> Iterator[Finding]:
    """The findings of all rules that hold, the one whose relief gains most first.

    Those whose gain nobody can tell, such as of a host that is too slow, come before: they are causes outside the run.
    More servers cost money, so a setting that gains nearly as much comes before them.
    """
    found = [finding for rule in RULES if (finding := rule(m)) is not None]
    costs = {"slow-generation": DEVICES_COST}
    yield from sorted(found, key=lambda finding: (finding.at_best_s or 0.0) * costs.get(finding.kind, 1.0))


def balanced(m: Measured) -> Finding | None:
    """Say that no stage waits much for another."""
    waits = m.wait + m.parts["wait_eval"] / m.step_s
    if waits >= LITTLE_WAITING or m.idle > 0.1 or m.waited_s > 1.5 * m.step_s:
        return None
    return Finding(
        "balanced",
        Level.remark,
        "Balanced",
        f"training waits for rollouts {_percent(m.wait)} of the time, and generation waits for training "
        f"{_percent(m.idle)} of it.",
        step_s=m.step_s,
    )


def evaluation(m: Measured) -> Finding | None:
    """Training waits for evaluations."""
    wait_s = m.parts["wait_eval"]
    if wait_s <= EVALUATION_SHARE * m.step_s and m.evaluating <= EVALUATION_SHARE:
        return None
    return _finding(
        m,
        "evaluation",
        "Evaluations set the pace",
        f"training waits {wait_s:.1f} s of each {m.step_s:.1f} s step for an evaluation to end, and "
        f"{_percent(m.evaluating)} of the servers' samples are evaluations'; {_percent(m.evaluations)} of the versions "
        "are evaluated.",
        "Raise eval.interval, or lower eval.size.",
        m.step_if(
            trainer_s=m.trainer_s - wait_s,
            generation_s=m.calls.get("generation", 0.0) * (1 - m.evaluating),
            server=1 - m.evaluating,
        ),
    )


def eta_too_small(m: Measured) -> Finding | None:
    """Generation and training take turns, as the gate is full."""
    gained_s = max(m.trainer_s, m.wait_s)
    takes_turns = m.idle > IDLE_SHARE or (m.eta == 0 and gained_s < 0.9 * m.step_s)
    if not takes_turns or m.wait < 0.1:
        return None
    return _finding(
        m,
        "eta-too-small",
        "η is too small",
        f"the gate is full {m.idle_s:.2f} s of each {m.step_s:.2f} s step (max_head_offpolicyness={m.eta}), and "
        f"training then waits {_percent(m.wait)} of the time: generation and training take turns.",
        f"Set max_head_offpolicyness={m.eta + 1}.",
        gained_s,
    )


def trainer(m: Measured) -> Finding | None:
    """The trainer is busy nearly all of the time."""
    if m.wait >= LITTLE_WAITING:
        return None
    parts = {name: seconds for name, seconds in m.parts.items() if name != "wait_for_batch"}
    top = max(parts, key=lambda name: parts[name])
    kind = {"publish": "publish", "memory_checkpoint": "checkpoint-disk", "other": "checkpoint-disk"}.get(
        top, "trainer"
    )
    advice = {
        "publish": "Publish from memory (manager.weight_transport), or to a faster disk.",
        "memory_checkpoint": "The in-memory checkpoint is slow: see that /dev/shm has room, or leave it out "
        "(checkpoint.in_memory=false); a crash of the trainer then costs the steps since the newest checkpoint.",
        "other": "Checkpoints and reports take this long: a faster disk, or a larger checkpoint.interval.",
    }.get(
        top,
        "More training ranks, larger micro-batches (trainer.tokens_per_micro_batch), or fewer servers; "
        "rollout.pacing=deadline keeps tokens young meanwhile.",
    )
    return _finding(
        m,
        kind,
        "The trainer sets the pace",
        f"it is busy {_percent(1 - m.wait)} of the time, {parts[top]:.2f} s of each {m.step_s:.2f} s step with "
        f"{_part_name(top)}; a finished rollout waits {m.waited_s:.1f} s for it and {_percent(m.busy)} of the places "
        "are taken.",
        advice,
        m.step_if(trainer_s=m.trainer_s - parts[top] / 2),
    )


def slow_call(m: Measured) -> Finding | None:
    """Most of a rollout is spent in the user's code, or waiting for a place to run it."""
    calls = {what: seconds for what, seconds in m.calls.items() if what != "generation"}
    what = max(calls, key=lambda name: calls[name], default="")
    if m.wait < LITTLE_WAITING or not what or calls[what] <= CALL_SHARE * m.rollout_s:
        return None
    if what == "a place for user code":
        return _finding(
            m,
            "blocked-user-code",
            "Too few places for user code",
            f"{_waits(m)}; {calls[what]:.2f} of the {m.rollout_s:.2f} s of a rollout are spent waiting for a thread or "
            "process in which user code may run.",
            "Raise rollout.user_code.threads or rollout.user_code.processes.",
            m.step_if(user_s=m.rollout_s - m.calls.get("generation", 0.0) - calls[what]),
        )
    want = _places_wanted(m)
    setting = f": rollout.max_concurrent={want}." if want > m.places else "."
    return _finding(
        m,
        f"slow-{what}",
        f"A slow {what}",
        f"{_waits(m)}; the {what} takes {calls[what]:.2f} of the {m.rollout_s:.2f} s of a rollout, and "
        f"{m.busy_places:.0f} of {m.places} places are taken, most of them by rollouts that wait for it.",
        ADVICE_OF_CALL[what] + setting,
        m.step_if(places=max(want, m.places)),
    )


def blocked_loop(m: Measured) -> Finding | None:
    """User code keeps a RolloutWorker's event loop from running; a loop that waits for a core is another cause."""
    late, thread_late = m.worker_loop_late_s, m.worker_late_s or 0.0
    if m.wait < LITTLE_WAITING or late is None or late < LATE_S or late < 3 * thread_late:
        return None
    if (m.worker_no_core or 0.0) > STARVED:
        return None
    return _finding(
        m,
        "blocked-event-loop",
        "A blocked event loop",
        f"{_waits(m)}; the event loop of a RolloutWorker comes {late:.1f} s late on average, so that all its rollouts "
        "stand still: a coroutine of an agent, environment, reward or tool computes or calls something that blocks.",
        "Make it a plain function (`def`), which runs in a thread, or await what blocks with asyncio.to_thread.",
        None,
    )


def slow_server(m: Measured) -> Finding | None:
    """One of several servers is much slower than the others."""
    absent = [server for server in m.servers if server.stage != SERVES]
    if m.wait >= LITTLE_WAITING and absent and len(absent) < len(m.servers):
        told = ", ".join(f"{server.name} {server.stage}" for server in absent)
        return _finding(
            m,
            "slow-server",
            "A server that does not serve",
            f"{_waits(m)}; {told}, and the others serve.",
            "Look at its log and its host.",
            m.step_if(generation_s=m.calls.get("generation", 0.0) / 2, server=1 - len(absent) / len(m.servers)),
        )
    rates = {server.name: server.tokens_per_sample for server in m.servers}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if m.wait < LITTLE_WAITING or len(known) < 2:
        return None
    slowest = min(known, key=lambda name: known[name])
    others = typical(rate for name, rate in known.items() if name != slowest)
    if known[slowest] > 0.5 * others:
        return None
    return _finding(
        m,
        "slow-server",
        "One slow server",
        f"{_waits(m)}; {slowest} decodes {known[slowest]:.1f} tokens a second for each running sample, the others "
        f"{others:.1f}.",
        "Look at its host: another process, a throttled GPU, a slow link; or take it out.",
        None,
    )


def server_limits(m: Measured) -> Finding | None:
    """Samples queue in the servers."""
    running, queued, most = m.total("running"), m.total("queued"), m.total("max_running")
    if m.wait < LITTLE_WAITING or running is None or queued is None or not m.queues or _held(m):
        return None
    unqueued_s = m.calls.get("generation", 0.0) * running / max(1.0, running + queued)
    at_best_s = m.step_if(generation_s=unqueued_s, queues=False)
    kv = max(server.kv_share or 0.0 for server in m.servers)
    retracted = m.total("retracted_s") or 0.0
    seen = f"{_waits(m)}; {queued:.0f} samples wait in the servers while {running:.0f}"
    if kv > 0.7 or retracted > 0 or (most and running < 0.6 * most):
        return _finding(
            m,
            "kv-cache-too-small",
            "The KV cache is too small",
            f"{seen} run; the KV cache is {_percent(kv)} full.",
            "Raise generation.max_total_tokens (SGLang: generation.sglang.args.mem_fraction_static), or shorten "
            "answers.",
            at_best_s,
        )
    want = 2 ** math.ceil(math.log2(max(2.0, running + queued)))
    return _finding(
        m,
        "server-batch-too-small",
        "The servers' batch is too small",
        f"{seen} of at most {most or running:.0f} run; the KV cache is {_percent(kv)} full.",
        f"Set generation.max_running_requests={want}.",
        at_best_s,
    )


def no_processor(m: Measured) -> Finding | None:
    """A server's threads are ready and no core is free."""
    for server in m.servers:
        if m.wait >= LITTLE_WAITING and _engine_held(server) and (server.no_core or 0.0) > STARVED:
            return _finding(
                m,
                "no-cpu",
                "A host without free processors",
                f"{_waits(m)}; {server.name} is in engine steps {_percent(server.busy or 0)} of the time and on a "
                f"processor {_percent(server.cpu or 0)}; {_percent(server.no_core or 0)} of it its threads were ready "
                "and had none.",
                "Other processes take the host's cores: run fewer of them, or use more cores.",
                None,
            )
    return None


def held_server(m: Measured) -> Finding | None:
    """A server is stopped or throttled."""
    for server in m.servers:
        if m.wait < LITTLE_WAITING:
            return None
        late = (server.late_s or 0.0) > LATE_S
        if (_engine_held(server) and (server.no_core or 0.0) <= STARVED and late) or server.silent > 0.2:
            return _finding(
                m,
                "slow-server",
                "A server that is held up",
                f"{_waits(m)}; {server.name} is in engine steps {_percent(server.busy or 0)} of the time and on a "
                f"processor {_percent(server.cpu or 0)}; its own clock comes {server.late_s or 0:.1f} s late.",
                "Something stops or throttles the process: look at its host.",
                None,
            )
    return None


def too_few_places(m: Measured) -> Finding | None:
    """All places are taken, and the servers have room for more."""
    most = _room(m)
    if m.wait < LITTLE_WAITING or m.busy <= 0.85 or not m.places:
        return None
    if most is None or m.places * m.group >= 0.5 * most:
        return None
    want = max(m.places + 1, min(int(most / m.group), (m.eta + 1) * m.batch))
    running = m.total("running")
    seen = "" if running is None else f" and run {running:.0f} of {most:.0f} samples"
    return _finding(
        m,
        "too-few-places",
        "Too few places for rollouts",
        f"{_waits(m)}; all {m.places} places are taken, and they can fill {m.places * m.group} of the servers' "
        f"{most:.0f} samples{seen}.",
        f"Set rollout.max_concurrent={want}.",
        m.step_if(places=want),
    )


def weight_updates(m: Measured) -> Finding | None:
    """Servers spend their time loading weights."""
    updating = max((server.updating for server in m.servers), default=0.0)
    if m.wait < LITTLE_WAITING or updating <= 0.3:
        return None
    return _finding(
        m,
        "slow-updates",
        "Weight updates take long",
        f"{_waits(m)}; the servers load weights {_percent(updating)} of the time.",
        "Set manager.update_mode=in_place, or a manager.weight_transport from memory.",
        m.step_if(generation_s=m.calls.get("generation", 0.0) * (1 - updating), server=1 - updating),
    )


def admission(m: Measured) -> Finding | None:
    """Places are free and the gate is open, and yet no rollout begins."""
    if m.wait < LITTLE_WAITING or not m.places or m.busy >= 0.6 or m.idle > 0.1:
        return None
    if (m.eta + 1) * m.batch < 2 * m.places:  # the gate keeps them free
        return None
    return _finding(
        m,
        "admission",
        "Rollouts begin late",
        f"{_waits(m)}; only {m.busy_places:.0f} of {m.places} places are taken, though the gate is open "
        f"{_percent(1 - m.idle)} of the time.",
        "With rollout.pacing=deadline set rollout.pacing=eager; else look at the logs of gserver_manager and "
        "rollout_worker.",
        None,
    )


def generation(m: Measured) -> Finding | None:
    """Generation is the bottleneck, since nothing else is: the servers decode as fast as they can."""
    if m.wait < LITTLE_WAITING:
        return None
    rate, running = m.total("tokens_s"), m.total("running")
    does = "" if not rate else f"; the servers decode {rate:,.0f} tokens a second for {running or 0:.0f} samples"
    return _finding(
        m,
        "slow-generation",
        "Generation sets the pace",
        f"{_waits(m)}; {m.calls.get('generation', 0.0):.2f} of the {m.rollout_s:.2f} s of a rollout are generation, "
        f"and {m.busy_places:.0f} of {m.places} places are taken{does}.",
        "More generation servers, or shorter answers; the figure is for twice the servers.",
        m.step_if(generation_s=m.calls.get("generation", 0.0) / 2, server=0.5),
    )


RULES: tuple[Rule, ...] = (
    evaluation,
    eta_too_small,
    trainer,
    blocked_loop,
    slow_call,
    slow_server,
    server_limits,
    too_few_places,
    no_processor,
    held_server,
    weight_updates,
    admission,
    generation,
)


def _finding(m: Measured, kind: str, title: str, sentence: str, advice: str, at_best_s: float | None) -> Finding:
    return Finding(kind, Level.bottleneck, title, sentence, advice, m.step_s, at_best_s)


def _waits(m: Measured) -> str:
    return f"training waits for rollouts {_percent(m.wait)} of the time ({m.wait_s:.2f} of {m.step_s:.2f} s a step)"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _part_name(part: str) -> str:
    return {
        "train": "training",
        "publish": "publishing weights",
        "memory_checkpoint": "the in-memory checkpoint",
        "wait_eval": "waiting for an evaluation",
        "other": "reports and checkpoints",
    }[part]


def _places_wanted(m: Measured) -> int:
    """Places that supply a batch in the time that the next stage takes, within what η lets live."""
    next_s = max(m.trainer_s, m.batch * m.calls.get("generation", 0.0) / max(m.places, 1), 1e-3)
    return min(math.ceil(m.batch * m.rollout_s / next_s), (m.eta + 1) * m.batch)


def _room(m: Measured) -> float | None:
    """Samples that the servers can run at a time: by their batch, and by their KV cache at its present use."""
    rooms = []
    for server in m.servers:
        if server.max_running is None:
            return None
        by_cache = (server.running or 0.0) / server.kv_share if server.kv_share else server.max_running
        rooms.append(min(server.max_running, by_cache))
    return sum(rooms) if rooms else None


def _engine_held(server: ServerLoad) -> bool:
    return server.busy is not None and server.busy > BUSY_ENGINE and (server.cpu or 0.0) < STARVED * server.busy


def _held(m: Measured) -> bool:
    return any(_engine_held(server) and (server.late_s or 0.0) > LATE_S for server in m.servers)
