"""Containers of docker and podman for programs of episodes: how one is started, and that none outlives its episode.

Each container has two labels: its own name, and the folder of the RolloutWorker that started it. The folder is locked
as long as the worker lives (`asyncrl.plugins.agents.command`), so the containers of a dead worker are found by it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from asyncrl.comm.waits import LOOK_S, TOOL_S

WORKER_LABEL: Final = "asyncrl.worker"
"""Name of the folder of the worker that started a container."""
NAME_LABEL: Final = "asyncrl.container"
EXIT_ENGINE_FAILED: Final = 125
"""Exit code of `docker run` and `podman run` if the engine failed, not the program."""
EXIT_BY_SIGNAL: Final = 128
"""Exit codes above it mean a signal: to the program, or to the engine's own command, whose container then goes on."""
_TRIES: Final = 4
"""Looks for a container that is to be removed: the engine may be making it, or removing it already."""
_SHOWN_CHARS: Final = 400


class EngineFailed(RuntimeError):
    """The engine does not run, has no such image, or lost a container. The message has the engine's own words."""


class Engine:
    """Commands for the containers of an image.

    Args:
        engine: the engine's command: `docker`, `podman`, or this with options, such as `[podman, --runtime, runc]`.
        image: name of the image, which the engine has; it is never pulled.
        network: network of the containers, as the engine calls it.
        run_args: further options of the engine's `run`.
    """

    def __init__(self, engine: str | Sequence[str], image: str, network: str, run_args: Sequence[str]) -> None:
        self.words = [engine] if isinstance(engine, str) else list(engine)
        self.image, self.network, self._run_args = image, network, list(run_args)

    def check(self) -> None:
        """Check that the engine runs and has the image. Blocks.

        Raises:
            EngineFailed: it does not, or has not.
        """
        if not self.words or shutil.which(self.words[0]) is None:
            raise EngineFailed(f"engine={self.words}: no such program; install docker or podman, or leave image out")
        asked = _asked([*self.words, "image", "inspect", "--format", "{{.Id}}", self.image])
        if asked.returncode != 0:
            raise EngineFailed(
                f"image={self.image!r}: {self.words[0]} cannot use it ({_words_of(asked)}); start the engine, and pull "
                "or build the image on each host"
            )

    def run_command(
        self,
        name: str,
        worker: str,
        folder: Path,
        path: str,
        env: Mapping[str, str],
        secret: Sequence[str],
        command: Sequence[str],
    ) -> list[str]:
        """Return the command that runs `command` in a new container, and ends with it.

        Args:
            name: the container's.
            worker: the folder of the worker that starts it, a name.
            folder: the episode's folder, which is mounted at `path`.
            env: the program's environment.
            secret: names in `env` whose values are to be in the environment of the returned command, since command
                lines can be seen by everybody.
        """
        # Files that the program makes belong to this user, who removes them. Root within rootless podman is this user.
        user = "0:0" if "podman" in Path(self.words[0]).name else f"{os.getuid()}:{os.getgid()}"
        given = [f"--env={key}" if key in secret else f"--env={key}={value}" for key, value in env.items()]
        return [
            *(*self.words, "run", "--rm", "--init", "--pull=never", f"--name={name}", "--stop-timeout=0"),
            *(f"--label={WORKER_LABEL}={worker}", f"--label={NAME_LABEL}={name}"),
            *(f"--network={self.network}", f"--user={user}", f"--mount=type=bind,src={folder},dst={path}"),
            *(f"--workdir={path}/work", *given, *self._run_args, self.image, *command),
        ]


def remove_containers(engine: Sequence[str], label: str, value: str) -> None:
    """Kill and remove all containers of `engine` whose `label` is `value`. Blocks, for up to some `TOOL_S`.

    Raises:
        EngineFailed: the engine does not run, or cannot remove them.
    """
    said = ""
    for look in range(_TRIES):
        found = _asked([*engine, "ps", "--all", "--quiet", "--no-trunc", f"--filter=label={label}={value}"])
        if found.returncode != 0:
            raise EngineFailed(f"{engine[0]} does not tell its containers with {label}={value}: {_words_of(found)}")
        ids = found.stdout.split()
        if not ids and look:
            return
        if not ids:  # the engine's command may have ended just after it asked for the container
            time.sleep(LOOK_S)
            continue
        said = _words_of(_asked([*engine, "rm", "--force", *ids]))
    raise EngineFailed(f"{engine[0]} does not remove its containers with {label}={value}: {said}")


def _asked(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Return what the engine answers."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineFailed(f"{command[0]}: {error}") from None


def _words_of(ended: subprocess.CompletedProcess[str]) -> str:
    return " ".join((ended.stderr or ended.stdout).split())[-_SHOWN_CHARS:] or f"exit code {ended.returncode}"
