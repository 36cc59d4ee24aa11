"""A whole training step of a language model as one CUDA graph: masks, passes, clip and update.

The step is that of `Trainer.train_step` with 16-bit operands: weights, cells, sums and gradients of
weights stay float32. Masks are drawn by the kernels from (seed, step, site, element), so a run
resumes with the same masks whatever was drawn before.

Letters as in `models.fused`: R = time · B places, H units, E of the embedding, V token types.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from afterdrop import kernels
from afterdrop.data import IGNORE, EvalStripes
from afterdrop.kernels.adam import Adam, Slot
from afterdrop.kernels.cross_entropy import cross_entropy
from afterdrop.kernels.graph import Replay
from afterdrop.kernels.lstm_stack import Sharing, Stack, fine, product
from afterdrop.kernels.mask import apply_mask, draw_mask
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, DeterministicPass, lstm_layers, why_not_fused
from afterdrop.train.config import TrainConfig
from afterdrop.train.optimiser import AdamTF
from afterdrop.train.text_task import TextTask

_AHEAD = 100  # windows that are brought to the device together
_SHARED: dict[str, Sharing] = {"sequence": "window", "step": "step"}
_RECURRENT = ("state", "inter_layer")  # sites whose masks the stack holds


def why_not(
    config: TrainConfig, task: object, model: nn.Module, optimiser: object, device: torch.device
) -> str | None:
    """Why a run cannot be trained by the kernels; None if it can."""
    if not isinstance(task, TextTask) or not isinstance(model, LanguageModel):
        return "only language models have kernels"
    if config.objective.samples > 1:
        return f"objective.samples is {config.objective.samples}"
    if not isinstance(optimiser, AdamTF):
        return f"optimiser.name is {config.optimiser.name!r}"
    return kernels.why_not(device) or why_not_fused(model.config)


class FusedText:
    """Trains and validates a language model with the kernels.

    Args:
        task: The text and what is carried.
        model: The model; its parameters are updated in place.
        optimiser: Its squares and step count are kept up to date.
        step: The step to go on from.
        dtype: Of the products' operands.
    """

    def __init__(
        self,
        task: TextTask,
        model: LanguageModel,
        optimiser: AdamTF,
        step: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.task, self.model, self.optimiser = task, model, optimiser
        self.config, self.device = task.config, task.device
        config, B, T = model.config.resolved(), self.config.objective.batch_size, task.window
        self.copies = Copies(model, dtype)
        self.copies.pack()
        masks = {name: config.mask(name) for name in ("input", "inter_layer", "state", "output")}
        masks["projection"] = config.mask("projection")
        self.rates = {name: mask.rate for name, mask in masks.items()}

        def shared(name: str) -> Sharing:
            return _SHARED[masks[name].sharing] if masks[name].rate else "none"

        shape = self.copies.shape(B, T)
        self.stack = Stack(shape, self.copies.stack, shared("state"), shared("inter_layer"))
        sizes = {"input": self.copies.embedding, "output": self.stack.out}
        if self.copies.projection is not None:
            sizes["projection"] = self.copies.softmax
        self.masks = {
            name: torch.ones(
                T if shared(name) == "step" else 1,
                B,
                like.shape[-1],
                dtype=fine(dtype),
                device=self.device,
            )
            for name, like in sizes.items()
            if masks[name].rate
        }
        self.kept = torch.ones(B, device=self.device)
        self.features = torch.zeros(
            T * B, self.copies.softmax.shape[1], dtype=dtype, device=self.device
        )
        self.features[:, config.embedding_size] = 1  # its gradient's column is that of the bias
        self._y = torch.zeros(T * B, self.stack.out.shape[-1], dtype=dtype, device=self.device)
        self.d_logits = torch.zeros(
            T * B, len(self.copies.softmax), dtype=dtype, device=self.device
        )
        self.losses = torch.zeros(T * B, device=self.device)
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        section = self.config.optimiser
        self.adam = Adam(
            self.device,
            self.config.objective.l2_penalty,
            section.beta2,
            section.epsilon,
            section.max_norm,
        )
        for parameter in model.parameters():
            state = optimiser.state[parameter]
            if not state:
                state["square"] = torch.zeros_like(parameter)
        self.counter = torch.full((), step, dtype=torch.int64, device=self.device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.windows = torch.zeros(_AHEAD, B, T + 1, dtype=torch.int64, device=self.device)
        self.stripes = task.train_stripes(torch.device("cpu"))
        self._first, self._rate = step, -1.0
        self.adam.steps.fill_(optimiser.param_groups[0]["step"])
        self._take_state()
        self._replay = Replay(self.device)
        self._evaluation: tuple[Copies, DeterministicPass] | None = None

    def step(self, number: int) -> Tensor:
        """One step; returns its loss, a scalar on the device that the next step overwrites."""
        if (number - self._first) % _AHEAD == 0:
            ahead = [self.stripes.window(number + n) for n in range(_AHEAD)]
            self.windows.copy_(
                torch.stack([torch.cat([x, y[:, -1:]], 1) for x, y in ahead]).to(self.device)
            )
            self.slot.zero_()
        group = self.optimiser.param_groups[0]
        if group["lr"] != self._rate:
            self._rate = group["lr"]
            self.adam.learning_rate.fill_(self._rate)
        self._replay(self._step)
        group["step"] += 1
        return self.loss

    @torch.no_grad()
    def _step(self) -> None:
        window_Bt = self.windows.index_select(0, self.slot)[0]
        inputs_R = window_Bt[:, :-1].t().flatten()
        targets_R = window_Bt[:, 1:].t().flatten()
        self._draw_masks()
        self._forward(inputs_R)
        scale = 1 / self.config.objective.batch_size
        logits = self.copies.logits(self.features)
        bias = self.model.softmax_bias.detach()
        cross_entropy(logits, bias, targets_R, self.losses, self.d_logits, scale)
        self.loss.copy_(self.losses.double().sum() * scale)
        self.adam.step(self._backward(inputs_R))
        self.counter += 1
        self.slot += 1

    def _draw_masks(self) -> None:
        wanted = [(self.masks[name], self.rates[name]) for name in self.masks]
        for mask, sharing, name in zip(self.stack.masks, self.stack.sharing, _RECURRENT):
            if sharing != "none":
                wanted.append((mask, self.rates[name]))
        if self.config.objective.state_reset:
            wanted.append((self.kept, self.config.objective.state_reset))
        for site, (mask, rate) in enumerate(wanted):
            draw_mask(mask, self.counter, self.config.seed, site, rate)

    def _mask(self, name: str) -> Tensor | None:
        """A site's mask with a row for each of B, or for each place; None if nothing drops."""
        return self.masks[name].flatten(0, 1) if name in self.masks else None

    def _forward(self, inputs_R: Tensor) -> None:
        stack, copies = self.stack, self.copies
        x, table = stack.x[0].flatten(0, 1), copies.embedding
        apply_mask(table, self._mask("input"), x, table.shape[1], inputs_R)
        kept_B1 = (self.kept > 0).float().unsqueeze(1)  # a state that is kept is not rescaled
        stack.start(stack.last * kept_B1, stack.c[:, -1] * kept_B1)
        stack.forward()
        y, size = stack.out.flatten(0, 1), self.model.embedding.shape[1]
        if copies.projection is None:
            apply_mask(y, self._mask("output"), self.features, size)
            return
        apply_mask(y, self._mask("output"), self._y, y.shape[1])
        projected = product(self._y, copies.projection.t())
        apply_mask(projected, self._mask("projection"), self.features, size)

    def _backward(self, inputs_R: Tensor) -> list[Slot]:
        """The gradients of all parameters, each with where its updated copy goes."""
        stack, copies, model = self.stack, self.copies, self.model
        d_table = product(self.d_logits.t(), self.features)
        d_features = product(self.d_logits, copies.softmax)
        size = model.embedding.shape[1]
        d_bias = d_table[: len(model.softmax_bias), size]
        slots = [self._slot(model.softmax_bias, d_bias)]
        dy = d_features
        if copies.projection is not None and model.projection is not None:
            d_projected = torch.empty_like(self.features)
            apply_mask(d_features, self._mask("projection"), d_projected, d_features.shape[1])
            d_projection = product(d_projected.t(), self._y)
            slots.append(self._slot(model.projection, d_projection, copies.projection))
            dy = product(d_projected, copies.projection)
        apply_mask(dy, self._mask("output"), dy, dy.shape[1])
        stack.backward(dy.view_as(stack.out))
        for at, (layer, (d_x, d_h)) in enumerate(zip(lstm_layers(model), stack.weight_gradients())):
            w_x, w_h = copies.stack.w_x[at].flatten(0, 1), copies.stack.w_h[at].flatten(0, 1)
            slots.append(self._slot(layer.weight_x, d_x, w_x, 4))
            slots.append(self._slot(layer.weight_h, d_h, w_h, 4))
            d_gate_bias = d_h[:, layer.hidden_size]
            slots.append(self._slot(layer.bias, d_gate_bias, copies.stack.bias[at].flatten(), 4))
        dx = stack.input_gradient()
        apply_mask(dx, self._mask("input"), dx, dx.shape[1])
        d_embedding = d_table
        if model.softmax is not None:
            slots.append(self._slot(model.softmax, d_table, copies.softmax))
            d_embedding = torch.zeros_like(d_table)
        d_embedding.index_add_(0, inputs_R, dx)
        slots.append(self._slot(model.embedding, d_embedding, copies.embedding))
        return slots

    def _slot(
        self, parameter: nn.Parameter, grad: Tensor, copy: Tensor | None = None, groups: int = 1
    ) -> Slot:
        square = self.optimiser.state[parameter]["square"]
        return Slot(parameter.detach(), grad, square, copy, groups)

    def _take_state(self) -> None:
        """Goes on from the task's carried state, which from here on are views of the stack's."""
        H = self.model.config.hidden_sizes[0]
        h_LBH, c_LBH = self.stack.last, self.stack.c[:, -1]
        for layer, (h, c) in enumerate(self.task.state or ()):
            h_LBH[layer, :, :H].copy_(h)
            c_LBH[layer, :, :H].copy_(c)
        self.task.state = tuple((h[:, :H], c[:, :H]) for h, c in zip(h_LBH, c_LBH))

    @torch.no_grad()
    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [N, V] and targets [N] of the validation text, window by window."""
        section, text = self.config.validation, self.task.text
        time = section.window or self.task.window
        if self._evaluation is None:
            # float16 is eight times finer than bfloat16, and nothing here is out of its range.
            copies = Copies(self.model, fine(self.copies.dtype))
            self._evaluation = copies, DeterministicPass(copies, section.rows, time)
        copies, passes = self._evaluation
        copies.pack()
        passes.reset()
        stripes = EvalStripes(
            text.valid, text.vocabulary.eos_id, section.rows, time, lines=text.has_lines
        )
        bias, seen = self.model.softmax_bias, 0
        for inputs_Bt, targets_Bt in stripes:
            y_RH = passes.run(inputs_Bt.to(self.device)).flatten(0, 1)
            targets_R = targets_Bt.t().flatten().to(self.device)
            real_R = targets_R != IGNORE
            logits = copies.logits(copies.features(y_RH[real_R]))[:, : len(bias)] + bias
            seen += int((targets_Bt != IGNORE).sum())
            yield logits, targets_R[real_R]
            if section.max_targets is not None and seen >= section.max_targets:
                return
