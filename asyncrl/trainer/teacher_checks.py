"""Checks of `algorithm.teachers`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.api.columns import TOKEN, check_name
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph import GraphError, load_graph
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.trainer.settings import SOURCE_NUMBER, RoleRanks, TeacherConfig

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each teacher that has no model, or whose settings contradict each other or the run."""
    teachers = config.algorithm.teachers
    names = [teacher.name for teacher in teachers]
    mixed = [source.name or source.path for source in config.dataset.sources]
    for number, teacher in enumerate(teachers):
        setting = f"algorithm.teachers[{number}]"
        if not _NAME.fullmatch(teacher.name) or names.count(teacher.name) > 1:
            yield (
                f"{setting}.name={teacher.name!r}: give each teacher a name of its own, of letters, digits, '_' and "
                "'-', which begins with a letter; for example maths"
            )
        yield from _teacher_source(config, setting, teacher)
        if strays := sorted({*teacher.sources} - {*mixed}) if mixed else ():
            yield (
                f"{setting}.sources={teacher.sources}: {strays[0]!r} is not a name of dataset.sources, which are "
                f"{', '.join(mixed)}"
            )
    if config.algorithm.teacher_sources and SOURCE_NUMBER in config.rollout.columns:
        yield f"rollout.columns: {SOURCE_NUMBER!r} tells which teacher a sample has; give the field another name"
    if teachers:
        yield from _unread_teachers(config)


def _teacher_source(config: ExperimentConfig, setting: str, teacher: TeacherConfig) -> Iterator[str]:
    """Yield an error message if the source of a teacher's log-probabilities is missing or not valid."""
    given = {name: value for name in ("path", "policy", "column") if (value := getattr(teacher, name)) is not None}
    if len(given) != 1:
        yield (
            f"{setting}: the teacher {teacher.name!r} has {' and '.join(given) or 'no model'}; give one of path, a "
            "Hugging Face folder, policy and column"
        )
        return
    if teacher.path is None:
        yield from _scored_elsewhere(config, setting, teacher)
        return
    if config.trained_policies and teacher.sources:
        yield (
            f"{setting}.sources={teacher.sources}: with several trained `policies` a teacher is for all samples of its "
            "policy; leave the sources out"
        )
    yield from hugging_face_folder(f"{setting}.path", teacher.path)


def _scored_elsewhere(config: ExperimentConfig, setting: str, teacher: TeacherConfig) -> Iterator[str]:
    """Yield an error message for each wrong setting of a teacher that does not score on the training ranks."""
    name, sampling = "policy" if teacher.policy is not None else "column", config.rollout.sampling
    given = f"{setting}.{name}={getattr(teacher, name)!r}"
    if config.trained_policies:
        yield f"{given}: with several trained `policies` teachers score on the training ranks; use path"
    if teacher.parallel is not None or teacher.ranks != RoleRanks.shared:
        yield f"{given}: it is on no training rank; leave parallel and ranks out"
    if sampling.temperature != 1.0 or sampling.allowed_token_ids:
        yield (
            f"{given}: servers score at temperature 1 and over all tokens, and the policy is trained at "
            f"rollout.sampling.temperature={sampling.temperature:g}, allowed_token_ids={sampling.allowed_token_ids!r}; "
            "use path, or temperature 1 and all tokens"
        )
    if teacher.column is not None:
        if check_name(teacher.column) or not teacher.column.startswith(f"{TOKEN}/"):
            yield f"{given}: no column of tokens; write token/<name>, for example token/teacher"
        return
    fixed = [each.name for each in config.policies if (each.path or each.url) is not None and not each.trained]
    if teacher.policy not in fixed:
        yield (
            f"{given}: not one of `policies` that stays as it is ({', '.join(fixed) or 'there is none'}); add it, for "
            f"example policies=[{{name: {teacher.policy}, path: FOLDER}}], or with a url"
        )


def _unread_teachers(config: ExperimentConfig) -> Iterator[str]:
    """Yield a message if the graph, which may be the user's, leaves a teacher out."""
    try:
        calls = load_graph(config).calls
    except (GraphError, ValueError):
        return  # other checks report the error
    read = {key for call in calls if call.function == "advantage" and not call.policy for key in call.reads}
    for teacher in config.algorithm.teachers:
        if teacher.logprobs not in read:
            yield (
                f"algorithm.graph={config.algorithm.graph!r}: its advantage call does not read {teacher.logprobs!r}, "
                f"of algorithm.teachers {teacher.name!r}; give it the calls of asyncrl.master.graph.reference and the "
                "reads of kl_in_reward"
            )
