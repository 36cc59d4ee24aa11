"""Trains and validates a language model with the kernels; a step is one CUDA graph.

With several ranks it is two, one up to the gradients and one for the update, and the gradients are
summed over ranks between them. They are not summed inside one graph: a graph that communicates
keeps the process group alive, and a group that has lost a rank could not be left.

The kernels draw masks from (seed, step, site, element), so a resumed run has the same masks,
whatever was drawn before.

Legend as in `models.fused`: R = time · rows places, H units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from afterdrop import kernels
from afterdrop.kernels.cuda_graph import Replay
from afterdrop.kernels.lstm_stack import fine, padded
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, DeterministicPass, why_not_fused
from afterdrop.models.kernel_support import Table, why_unsupported
from afterdrop.ranks import SINGLE_PROCESS
from afterdrop.train.config import TrainConfig
from afterdrop.train.fused_comparison import compared_rows
from afterdrop.train.fused_step import FusedStep
from afterdrop.train.optimiser import AdamTF
from afterdrop.train.replicas import together
from afterdrop.train.text_task import TextTask
from afterdrop.transfer import upload

# The values of every field of `TrainConfig` that the kernels support.
SUPPORTED: Table = {
    "data": "any",
    "model": "any",  # `models.fused` has the table of its fields
    "objective": {
        "batch_size": "any",
        "window": "any",
        "l2_penalty": "any",
        "samples": "any",
        "alpha": lambda section: (
            None
            if section.samples == 1 or section.alpha == 1
            else f"objective.alpha is {section.alpha} with {section.samples} samples"
        ),
        "state_reset": "any",
        "jitter": "any",
        "fraternal_penalty": "any",
        "expectation_linear_penalty": "any",
        "activation_penalty": "any",
        "temporal_activation_penalty": "any",
    },
    "optimiser": {
        "learning_rate": "any",
        "name": ("adam-tf",),
        "beta1": (0.0,),
        "beta2": "any",
        "epsilon": "any",
        "max_norm": "any",
    },
    "schedule": "any",  # outside the kernels: a step is given its learning rate
    "averaging": "any",  # outside the kernels: it reads the updated parameters
    "validation": {
        "stripes": "any",
        "window": "any",
        "max_targets": "any",
        "criterion": "any",  # outside the kernels
    },
    "seed": "any",
}


def why_not(
    config: TrainConfig, task: object, model: nn.Module, device: torch.device
) -> str | None:
    """Why the kernels cannot train a run; None if they can."""
    if not isinstance(task, TextTask) or not isinstance(model, LanguageModel):
        return "only language models have kernels"
    if reason := why_unsupported(config, SUPPORTED):
        return reason
    if reason := kernels.why_not(device) or why_not_fused(model.config):
        return reason
    if reason := _why_not_compared(config, model):
        return reason
    if (count := _largest(config, task, model)) >= 2**31:
        return f"a window has {count:,} gates or units, and the kernels count in 32 bits"
    return None


def _why_not_compared(config: TrainConfig, model: LanguageModel) -> str | None:
    """Why the kernels cannot compare two passes; None if they can, or need not.

    Rows of the embedding are dropped differently in each pass, and the kernels have one mask. They
    compare logits by way of features, in which those of a mixture are not linear.
    """
    rate, components = model.config.embedding_dropout, model.config.softmax_components
    for name in ("fraternal_penalty", "expectation_linear_penalty"):
        value = getattr(config.objective, name)
        if value > 0 and rate > 0:
            return f"objective.{name} is {value} with embedding_dropout {rate}"
        if value > 0 and components > 1:
            return f"objective.{name} is {value} with softmax_components {components}"
    return None


def _largest(config: TrainConfig, task: TextTask, model: LanguageModel) -> int:
    """The elements of the largest tensor of the stack, or of a mixture's latent vectors."""
    model_config, section = model.config.resolved(), config.validation
    assert model_config.embedding_size is not None
    H = padded(model_config.hidden_sizes[0])
    width = max(H, padded(model_config.embedding_size))
    rows = compared_rows(config.objective, replace(task.rows, mine=slice(0, task.rows.batch)))
    trained = rows.count * task.window * max(4 * H, width)
    validated = section.stripes * ((section.window or task.window) + 1) * width
    components = model_config.softmax_components
    latents = rows.count * task.window * components * padded(model_config.embedding_size)
    of_stack = len(model_config.hidden_sizes) * max(trained, validated)
    return of_stack if components == 1 else max(of_stack, latents)


class FusedText:
    """Trains and validates a language model with the kernels.

    Args:
        task: The text and the carried state.
        model: The model; its parameters are updated in place.
        optimiser: The optimiser, whose squares and step count are kept up to date.
        step: The step to continue from.
        dtype: Dtype of the operands of the stack's products, bfloat16 or float32.
        ahead: Windows per copy to the device.
    """

    def __init__(
        self,
        task: TextTask,
        model: LanguageModel,
        optimiser: AdamTF,
        step: int,
        dtype: torch.dtype = torch.bfloat16,
        ahead: int = 100,
    ) -> None:
        self.task, self.model, self.optimiser, self.ahead = task, model, optimiser, ahead
        self.config, self.device = task.config, task.device
        self.steps = FusedStep(self.config, model, optimiser, task.rows, task.window, step, dtype)
        shape = ahead, *self.steps.tokens.shape
        self.windows = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.stripes = task.train_stripes(torch.device("cpu"))
        self._first, self._rate = step, -1.0
        self._take_state()
        self._replay, self._update = Replay(self.device), Replay(self.device)
        self._stepped = False
        self._evaluation: tuple[Copies, DeterministicPass] | None = None

    def step(self, number: int) -> Tensor:
        """One step; returns its loss, a scalar on the device that the next step overwrites."""
        if (number - self._first) % self.ahead == 0:
            mine = self.task.rows.mine
            pairs = [torch.stack(self.stripes[number + n])[:, mine] for n in range(self.ahead)]
            windows = upload(torch.stack(pairs).transpose(2, 3), self.device)  # [n, 2, time, B]
            samples = self.steps.rows.samples
            self.windows.copy_(windows.repeat(1, 1, 1, samples).flatten(2))
            self.steps.slot.zero_()
        group = self.optimiser.param_groups[0]
        if group["lr"] != self._rate:
            self._rate = group["lr"]
            self.steps.adam.learning_rate.fill_(self._rate)
        if self.task.rows.whole:
            self._replay(self._step)
        else:
            self._shared_step()
        group["step"] += 1
        return self.steps.numbers[0]

    def _step(self) -> None:
        self._gradients()
        self.steps.update()

    def _gradients(self) -> None:
        torch.index_select(self.windows, 0, self.steps.slot, out=self.steps.tokens.unsqueeze(0))
        self.steps.gradients()

    def _shared_step(self) -> None:
        """A step of several ranks; all of them fail in the first one, or none does."""
        ranks = self.task.ranks if not self._stepped else SINGLE_PROCESS
        together(lambda: self._replay(self._gradients), ranks)
        for tensor in self.steps.summed:
            self.task.ranks.sum(tensor)
        together(lambda: self._update(self.steps.update), ranks)
        self._stepped = True

    def _take_state(self) -> None:
        """Takes over the carried state of the task, which becomes views of the stack's buffers."""
        H, stack, rows = self.model.config.hidden_sizes[0], self.steps.stack, self.task.rows.count
        h_LBH, c_LBH = stack.last[:, :rows], stack.c[:, -1, :rows]  # of the first pass
        for layer, (h, c) in enumerate(self.task.state or ()):
            h_LBH[layer, :, :H].copy_(h)
            c_LBH[layer, :, :H].copy_(c)
        self.task.state = tuple((h[:, :H], c[:, :H]) for h, c in zip(h_LBH, c_LBH))

    @torch.no_grad()
    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [N, V] and targets [N] of the validation text, window by window.

        Of a mixture of softmaxes, log-probabilities. The very first window is compiled and
        recorded; after that nothing here waits for a GPU.
        """
        section = self.config.validation
        if self._evaluation is None:
            # float16 has eight times the resolution of bfloat16, and its range suffices here.
            copies = Copies(self.model, fine(self.steps.copies.dtype))
            time, mine = section.window or self.task.window, self.task.ranks.share(section.stripes)
            rows = max(1, mine.stop - mine.start)  # without any, there are no windows
            self._evaluation = copies, DeterministicPass(copies, rows, time)
        copies, passes = self._evaluation
        copies.pack()
        passes.reset()
        for window in self.task.validation_windows:
            y_NH = window.real(passes.run(window.inputs).transpose(0, 1))
            yield copies.output(y_NH), window.targets
