"""Rules on generation servers: slow or stopped servers, limits that make samples queue, and weight updates.

The same rules apply to servers of further policies (`policies`). A server is compared only with servers of its own
policy.
"""

from __future__ import annotations

import math
from statistics import median

from asyncrl.inference.settings import GenerationBackend, GenerationConfig
from asyncrl.observe.doctor.finding import Finding, bottleneck, percent, waits
from asyncrl.observe.doctor.measured import LITTLE_WAITING, Measured
from asyncrl.observe.doctor.server_load import Fleet, ServerLoad

LATE_S = 0.3
BUSY_ENGINE = 0.5
STARVED = 0.3


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
    told = ", ".join(f"{server.name} {server.stage}" for server in absent)
    return bottleneck(
        m,
        "slow-server",
        "A server that does not serve",
        f"{waits(m)}; {told}, and the others serve.",
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
        backend = GenerationBackend(m.settings.get("generation.backend") or GenerationConfig().backend)
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


def no_processor(m: Measured) -> Finding | None:
    """A server's threads are ready and no core is free."""
    for server in m.all_servers:
        if m.wait >= LITTLE_WAITING and _is_off_processor(server) and (server.no_core or 0.0) > STARVED:
            return bottleneck(
                m,
                "no-cpu",
                "A host without free processors",
                f"{waits(m)}; {server.name} is in engine steps {percent(server.busy or 0)} of the time and on a "
                f"processor {percent(server.cpu or 0)}; {percent(server.no_core or 0)} of it its threads were ready "
                "and had none.",
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


def weight_updates(m: Measured) -> Finding | None:
    """Servers spend their time loading weights."""
    updating = max((server.updating for server in m.all_servers), default=0.0)
    if m.wait < LITTLE_WAITING or updating <= 0.3:
        return None
    if m.takes_turns:
        ways = ["a larger train_batch_size", *([] if m.eta else ["max_head_offpolicyness=1 or more"])]
        advice = f"Switch less often: {' or '.join(ways)}."
    else:
        in_place = m.settings.get("manager.update_mode") == "in_place"
        from_disk = m.settings.get("manager.weight_transport") in (None, "disk")
        ways = [] if in_place else ["manager.update_mode=in_place"]
        ways += ["a manager.weight_transport from memory"] if from_disk else []
        advice = f"Set {' or '.join(ways)}." if ways else "Train more a step, so that there are fewer versions."
    return bottleneck(
        m,
        "slow-updates",
        "Weight updates take long",
        f"{waits(m)}; the servers load weights {percent(updating)} of the time.",
        advice,
        m.step_if(generation_s=m.calls.get("generation", 0.0) * (1 - updating), server=1 - updating),
    )


def _is_off_processor(server: ServerLoad) -> bool:
    """True if the server is in engine steps for much longer than on a processor."""
    return server.busy is not None and server.busy > BUSY_ENGINE and (server.cpu or 0.0) < STARVED * server.busy


def _is_held(server: ServerLoad) -> bool:
    """True if something keeps the server's process from running."""
    return _is_off_processor(server) and (server.late_s or 0.0) > LATE_S
