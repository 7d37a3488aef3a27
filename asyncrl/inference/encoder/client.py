"""Client of the EncoderServers, for a RolloutWorker; its requests, and their replies.

A clip always goes to the same server while the same servers are registered, so each clip is cached once. While a server
restarts, its clips go to the others. Without servers, the call waits for one, up to its time limit.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from asyncrl.api.picture import Picture
from asyncrl.comm.http_client import HttpRefused, HttpTimeout, HttpUnreachable, JsonHttp
from asyncrl.comm.waits import Backoff

MAX_CLIPS, MAX_FRAMES = 1024, 1024
"""Most clips of a request, and most frames of a clip."""
MAX_BODY_BYTES = 256 << 20
"""Largest request; pictures are base64 in it."""


class EmbedRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /embed`: embed clips.

    Attributes:
        clips: SHA-256 of the frames of each clip, in order.
        pictures: PNG or JPEG bytes of frames, by SHA-256; without those of a clip only a cached embedding is returned.
    """

    clips: list[list[str]]
    pictures: dict[str, bytes] = {}


class EmbedReply(Struct, frozen=True):
    """Embeddings `[N, D]` of the clips; null for a clip whose frames the server needs."""

    embeddings: list[list[float] | None]


def clip_key(frames: Sequence[str]) -> str:
    """Return the name of a clip: the hash of its frames' hashes."""
    return hashlib.sha256("".join(frames).encode()).hexdigest()


BODY_BYTES = 16 << 20
"""Frames of several clips share a request up to this size, in bytes."""
_MOST_FRAME_BYTES = MAX_BODY_BYTES // 4 * 3 - (1 << 20)
"""Largest size of one clip's frames, in bytes: base64 makes them a third longer, and their names take some space."""
_BACKOFF = Backoff(0.1, 2.0)
Vector = Sequence[float]
Clip = Sequence[Picture]


class EncoderUnavailable(RuntimeError):
    """No embeddings: no server answered in time, or the encoder failed."""


class EncoderClient:
    """Embeds clips on the EncoderServers.

    Args:
        http: connections, with the run's secret.
        servers: returns the URLs of the registered servers by name.
        timeout_s: limit of one call of `embed`.
    """

    def __init__(self, http: JsonHttp, servers: Callable[[], Mapping[str, str]], timeout_s: float) -> None:
        self._http, self._servers, self._timeout_s = http, servers, timeout_s

    async def embed(self, clips: Sequence[Clip]) -> list[Vector]:
        """Return the embeddings of N clips, of at least one frame each, as N vectors of D numbers.

        Raises:
            EncoderUnavailable: no server answered within the time limit, a server refused, or the encoder failed.
        """
        by_key = {clip_key([frame.sha256 for frame in clip]): clip for clip in clips}
        found: dict[str, Vector] = {}
        failures, last = 0, "no EncoderServer is registered"
        try:
            async with asyncio.timeout(self._timeout_s):
                while lacking := {key: clip for key, clip in by_key.items() if key not in found}:
                    try:
                        found |= await self._from_servers(lacking)
                    except (HttpUnreachable, HttpTimeout) as error:
                        last = str(error)
                    if len(found) < len(by_key):
                        failures += 1
                        await asyncio.sleep(_BACKOFF.delay(failures))
        except TimeoutError:
            raise EncoderUnavailable(f"no embeddings within {self._timeout_s:g} s: {last}") from None
        except HttpRefused as error:
            raise EncoderUnavailable(str(error)) from error
        return [found[clip_key([frame.sha256 for frame in clip])] for clip in clips]

    async def _from_servers(self, clips: Mapping[str, Clip]) -> dict[str, Vector]:
        """Return the embeddings of `clips` by key; none without servers."""
        urls = [url for _, url in sorted(self._servers().items())]
        found: dict[str, Vector] = {}
        for number, url in enumerate(urls):
            of_server = {key: clip for key, clip in clips.items() if int(key[:8], 16) % len(urls) == number}
            for part in _parts(list(of_server), MAX_CLIPS):
                found |= await self._ask(url, {key: of_server[key] for key in part}, {})
            lacking = {key: clip for key, clip in of_server.items() if key not in found}
            for shown, pictures in _with_frames(lacking):
                found |= await self._ask(url, shown, pictures)
        return found

    async def _ask(self, url: str, clips: Mapping[str, Clip], pictures: dict[str, bytes]) -> dict[str, Vector]:
        asked = EmbedRequest([[frame.sha256 for frame in clip] for clip in clips.values()], pictures)
        reply = await self._http.call("POST", f"{url}/embed", asked, timeout_s=self._timeout_s, reply=EmbedReply)
        pairs = zip(clips, reply.embeddings, strict=True)
        return {key: vector for key, vector in pairs if vector is not None}


def _parts(keys: list[str], most: int) -> Iterator[list[str]]:
    yield from (keys[start : start + most] for start in range(0, len(keys), most))


def _with_frames(clips: Mapping[str, Clip]) -> Iterator[tuple[dict[str, Clip], dict[str, bytes]]]:
    """Yield `clips` in parts that fit into a request, each with its frames by hash."""
    shown: dict[str, Clip] = {}
    pictures: dict[str, bytes] = {}
    for key, clip in clips.items():
        own = {frame.sha256: frame.data for frame in clip}
        if (size := sum(map(len, own.values()))) > _MOST_FRAME_BYTES:
            raise EncoderUnavailable(
                f"the frames of an episode have {size} bytes, above {_MOST_FRAME_BYTES}: embed fewer "
                "(rollout.encoder.frames), or draw smaller ones"
            )
        if shown and (len(shown) == MAX_CLIPS or sum(map(len, (pictures | own).values())) > BODY_BYTES):
            yield shown, pictures
            shown, pictures = {}, {}
        shown[key] = clip
        pictures |= own
    if shown:
        yield shown, pictures
