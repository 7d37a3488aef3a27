"""The pictures that a role's model sees: in the batch of a step, in micro-batches, in single sequences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.pictures.picture_ids import SeenPicture
from asyncrl.models.pictures.picture_rows import Pictures
from asyncrl.trainer.batches.micro_batch import MicroBatch, ShownTokens
from asyncrl.trainer.batches.step_batch import StepBatch


class RoleVision:
    """The pictures of a role's model. Those of a batch are prepared once for all calls of its step.

    Args:
        pictures: picture processing of the model; None if the model is used for text alone.
        trained: True if the role is trained.
    """

    def __init__(self, pictures: Pictures | None, *, trained: bool) -> None:
        self.pictures = pictures
        self._shown: WeakKeyDictionary[StepBatch, ShownTokens] = WeakKeyDictionary()
        tower = () if pictures is None or not trained else pictures.tower.parameters()
        self._trains_tower = any(parameter.requires_grad for parameter in tower)

    def weights_changed(self) -> None:
        """Forget the rows of pictures that were computed with earlier weights."""
        if self.pictures is not None:
            self.pictures.tower.weights_changed()

    def seeing(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Within this block the model sees the pictures of `micro_batch`.

        If the vision tower is trained and gradients are recorded, it computes their rows with gradients. Otherwise the
        rows are computed once per version of the weights.
        """
        if self.pictures is None or micro_batch.shown is None:
            return nullcontext()
        keep = not (self._trains_tower and torch.is_grad_enabled())
        return self.pictures.holding(micro_batch.shown, keep=keep)

    def shown_tokens(self, batch: StepBatch) -> ShownTokens | None:
        """Return the tokens of `batch` with its pictures; None if it has no pictures.

        Raises:
            ValueError: the batch has pictures, and the model is used for text alone.
        """
        if not batch.pictures:
            return None
        if self.pictures is None:
            raise ValueError("the batch has pictures, and the model is used for text alone (model.vision)")
        shown = self._shown.get(batch)
        if shown is None:
            tokens = batch["tokens"].tolist()
            ends = (batch.starts_S + batch.lengths_S).tolist()
            parts = [tokens[start:end] for start, end in zip(batch.starts_S.tolist(), ends, strict=True)]
            ids, held = self.shown_ids(parts, batch.pictures)
            shown = self._shown[batch] = ShownTokens.of(self.pictures, ids, batch.device, held)
        return shown

    def shown_ids(
        self, sequences: Sequence[Sequence[int]], pictures: Sequence[Sequence[PlacedPicture]]
    ) -> tuple[list[Sequence[int]], list[SeenPicture]]:
        """Return `sequences` with the ids of their pictures' rows, and the pictures, which the caller must keep
        alive.
        """
        if self.pictures is None or not pictures:
            return list(sequences), []
        made = [self.pictures.ids.shown(*each) for each in zip(sequences, pictures, strict=True)]
        return [ids for ids, _ in made], [seen for _, held in made for seen in held]

    def placeholders(self, picture: Picture) -> list[int]:
        """Return the token ids that stand for `picture` in a prompt; none if the model is used for text alone."""
        if self.pictures is None:
            return []
        return [self.pictures.ids.token_id] * self.pictures.ids.seen(picture).rows
