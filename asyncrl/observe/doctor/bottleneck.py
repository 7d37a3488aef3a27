"""Rules that find the stages that limit the speed, each with the best step time without that limit
(`Measured.step_if`).

Several rules may hold at a time: a slow reward fills the slots, an evaluation fills the servers. The bottleneck is the
stage with the largest possible gain; of equal ones, the first in `RULES`.

Rules on servers apply to those of further policies (`policies`) too. A server is compared only with servers of its own
policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

from asyncrl.inference.settings import GenerationConfig
from asyncrl.observe.doctor.finding import Finding, Level, percent
from asyncrl.observe.doctor.measured import LITTLE_WAITING, Fleet, Measured, ServerLoad

Rule = Callable[[Measured], Finding | None]
LATE_S = 0.3
BUSY_ENGINE = 0.5
STARVED = 0.3
EVALUATION_SHARE = 0.3
IDLE_SHARE = 0.3
CALL_SHARE = 0.4
DEVICES_COST = 1.15
ADVICE_OF_CALL = {
    "reward": "Make it faster, or let more rollouts wait for it at once",
    "environment": "Make it faster, or let more rollouts wait for it at once",
    "tool": "Make it faster, or let more rollouts wait for it at once",
}


def bottlenecks(m: Measured) -> Iterator[Finding]:
    """Yield the findings of all rules that hold, the largest possible gain first.

    Findings with an unknown gain, such as a host that is too slow, come before: their causes are outside the run. More
    servers cost money, so a setting that gains nearly as much comes before them.
    """
    found = [finding for rule in RULES if (finding := rule(m)) is not None]
    costs = {"slow-generation": DEVICES_COST, "shared-devices": DEVICES_COST}
    yield from sorted(found, key=lambda finding: (finding.at_best_s or 0.0) * costs.get(finding.kind, 1.0))


def balanced(m: Measured) -> Finding | None:
    """No stage waits much for another."""
    waiting = m.wait + m.parts["wait_eval"] / m.step_s
    if waiting >= LITTLE_WAITING or m.idle > 0.1 or m.waited_s > 1.5 * m.step_s:
        return None
    return Finding(
        "balanced",
        Level.notice,
        "Balanced",
        f"training waits for rollouts {percent(m.wait)} of the time, and generation waits for training "
        f"{percent(m.idle)} of it.",
        step_s=m.step_s,
    )


def bottleneck(
    m: Measured, kind: str, title: str, sentence: str, advice: str, at_best_s: float | None = None
) -> Finding:
    """Return the finding that a stage sets the pace; `at_best_s`: seconds of a step without it, None if unknown."""
    return Finding(kind, Level.bottleneck, title, sentence, advice, m.step_s, at_best_s)


def waits(m: Measured) -> str:
    """Return text on how long the trainer waits for rollouts."""
    return f"training waits for rollouts {percent(m.wait)} of the time ({m.wait_s:.2f} of {m.step_s:.2f} s a step)"


def evaluation(m: Measured) -> Finding | None:
    """Training waits for evaluations."""
    wait_s = m.parts["wait_eval"]
    if wait_s <= EVALUATION_SHARE * m.step_s and m.evaluating <= EVALUATION_SHARE:
        return None
    return bottleneck(
        m,
        "evaluation",
        "Evaluations set the pace",
        f"training waits {wait_s:.1f} s of each {m.step_s:.1f} s step for an evaluation to end, and "
        f"{percent(m.evaluating)} of the servers' samples are evaluations'; {percent(m.evaluations)} of the versions "
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
    alternate = m.idle > IDLE_SHARE or (m.eta == 0 and gained_s < 0.9 * m.step_s)
    if not alternate or m.wait < 0.1 or m.takes_turns:
        return None
    return bottleneck(
        m,
        "eta-too-small",
        "η is too small",
        f"the gate is full {m.idle_s:.2f} s of each {m.step_s:.2f} s step (max_head_offpolicyness={m.eta}), and "
        f"training then waits {percent(m.wait)} of the time: generation and training take turns.",
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
    from_memory = m.settings.get("manager.weight_transport") not in (None, "disk")
    fixes = ["fewer servers", "more cores"]
    if not m.cores_are_taken:
        fixes = ["more training ranks" if m.on_gpu else "more threads (trainer.threads)"]
    minibatches = int(m.settings.get("trainer.ppo_minibatches") or 1)
    if m.rank_tokens > minibatches * int(m.settings.get("trainer.tokens_per_micro_batch") or 0):
        fixes.append("larger micro-batches (trainer.tokens_per_micro_batch)")
    elif minibatches > 1:
        fixes.append(f"fewer minibatches (trainer.ppo_minibatches={minibatches} now), at a higher learning rate")
    young = (
        ""
        if m.settings.get("rollout.pacing") == "deadline"
        else "; rollout.pacing=deadline keeps tokens young meanwhile"
    )
    advice = {
        "publish": "Publish to a faster disk." if from_memory else "Publish from memory (manager.weight_transport).",
        "memory_checkpoint": "The in-memory checkpoint is slow: see that /dev/shm has room, or leave it out "
        "(checkpoint.in_memory=false); a crash of the trainer then costs the steps since the newest checkpoint.",
        "other": "Checkpoints and reports take this long: a faster disk, or a larger checkpoint.interval.",
    }.get(top, f"{' or '.join([', '.join(fixes[:-1]), fixes[-1]] if fixes[:-1] else fixes)}{young}.".capitalize())
    return bottleneck(
        m,
        kind,
        "The trainer sets the pace",
        f"it is busy {percent(1 - m.wait)} of the time, {parts[top]:.2f} s of each {m.step_s:.2f} s step with "
        f"{_part_name(top)}; a finished rollout waits {m.waited_s:.1f} s for it and {percent(m.busy)} of the slots "
        "are taken.",
        advice,
        m.step_if(trainer_s=m.trainer_s - parts[top] / 2),
    )


def _part_name(part: str) -> str:
    return {
        "switch": "waiting for servers to leave the devices",
        "train": "training",
        "publish": "publishing weights",
        "memory_checkpoint": "the in-memory checkpoint",
        "wait_eval": "waiting for an evaluation",
        "other": "reports and checkpoints",
    }[part]


def blocked_loop(m: Measured) -> Finding | None:
    """User code keeps a RolloutWorker's event loop from running; a loop that waits for a core is another cause."""
    late, thread_late = m.worker_loop_late_s, m.worker_late_s or 0.0
    if m.wait < LITTLE_WAITING or late is None or late < LATE_S or late < 3 * thread_late:
        return None
    if (m.worker_no_core or 0.0) > STARVED:
        return None
    return bottleneck(
        m,
        "blocked-event-loop",
        "A blocked event loop",
        f"{waits(m)}; the event loop of a RolloutWorker comes {late:.1f} s late on average, so that all its rollouts "
        "stand still: a coroutine of an agent, environment, reward or tool computes or calls something that blocks.",
        "Make it a plain function (`def`), which runs in a thread, or await what blocks with asyncio.to_thread.",
    )


def slow_call(m: Measured) -> Finding | None:
    """Most of a rollout is spent in the user's code, or waiting for a slot to run it."""
    calls = {what: seconds for what, seconds in m.calls.items() if what != "generation"}
    what = max(calls, key=lambda name: calls[name], default="")
    if m.wait < LITTLE_WAITING or not what or calls[what] <= CALL_SHARE * m.rollout_s:
        return None
    if what == "a slot for user code":
        return bottleneck(
            m,
            "blocked-user-code",
            "Too few slots for user code",
            f"{waits(m)}; {calls[what]:.2f} of the {m.rollout_s:.2f} s of a rollout are spent waiting for a thread or "
            "process in which user code may run.",
            "Raise rollout.user_code.threads or rollout.user_code.processes.",
            m.step_if(user_s=m.rollout_s - m.calls.get("generation", 0.0) - calls[what]),
        )
    want = _places_wanted(m)
    setting = f": rollout.max_concurrent={math.ceil(want / m.workers)}."
    return bottleneck(
        m,
        f"slow-{what}",
        f"A slow {what}",
        f"{waits(m)}; the {what} takes {calls[what]:.2f} of the {m.rollout_s:.2f} s of a rollout, and "
        f"{m.busy_slots:.0f} of {m.slots} slots are taken, most of them by rollouts that wait for it.",
        ADVICE_OF_CALL[what] + setting if want > m.slots else "Make it faster.",
        m.step_if(slots=max(want, m.slots)),
    )


def _places_wanted(m: Measured) -> int:
    """Return the number of slots that supply a batch in the time of the next stage, limited by the rollouts that η
    allows.
    """
    next_s = max(m.trainer_s, m.batch * m.calls.get("generation", 0.0) / max(m.slots, 1), 1e-3)
    return min(math.ceil(m.batch * m.rollout_s / next_s), (m.eta + 1) * m.batch)


def slow_server(m: Measured) -> Finding | None:
    """One of a policy's servers is much slower than the others, or does not serve."""
    if m.wait < LITTLE_WAITING:
        return None
    found = (_absent(m, fleet) or _slowest(m, fleet) for fleet in m.fleets.values())
    return next((finding for finding in found if finding is not None), None)


def _absent(m: Measured, fleet: Fleet) -> Finding | None:
    absent = [server for server in fleet.servers if not server.serves]
    servers = len(fleet.servers)
    if not absent or len(absent) == servers:
        return None
    stages = ", ".join(f"{server.name} {server.stage}" for server in absent)
    return bottleneck(
        m,
        "slow-server",
        "A server that does not serve",
        f"{waits(m)}; {stages}, and the others serve.",
        "Look at its log and its host.",
        m.step_if(generation_s=m.calls.get("generation", 0.0) / 2, server=1 - len(absent) / servers),
    )


def _slowest(m: Measured, fleet: Fleet) -> Finding | None:
    rates = {server.name: server.tokens_per_sample for server in fleet.servers}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if len(known) < 2:
        return None
    slowest = min(known, key=lambda name: known[name])
    others = median(rate for name, rate in known.items() if name != slowest)
    if known[slowest] > 0.5 * others:
        return None
    return bottleneck(
        m,
        "slow-server",
        "One slow server",
        f"{waits(m)}; {slowest} decodes {known[slowest]:.1f} tokens a second for each running sample, the others "
        f"{others:.1f}.",
        "Look at its host: another process, a throttled GPU, a slow link; or take it out.",
    )


def server_limits(m: Measured) -> Finding | None:
    """Samples queue in the servers of a policy."""
    if m.wait < LITTLE_WAITING or any(map(_is_held, m.all_servers)):
        return None
    queueing = [fleet for fleet in m.fleets.values() if fleet.queues]
    return _limit(m, max(queueing, key=lambda fleet: fleet.samples)) if queueing else None


def _limit(m: Measured, fleet: Fleet) -> Finding | None:
    """Return the limit for which the samples queue; None if there is room: they wait for their prefill."""
    running, queued, most = fleet.total("running"), fleet.total("queued"), fleet.total("max_running")
    assert running is not None
    assert queued is not None
    unqueued_s = m.calls.get("generation", 0.0) * running / max(1.0, running + queued)
    at_best_s = m.step_if(generation_s=unqueued_s, queues=False)
    kv = max(server.kv_share or 0.0 for server in fleet.servers)
    retracted = fleet.total("retracted_s") or 0.0
    seen = f"{waits(m)}; {queued:.0f} samples wait in {fleet.name} while {running:.0f}"
    if kv > 0.7 or retracted > 0 or (most and running < 0.6 * most and kv > 0.3):
        backend = str(m.settings.get("generation.backend") or GenerationConfig().backend)
        cache = GenerationConfig(backend).engine.memory_setting
        return bottleneck(
            m,
            "kv-cache-too-small",
            "The KV cache is too small",
            f"{seen} run; the KV cache is {percent(kv)} full.",
            f"Raise {cache}, or shorten answers.",
            at_best_s,
        )
    if most and running + queued <= most:
        return None
    want = 2 ** math.ceil(math.log2(max(2.0, (running + queued) / len(fleet.servers))))
    return bottleneck(
        m,
        "server-batch-too-small",
        "The servers' batch is too small",
        f"{seen} of at most {most or running:.0f} run; the KV cache is {percent(kv)} full.",
        f"Set generation.max_running_requests={want}.",
        at_best_s,
    )


def too_few_slots(m: Measured) -> Finding | None:
    """All slots are taken, and the servers have room for more."""
    most = _server_capacity(m)
    if m.wait < LITTLE_WAITING or m.busy <= 0.85 or not m.slots:
        return None
    if most is None or m.slots * m.group >= 0.5 * most:
        return None
    want = max(m.slots + 1, min(int(most / m.group), (m.eta + 1) * m.batch))
    running = m.own.total("running")
    seen = "" if running is None else f" and run {running:.0f} of {most:.0f} samples"
    return bottleneck(
        m,
        "too-few-slots",
        "Too few slots for rollouts",
        f"{waits(m)}; all {m.slots} slots are taken, and they can fill {m.slots * m.group} of the servers' "
        f"{most:.0f} samples{seen}.",
        f"Set rollout.max_concurrent={math.ceil(want / m.workers)}.",
        m.step_s if m.cores_are_taken else m.step_if(slots=want),  # larger batches help, by how much is not known
    )


def _server_capacity(m: Measured) -> float | None:
    """Return the number of samples that the servers can run at a time, limited by their batch and by their KV cache at
    its present use.
    """
    capacities = []
    for server in m.servers:
        if server.max_running is None:
            return None
        by_cache = (server.running or 0.0) / server.kv_share if server.kv_share else server.max_running
        capacities.append(min(server.max_running, by_cache))
    return sum(capacities) if capacities else None


def no_processor(m: Measured) -> Finding | None:
    """A server's threads are ready and no core is free."""
    for server in m.all_servers:
        if m.wait >= LITTLE_WAITING and _is_off_processor(server) and (server.no_core or 0.0) > STARVED:
            return bottleneck(
                m,
                "no-cpu",
                "A host without free processors",
                f"{waits(m)}; {server.name} is in engine steps {percent(server.busy or 0)} of the time and on a "
                f"processor {percent(server.cpu or 0)}; in the mean {server.no_core or 0:.1f} of its threads were "
                "ready and had none.",
                "Other processes take the host's cores: run fewer of them, or use more cores.",
            )
    return None


def held_server(m: Measured) -> Finding | None:
    """A server is stopped or throttled."""
    for server in m.all_servers:
        if m.wait < LITTLE_WAITING:
            return None
        if (_is_held(server) and (server.no_core or 0.0) <= STARVED) or server.silent > 0.2:
            return bottleneck(
                m,
                "slow-server",
                "A server that is held up",
                f"{waits(m)}; {server.name} is in engine steps {percent(server.busy or 0)} of the time and on a "
                f"processor {percent(server.cpu or 0)}; its own clock comes {server.late_s or 0:.1f} s late.",
                "Something stops or throttles the process: look at its host.",
            )
    return None


def _is_off_processor(server: ServerLoad) -> bool:
    """True if the server is in engine steps for much longer than on a processor."""
    return server.busy is not None and server.busy > BUSY_ENGINE and (server.cpu or 0.0) < STARVED * server.busy


def _is_held(server: ServerLoad) -> bool:
    """True if something keeps the server's process from running."""
    return _is_off_processor(server) and (server.late_s or 0.0) > LATE_S


def weight_updates(m: Measured) -> Finding | None:
    """Servers spend their time loading weights."""
    updating = max((server.updating for server in m.all_servers), default=0.0)
    if m.wait < LITTLE_WAITING or updating <= 0.3:
        return None
    if m.takes_turns:
        fixes = ["a larger train_batch_size", *([] if m.eta else ["max_head_offpolicyness=1 or more"])]
        advice = f"Switch less often: {' or '.join(fixes)}."
    else:
        in_place = m.settings.get("manager.update_mode") == "in_place"
        from_disk = m.settings.get("manager.weight_transport") in (None, "disk")
        fixes = [] if in_place else ["manager.update_mode=in_place"]
        fixes += ["a manager.weight_transport from memory"] if from_disk else []
        advice = f"Set {' or '.join(fixes)}." if fixes else "Train more a step, so that there are fewer versions."
    return bottleneck(
        m,
        "slow-updates",
        "Weight updates take long",
        f"{waits(m)}; the servers load weights {percent(updating)} of the time.",
        advice,
        m.step_if(generation_s=m.calls.get("generation", 0.0) * (1 - updating), server=1 - updating),
    )


def admission(m: Measured) -> Finding | None:
    """Slots are free and the gate is open, and yet no rollout begins."""
    if m.wait < LITTLE_WAITING or not m.slots or m.busy >= 0.6 or m.idle > 0.1:
        return None
    if (m.eta + 1) * m.batch < 2 * m.slots:  # the gate itself keeps slots free
        return None
    return bottleneck(
        m,
        "admission",
        "Rollouts begin late",
        f"{waits(m)}; only {m.busy_slots:.0f} of {m.slots} slots are taken, though the gate is open "
        f"{percent(1 - m.idle)} of the time.",
        "Set rollout.pacing=eager."
        if m.settings.get("rollout.pacing") == "deadline"
        else "Look at the logs of gserver_manager and rollout_worker.",
    )


def shared_devices(m: Measured) -> Finding | None:
    """All servers are colocated: what generation takes is added to what training takes."""
    if not m.takes_turns or m.wait < LITTLE_WAITING:
        return None
    leaving_s = m.parts["switch"]
    return bottleneck(
        m,
        "shared-devices",
        "Training and generation take turns",
        f"they share devices (generation.colocated): of each {m.step_s:.2f} s step generation has them "
        f"{m.wait_s:.2f} s and training {m.trainer_s:.2f} s, {leaving_s:.2f} s of which the servers take to leave.",
        "With devices of their own (generation.colocated=none) both run at once; on shared ones: shorter answers, or "
        "fewer switches by a larger train_batch_size or max_head_offpolicyness.",
        max(m.trainer_s - leaving_s, m.wait_s),
    )


def generation(m: Measured) -> Finding | None:
    """Generation is the bottleneck, since nothing else is: the servers decode as fast as they can."""
    if m.wait < LITTLE_WAITING or m.takes_turns:
        return None
    fleet = max(m.fleets.values(), key=lambda fleet: fleet.samples, default=m.own)
    rate, running = fleet.total("tokens_s"), fleet.total("running")
    does = "" if not rate else f"; {fleet.name} decode {rate:,.0f} tokens a second for {running or 0:.0f} samples"
    share = 1.0
    if len(m.fleets) > 1:
        share = fleet.samples / max(1e-9, sum(each.samples for each in m.fleets.values()))
        does += f", {percent(share)} of all"
    more = "More generation servers" if fleet.name == m.own.name else f"More of {fleet.name} (policies: servers)"
    twice_s = m.step_if(generation_s=m.calls.get("generation", 0.0) * (1 - share / 2), server=1 - share / 2)
    advice = f"{more}, or shorter answers; the figure is for twice the servers."
    if m.cores_are_taken:
        advice, twice_s = (
            "Shorter answers, or more cores; more servers would only share those that are there.",
            m.step_s,
        )
        does += f"; threads that could run had no core {percent(m.no_core)} of that time"
    return bottleneck(
        m,
        "slow-generation",
        "Generation sets the pace",
        f"{waits(m)}; {m.calls.get('generation', 0.0):.2f} of the {m.rollout_s:.2f} s of a rollout are generation, "
        f"and {m.busy_slots:.0f} of {m.slots} slots are taken{does}.",
        advice,
        twice_s,
    )


RULES: tuple[Rule, ...] = (
    evaluation,
    eta_too_small,
    trainer,
    blocked_loop,
    slow_call,
    slow_server,
    server_limits,
    too_few_slots,
    no_processor,
    held_server,
    weight_updates,
    admission,
    shared_devices,
    generation,
)
