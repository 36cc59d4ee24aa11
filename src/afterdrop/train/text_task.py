"""The training task of a language model: stripes of a text, with carried state.

Legend: B stripes, S samples of each, time steps; rows are S·B, all stripes of a sample together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.data import EvalStripes, TextSet, TrainStripes
from afterdrop.models import LanguageModel
from afterdrop.models.language_model import Activations
from afterdrop.ranks import SINGLE_PROCESS, Ranks
from afterdrop.train.checks import TrainError
from afterdrop.train.config import TrainConfig
from afterdrop.train.objective import data_loss, step_loss, target_loss
from afterdrop.train.penalties import StepLoss, TextPasses, text_penalties, without_dropout
from afterdrop.train.validation_windows import Window, windows_on_device
from afterdrop.train.whole_masks import RankRows, whole_masks

State = tuple[tuple[Tensor, Tensor], ...]


class TextTask:
    """The `Task` of a language model.

    Args:
        config: The run's configuration.
        text: The text.
        device: The device of the model and the tokens.
        ranks: The processes that share the stripes.
    """

    def __init__(
        self,
        config: TrainConfig,
        text: TextSet,
        device: torch.device,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        assert config.objective.window is not None  # TrainConfig has checked
        self.config, self.text, self.device = config, text, device
        self.window = config.objective.window
        self.unit: str = text.unit
        self.train_targets = len(text.train)
        self.step_targets = config.objective.batch_size * self.window
        self.stripes = self.train_stripes(device)
        batch = config.objective.batch_size
        self.ranks = ranks
        self.rows = RankRows(ranks.share(batch), batch, config.objective.samples)
        self.state: State | None = None  # of this rank's stripes

    def train_stripes(self, device: torch.device) -> TrainStripes:
        """The training windows, on a device."""
        return TrainStripes(
            self.text.train.to(device),
            self.text.vocabulary.eos_id,
            self.config.objective.batch_size,
            self.window,
            seed=self.config.seed,
            jitter=self.config.objective.jitter,
            lines=self.text.has_lines,
        )

    def build_model(self) -> nn.Module:
        """A new model with weights from torch's global generator."""
        return LanguageModel(self.config.model.language_model(len(self.text.vocabulary)))

    def loss(self, model: nn.Module, step: int) -> StepLoss:
        """See `Task.loss`: summed over time and averaged over the batch; updates the state."""
        assert isinstance(model, LanguageModel)
        section, batch = self.config.objective, self.rows.batch
        inputs_Bt, targets_Bt = (part[self.rows.mine] for part in self.stripes[step])
        passes = self._passes(model, inputs_Bt.repeat(section.samples, 1), self._before_window())
        self.state = tuple((h.detach(), c.detach()) for h, c in passes.first.state)
        data, effective = self._data_loss(model, passes.first, targets_Bt)
        if passes.second is not None:
            other = data_loss(model.logits(passes.second), targets_Bt, whole_batch=batch)
            data = (data + other) / 2
        share = len(targets_Bt) / batch
        return StepLoss(data, effective, text_penalties(section, model, passes, share))

    def _data_loss(
        self, model: LanguageModel, found: Activations, targets_Bt: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The data term of a pass, and the effective number of samples."""
        samples, alpha = self.config.objective.samples, self.config.objective.alpha
        batch = self.rows.batch
        if model.mixture is not None and (samples == 1 or alpha == 1):
            # The gradient then needs no sum over the mixture's classes.
            log_probs = model.target_log_probs(found, targets_Bt.repeat(samples, 1))
            return target_loss(log_probs, samples=samples, whole_batch=batch)
        logits = model.logits(found)
        return step_loss(logits, targets_Bt, samples=samples, alpha=alpha, whole_batch=batch)

    def _passes(self, model: LanguageModel, inputs: Tensor, before: State | None) -> TextPasses:
        """The passes over a window, all from the same state."""
        section = self.config.objective
        second = still = None
        with whole_masks(model, self.rows):
            first = model.activations(inputs, before)
            if section.fraternal_penalty > 0:
                second = model.activations(inputs, before)
        if section.expectation_linear_penalty > 0:
            with without_dropout(model):
                still = model.activations(inputs, before)
        return TextPasses(first, second, still)

    def _before_window(self) -> State | None:
        """The carried state, set to zero for some stripes and not rescaled for the others."""
        reset = self.config.objective.state_reset
        if self.state is None or reset == 0:
            return self.state
        kept_B = torch.rand(self.rows.batch, device=self.device)[self.rows.mine] >= reset
        kept = kept_B.to(self.state[0][0].dtype).repeat(self.config.objective.samples).unsqueeze(1)
        return tuple((h * kept, c * kept) for h, c in self.state)

    @cached_property
    def validation_windows(self) -> list[Window]:
        """The validation windows of this rank's stripes, up to `max_targets` targets."""
        section = self.config.validation
        stripes = EvalStripes(
            self.text.valid,
            self.text.vocabulary.eos_id,
            section.stripes,
            section.window or self.window,
            lines=self.text.has_lines,
        )
        mine = self.ranks.share(section.stripes)
        return windows_on_device(stripes, self.device, mine, section.max_targets)

    def validation_batches(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [N, V] and targets [N], window by window."""
        state = None
        for window in self.validation_windows:
            logits, state = model(window.inputs.long(), state)
            yield window.real(logits), window.targets

    def carried(self) -> dict[str, Tensor]:
        """The state of each layer, of all ranks' rows."""
        return {
            f"{layer}.{name}": self.rows.all_of(self.ranks.gather_rows(part))
            for layer, pair in enumerate(self.state or ())
            for name, part in zip("hc", pair)
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from a carried state."""
        layers = len(tensors) // 2
        self.state = (
            tuple(
                (self.rows.of(tensors[f"{layer}.h"]), self.rows.of(tensors[f"{layer}.c"]))
                for layer in range(layers)
            )
            if layers
            else None
        )
        if len(tensors) != 2 * layers:
            raise TrainError("the carried state has an h without its c; use another checkpoint")

    def identity(self) -> dict[str, Any]:
        """The text's name, checksums and vocabulary size."""
        return {
            "name": self.text.name,
            "vocabulary": len(self.text.vocabulary),
            "targets": self.train_targets,
            "checksums": dict(self.text.checksums),
        }
