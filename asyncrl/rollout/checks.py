"""Checks of what RolloutWorkers read: settings (`check`), and the user's code (`code_problems`).

The code is checked before anything of it is called: names, parameters, methods. It is imported for that, which the
launcher leaves to a process of its own before the start (`rehearsal`), and to the workers.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from asyncrl.api.columns import check_name
from asyncrl.api.reward import RunIn
from asyncrl.comm.names import ROLLOUT_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.optional_checks import optional_problems
from asyncrl.config.plugin_code import interfaces
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin, path_problems
from asyncrl.config.setting import group_problems, token_ids
from asyncrl.config.variants import CODE, evaluation_sets, with_code_of
from asyncrl.data import checks as datasets
from asyncrl.data.checks import field_problems, held_out_problems, source_problems
from asyncrl.data.settings import is_data_path
from asyncrl.data.stop_strings import check_stop_strings
from asyncrl.plugins.checks import check_env, check_rewards, env_code_problems, reward_code_problems
from asyncrl.rollout.settings import EncoderConfig, EvalConfig
from asyncrl.runtime.process.hardware import bind_error

_ANY_ADDRESS = ("", "0.0.0.0", "::")
"""Not addresses that a client could connect to."""
_ONLINE_CHECKS = "asyncrl.rollout.online.checks:check"
_FROM_SERVERS = "server"
"""`encoder` in the arguments of a reward that uses `Episode.embedding`."""


def warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield a message for each valid setting with a surprising effect: `setting=value: effect`."""
    data = config.dataset
    trained = {_resolved(path) for path in ([source.path for source in data.sources] or [data.path])}
    for each in evaluation_sets(config):
        same = each.path is not None and is_data_path(each.path) and _resolved(each.path) in trained
        if each.interval and same and not each.args.get("held_out_share") and not each.args.get("files"):
            yield (
                f"{each.group}.path={each.path!r}: it is the training file; what {each.name!r} measures is how well "
                "the prompts that are trained on are answered"
            )


def _resolved(path: str) -> Path:
    return Path(path).expanduser().resolve()


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    sampling = config.rollout.sampling
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature=0.0: greedy samples of a group are all the same and carry no signal; use 1.0"
        )
    try:
        check_stop_strings(sampling.stop)
    except ValueError as error:
        yield f"rollout.sampling.stop={list(sampling.stop)}: {error}"
    try:
        token_ids(sampling.allowed_token_ids)
    except ValueError as error:
        yield f"rollout.sampling.allowed_token_ids={sampling.allowed_token_ids!r}: {error}"
    for version, most in sampling.max_new_tokens_from.items():
        if version < 0 or not 1 <= most <= sampling.max_new_tokens:
            yield (
                f"rollout.sampling.max_new_tokens_from={dict(sampling.max_new_tokens_from)}: {version}: {most} is not "
                f"valid; give a policy version, 0 or more, and 1 to max_new_tokens={sampling.max_new_tokens}"
            )
    for number, name in enumerate(config.rollout.columns):
        if (wrong := check_name(name)) or name in config.rollout.columns[:number]:
            yield f"rollout.columns[{number}]: {wrong or f'{name!r} is there twice'}"
    data, evaluation = config.dataset, config.eval
    yield from datasets.check(data)
    yield from _evaluation(config)
    if evaluation.sets:
        pass
    elif evaluation.path is not None:
        yield from source_problems("eval", evaluation.path)
    elif evaluation.interval and data.sources:
        yield (
            "eval.path=null: of dataset.sources nothing is held out; give evaluation a set of its own, or switch it "
            "off (eval.interval=0)"
        )
    elif evaluation.interval:
        yield from held_out_problems(data, evaluation)
    yield from _agent(config)
    yield from check_env(config.env)
    yield from check_rewards(config)
    yield from _code_of_sets(config)
    yield from _endpoint(config)
    yield from _encoder(config)
    if config.is_online:
        yield from pkgutil.resolve_name(_ONLINE_CHECKS)(config)


def _endpoint(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of `rollout.endpoint`."""
    endpoint = config.rollout.endpoint
    if not config.system.hosts and (why := bind_error(endpoint.host)):
        yield (
            f"rollout.endpoint.host={endpoint.host!r}: not an address of this machine ({why}); give one that `ip addr` "
            "shows, for example 127.0.0.1 or ::1"
        )
    elif not config.system.hosts and (why := bind_error(endpoint.host, endpoint.port)):
        yield (
            f"rollout.endpoint.port={endpoint.port}: cannot be listened on ({why}); give another port, or 0 for any "
            "free one"
        )
    if not endpoint.host:
        yield "rollout.endpoint.host='': would listen at a port each of IPv4 and IPv6; give 0.0.0.0 or ::"
    elif endpoint.host in _ANY_ADDRESS and not endpoint.advertise:
        yield (
            f"rollout.endpoint.host={endpoint.host!r}: stands for all addresses, and agents need one; give it as "
            "rollout.endpoint.advertise"
        )
    advertised = endpoint.advertise
    if advertised and (advertised in _ANY_ADDRESS or any(char in advertised for char in "/@ \t")):
        yield (
            f"rollout.endpoint.advertise={advertised!r}: no host name or address; give one without scheme, port "
            "and path, for example host.docker.internal"
        )
    hosts = sum(ROLLOUT_WORKER in host.runs for host in config.system.hosts) or 1
    if endpoint.port and config.rollout.workers > hosts:
        yield (
            f"rollout.endpoint.port={endpoint.port}: one RolloutWorker of a host can listen on it, and "
            f"rollout.workers={config.rollout.workers} run on {hosts} host{'s'[: hosts > 1]}; give 0 for any port, or "
            "one worker per host"
        )


def _agent(config: ExperimentConfig) -> Iterator[str]:
    yield from path_problems("agent", config.agent.path)
    if config.agent.run_in == RunIn.loop:
        yield "agent.run_in=loop: user agents never run on the worker's own event loop; use auto"


def _code_of_sets(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid agent, environment or reward of an evaluation set that differs from
    training's.
    """
    for each in evaluation_sets(config):
        of_set = with_code_of(config, each)
        checks = {"agent": _agent(of_set), "env": check_env(of_set.env), "reward": check_rewards(of_set)}
        for name, plugin in each.code.items():
            for problem in (*group_problems(name, plugin), *checks[name]):
                yield f"{each.group}.{problem}"


def _evaluation(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of the evaluation sets, except for the source of rows if
    `eval.path=null`.
    """
    evaluation, default = config.eval, EvalConfig()
    if evaluation.sets:
        for name in ("name", "path", "args", "fields"):
            if (value := getattr(evaluation, name)) != getattr(default, name):
                yield f"eval.{name}={value!r}: set together with eval.sets, each of which has its own; write it there"
    for number, own in enumerate(evaluation.sets):
        yield from group_problems(f"eval.sets[{number}]", own)
        yield from group_problems(f"eval.sets[{number}].sampling", own.sampling)
    names: set[str] = set()
    for each in evaluation_sets(config):
        group = each.group
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", each.name) or each.name in names:
            yield (
                f"{group}.name={each.name!r}: names the metrics eval/<name>/...; give each set another one, of "
                "letters, digits, '_', '-' and, but at its start, '.'"
            )
        names.add(each.name)
        if evaluation.sets:
            yield from source_problems(group, each.path or "")
            yield from field_problems(group, each.path or "", each.fields)
        if each.temperature == 0 and each.n_samples > 1:
            yield (
                f"{group}.n_samples={each.n_samples}: greedy answers to a prompt are all the same; give a temperature "
                f"above 0 ({group}.sampling.temperature=1.0), or n_samples=1"
            )


def _encoder(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of `rollout.encoder`."""
    encoder = config.rollout.encoder
    given = enumerate(config.rewards) if config.rewards else [("", config.reward)]
    for number, reward in given:
        group = f"rewards[{number}]" if config.rewards else "reward"
        if reward.args.get("encoder") == _FROM_SERVERS and not encoder.servers:
            yield (
                f"rollout.encoder.servers=0: {group}.args has encoder={_FROM_SERVERS!r}; start one, or name the "
                "reward's own encoder"
            )
    if not encoder.servers:
        return
    yield from path_problems("rollout.encoder", encoder.path)
    device = str(encoder.args.get("device", "cpu"))
    if device != "cpu" and not encoder.gpus:
        yield f"rollout.encoder.args has device={device!r}, and rollout.encoder.gpus is 0; set it to 1"
    if encoder.gpus and device == "cpu" and encoder.path == EncoderConfig().path:
        yield (
            f"rollout.encoder.gpus={encoder.gpus}: rollout.encoder.args has no device, so it computes on the CPU; add "
            "device: cuda"
        )


def code_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each problem of the code that RolloutWorkers call; a replay calls none to train."""
    if not config.samples.replay:
        yield from _code_problems(config, CODE)
        yield from optional_problems(config, "code_problems")
    for each in evaluation_sets(config):
        if each.interval:
            yield from (f"{each.group}.{problem}" for problem in _code_problems(with_code_of(config, each), each.code))


def _code_problems(config: ExperimentConfig, names: Collection[str]) -> Iterator[str]:
    if "agent" in names:
        yield from interfaces.agent_problems("agent", config.agent.path, config.agent.args)
    if "env" in names:
        yield from env_code_problems(config.env)
    if "reward" in names:
        yield from reward_code_problems(config)


def problems_of_others(config: ExperimentConfig) -> Iterator[str]:
    """Yield the same for code that other processes call: the buffer's order and the encoder of frames."""
    order, encoder = config.buffer.order, config.rollout.encoder
    with suppress(PluginError):  # the settings' check says if the path names nothing; what it imports may be elsewhere
        if order.path:
            found = load_plugin(order.path)
            positional = int(not inspect.isclass(found))  # a function is called with the rollout
            yield from interfaces.call_problems("buffer.order", order.path, found, order.args, positional=positional)
    with suppress(PluginError):
        if encoder.servers:
            found = load_plugin(encoder.path)
            yield from interfaces.call_problems("rollout.encoder", encoder.path, found, encoder.args)
