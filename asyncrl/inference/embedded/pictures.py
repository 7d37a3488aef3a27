"""Pictures of requests: kept until a request names them, and as the model sees them.

The server keeps each content once, up to a limit in bytes. A request names its pictures by hash. The client sends
missing ones once and repeats the request. The least recently used are dropped first. A running request holds its own
pictures, so a drop only costs another transfer.

Only a server of a model that takes pictures imports this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.api.picture import Picture, PictureRef, PlacedPicture
from asyncrl.inference.embedded.jobs import PICTURE_BYTES, Job, ShownPrompt
from asyncrl.inference.engine_io import GenerationInput, MissingPicture, RequestError

if TYPE_CHECKING:
    from asyncrl.models.pictures import Pictures


class PictureCache:
    """Pictures by hash, the least recently used first. For one thread.

    Args:
        max_bytes: largest number of bytes that are kept; one picture is kept however large.

    Attributes:
        received: number of pictures received so far.
    """

    def __init__(self, max_bytes: int = PICTURE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Picture] = OrderedDict()
        self.nbytes = 0
        self.received = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, picture: Picture) -> None:
        """Keep `picture`."""
        self.received += 1
        if picture.sha256 not in self._kept:
            self._kept[picture.sha256] = picture
            self.nbytes += len(picture.data)
        self._kept.move_to_end(picture.sha256)
        while self.nbytes > self._max_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= len(dropped.data)

    def placed(self, prompts: Sequence[Sequence[PictureRef]]) -> list[tuple[PlacedPicture, ...]]:
        """Return the pictures of each prompt.

        Raises:
            MissingPicture: some are not kept here.
        """
        wanted = dict.fromkeys(ref.sha256 for refs in prompts for ref in refs)
        if missing := [sha256 for sha256 in wanted if sha256 not in self._kept]:
            raise MissingPicture(missing)
        for sha256 in wanted:
            self._kept.move_to_end(sha256)
        return [
            tuple(PlacedPicture(ref.position, ref.length, self._kept[ref.sha256]) for ref in refs) for refs in prompts
        ]


def shown_prompts(pictures: Pictures, job: Job) -> tuple[ShownPrompt, ...]:
    """Prepare the pictures of `job`; samples of the same prompt share the result.

    Raises:
        RequestError: a picture is damaged, or its placeholders are not those of the model.
    """
    made: dict[tuple[Any, ...], ShownPrompt] = {}
    for number, request in enumerate(job.inputs):
        key = (request.input_ids, request.pictures)
        if key not in made:
            made[key] = _shown(pictures, request, number)
    return tuple(made[request.input_ids, request.pictures] for request in job.inputs)


def _shown(pictures: Pictures, request: GenerationInput, number: int) -> ShownPrompt:
    if not request.pictures:
        return ShownPrompt(request.input_ids)
    try:
        ids, held = pictures.ids.shown(request.input_ids, request.pictures)
        delta = pictures.delta(ids)
    except (ValueError, IndexError) as error:
        raise RequestError(f"pictures of prompt {number}: {error}") from error
    if ids[-1] >= pictures.ids.first:
        raise RequestError(f"prompt {number} ends with a picture; let at least one token follow it")
    return ShownPrompt(tuple(ids), delta, tuple(held))
