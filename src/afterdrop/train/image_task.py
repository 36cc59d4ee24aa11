"""The training task of a classifier: shuffled epochs, mean loss over the images of a batch.

Legend: B images, V classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.data import ImageSet, Labelled, batches
from afterdrop.models import Classifier
from afterdrop.ranks import SINGLE_PROCESS, Ranks
from afterdrop.train.config import TrainConfig
from afterdrop.train.objective import data_loss, step_loss
from afterdrop.train.penalties import StepLoss, image_penalties, without_dropout
from afterdrop.train.whole_masks import RankRows, whole_masks


class ImageTask:
    """The `Task` of a classifier.

    Args:
        config: The run's configuration.
        images: The images.
        device: The device of the model and the images.
        ranks: The processes that share the images of a step.
    """

    window = 1
    unit = "image"

    def __init__(
        self,
        config: TrainConfig,
        images: ImageSet,
        device: torch.device,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.config, self.images, self.ranks = config, images, ranks
        self.train = Labelled(*(part.to(device) for part in images.train))
        self.valid = Labelled(*(part.to(device) for part in images.valid))
        self.train_targets = len(self.train.labels)
        self.step_targets = min(config.objective.batch_size, self.train_targets)
        self._order = lru_cache(maxsize=1)(self._draw_order)

    def build_model(self) -> nn.Module:
        """A new model with weights from torch's global generator."""
        pixels = self.train.images[0].numel()
        return Classifier(self.config.model.classifier(pixels, self.images.classes))

    def loss(self, model: nn.Module, step: int) -> StepLoss:
        """See `Task.loss`: the mean over the step's images."""
        section = self.config.objective
        samples = section.samples
        epoch, place = divmod(step, -(-self.train_targets // self.step_targets))
        chosen = self._order(epoch)[place * self.step_targets : (place + 1) * self.step_targets]
        batch = len(chosen)  # the last batch of an epoch may be smaller
        rows = RankRows(self.ranks.share(batch), batch, samples)
        images, labels = self.train.images[chosen[rows.mine]], self.train.labels[chosen[rows.mine]]
        if samples > 1:
            images = images.repeat(samples, *[1] * (images.dim() - 1))
        other = None
        with whole_masks(model, rows):
            logits = model(images)
            if section.fraternal_penalty > 0:
                other = model(images)
        data, effective = step_loss(
            logits, labels, samples=samples, alpha=section.alpha, whole_batch=batch
        )
        if other is not None:
            data = (data + data_loss(other, labels, whole_batch=batch)) / 2
        elif section.expectation_linear_penalty > 0:
            with without_dropout(model):
                other = model(images)
        difference = None if other is None else logits - other
        share = len(labels) / batch
        return StepLoss(data, effective, image_penalties(section, difference, share))

    def _draw_order(self, epoch: int) -> Tensor:
        digest = hashlib.sha256(f"{self.config.seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        order = torch.randperm(self.train_targets, generator=generator)
        return order.to(self.train.labels.device)

    def validation_batches(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [B, V] and labels [B]."""
        section = self.config.validation
        most = slice(section.max_targets)
        for images, labels in batches(
            self.valid.images[most], self.valid.labels[most], section.stripes
        ):
            mine = self.ranks.share(len(labels))
            yield model(images[mine]), labels[mine]

    def carried(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to restore."""

    def identity(self) -> dict[str, Any]:
        """The set's name and sizes, and a checksum of the labels."""
        labels = self.train.labels.cpu().numpy().tobytes()
        return {
            "name": self.images.name,
            "classes": self.images.classes,
            "targets": self.train_targets,
            "checksums": {"train": hashlib.sha256(labels).hexdigest()},
        }
