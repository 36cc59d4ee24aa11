"""A complete training step of a language model in kernels: masks, passes, clipping and update.

It computes `Trainer.train_step` with 16-bit operands: weights, cells, sums and gradients of the
tables stay float32; gradients of the weights of the stack are rounded like its operands. It reads
and writes fixed tensors, so that it can be recorded as a CUDA graph.

Legend as in `models.fused`: R = time · B places, H units, E of the embedding, V token types.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afterdrop.kernels.adam import Adam, Slot
from afterdrop.kernels.cross_entropy import cross_entropy
from afterdrop.kernels.cuda_graph import SideStream
from afterdrop.kernels.lstm_stack import Stack, StackSharing, fine, product
from afterdrop.kernels.training_masks import apply_mask, draw_mask, scatter_masked
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, lstm_layers
from afterdrop.train.config import TrainConfig
from afterdrop.train.optimiser import AdamTF

_IN_STACK = ("state", "inter_layer")  # sites whose masks belong to the stack
# Groups of parameters, in the order in which their gradients become available.
_TABLES, _RECURRENT, _INPUT = 0, 1, 2
_LIFT = 64.0  # scales gradients of logits, so that those of rare words fit into float16


class FusedStep:
    """The buffers of a training step, and the step itself.

    Args:
        config: The configuration of the run.
        model: The model; its parameters are updated in place.
        optimiser: The optimiser, whose squares are kept up to date.
        window: Time steps per window.
        step: The step to continue from.
        dtype: Dtype of the operands of the stack's products, bfloat16 or float32.

    Attributes:
        tokens: [2, R] inputs and targets of the step.
        counter: The number of the step, which its masks depend on.
        slot: A number for the code that fills `tokens`; each step adds one to it.
        loss: The loss of the last step, a scalar.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        optimiser: AdamTF,
        window: int,
        step: int,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.model, self.optimiser = config, model, optimiser
        self.device = model.softmax_bias.device
        self.copies = Copies(model, dtype)
        self.copies.pack()
        self._make_masks(window)
        R, size = window * config.objective.batch_size, model.embedding.shape[1]
        copies, device = self.copies, self.device
        self.tokens = torch.zeros(2, R, dtype=torch.int64, device=device)
        self._numbers = torch.tensor([step, 0], device=device)
        self.counter, self.slot = self._numbers[0], self._numbers[1:]
        half = copies.softmax
        self.features = half.new_zeros(R, half.shape[1])
        self.features[:, size] = 1  # the column of its gradient is that of the bias
        self.logits = half.new_zeros(R, len(half))  # overwritten by their gradient
        self._scale = 1 / (_LIFT * config.objective.batch_size)
        self.losses = torch.zeros(R, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        width = self.stack.out.shape[-1]
        self._dy = torch.zeros(R, width, device=device)
        if copies.projection is not None:
            self._y = half.new_zeros(R, width)
            self._d_projected = torch.zeros_like(self.features)
        self._beside = SideStream(device)
        section = config.optimiser
        self.adam = Adam(
            self._groups(),
            config.objective.l2_penalty,
            section.beta2,
            section.epsilon,
            section.max_norm,
        )
        self.adam.steps.fill_(optimiser.param_groups[0]["step"])

    def _make_masks(self, window: int) -> None:
        """Makes the stack and the masks of the sites outside of it."""
        config, B = self.model.config.resolved(), self.config.objective.batch_size
        names = ("input", "inter_layer", "state", "output", "projection")
        found = {name: config.mask(name) for name in names}
        self.rates = {name: mask.rate for name, mask in found.items()}

        def shared(name: str) -> StackSharing:
            return found[name].sharing if found[name].rate else "none"

        shape = self.copies.shape(B, window)
        self.stack = Stack(shape, self.copies.stack, shared("state"), shared("inter_layer"))
        sizes = {"input": self.copies.embedding, "output": self.stack.out}
        if self.copies.projection is not None:
            sizes["projection"] = self.copies.softmax
        kind = fine(self.copies.dtype)
        self.masks = {
            name: torch.ones(
                window if shared(name) == "step" else 1,
                B,
                like.shape[-1],
                dtype=kind,
                device=self.device,
            )
            for name, like in sizes.items()
            if found[name].rate
        }
        self.kept = torch.ones(B, device=self.device)

    def _groups(self) -> list[list[Slot]]:
        """All parameters with the gradients that a step writes, and their 16-bit copies."""
        copies, model, stack = self.copies, self.model, self.copies.stack

        def gradient(copy: Tensor) -> Tensor:
            return torch.zeros(copy.shape, device=self.device)

        # Summed in float32 and rounded like its operands, which saves memory traffic.
        d_w_x, d_w_h = torch.zeros_like(stack.w_x), torch.zeros_like(stack.w_h)
        self._d_w_x, self._d_w_h = d_w_x.flatten(1, 2), d_w_h.flatten(1, 2)
        inputs, recurrent = [], []
        for at, layer in enumerate(lstm_layers(model)):
            d_x, d_h = self._d_w_x[at], self._d_w_h[at]
            inputs.append(self._slot(layer.weight_x, d_x, stack.w_x[at].flatten(0, 1), 4))
            recurrent.append(self._slot(layer.weight_h, d_h, stack.w_h[at].flatten(0, 1), 4))
            d_gates = d_h[:, layer.hidden_size]
            recurrent.append(self._slot(layer.bias, d_gates, stack.bias[at].flatten(), 4))
        self._d_table = gradient(copies.softmax)
        self._d_embedding = self._d_table if model.softmax is None else gradient(copies.embedding)
        d_bias = self._d_table[: len(model.softmax_bias), model.embedding.shape[1]]
        tables = [
            self._slot(model.softmax_bias, d_bias),
            self._slot(model.embedding, self._d_embedding, copies.embedding),
        ]
        if model.softmax is not None:
            tables.append(self._slot(model.softmax, self._d_table, copies.softmax))
        if copies.projection is not None and model.projection is not None:
            self._d_projection = gradient(copies.projection)
            tables.append(self._slot(model.projection, self._d_projection, copies.projection))
        return [tables, recurrent, inputs]

    def _slot(
        self, parameter: nn.Parameter, grad: Tensor, copy: Tensor | None = None, groups: int = 1
    ) -> Slot:
        state = self.optimiser.state[parameter]
        if not state:
            state["square"] = torch.zeros_like(parameter)
        return Slot(parameter.detach(), grad, state["square"], copy, groups)

    @torch.no_grad()
    def run(self) -> None:
        """One step on `tokens`."""
        stack, beside = self.stack, self._beside
        with beside.work():
            self._draw_masks("stack")
        self._draw_masks("input")
        self._enter()
        beside.join()
        with beside.work():
            self._draw_masks("output")
        stack.start(self.kept if self.config.objective.state_reset else None)
        stack.forward()
        beside.join()
        self._softmax()
        with beside.work():
            self._table_gradients()
            self._numbers += 1  # nothing reads them after this
        stack.backward(self._dy.view_as(stack.out), self.masks.get("output"))
        # Sums of squares are limited by memory and products are not, so they run concurrently.
        with beside.work():
            self._input_gradient()
            self.adam.sum_squares(_TABLES)
        stack.recurrent_gradients(self._d_w_h)
        with beside.work():
            self.adam.sum_squares(_RECURRENT)
        stack.input_weight_gradients(self._d_w_x)
        self.adam.sum_squares(_INPUT)
        beside.join()
        self.adam.step()

    def _draw_masks(self, reader: str) -> None:
        """Draws the masks for one reader: the input, the stack, or the layers after the stack."""
        wanted = [
            (self.masks[name], self.rates[name], "input" if name == "input" else "output")
            for name in self.masks
        ]
        for mask, sharing, name in zip(self.stack.masks, self.stack.sharing, _IN_STACK):
            if sharing != "none":
                wanted.append((mask, self.rates[name], "stack"))
        if self.config.objective.state_reset:
            wanted.append((self.kept, self.config.objective.state_reset, "stack"))
        for site, (mask, rate, who) in enumerate(wanted):
            if who == reader:
                draw_mask(mask, self.counter, self.config.seed, site, rate)

    def _mask(self, name: str) -> Tensor | None:
        """The mask of a site with a row per batch row or per place; None if nothing is dropped."""
        return self.masks[name].flatten(0, 1) if name in self.masks else None

    def _enter(self) -> None:
        """Writes the dropped input into the stack."""
        table, x = self.copies.embedding, self.stack.x[0].flatten(0, 1)
        apply_mask(table, self._mask("input"), x, table.shape[1], self.tokens[0])

    def _softmax(self) -> None:
        """Computes losses and the gradients of the stack's dropped output."""
        copies, size = self.copies, self.model.embedding.shape[1]
        y, features, output = self.stack.out.flatten(0, 1), self.features, self._mask("output")
        if copies.projection is None:
            apply_mask(y, output, features, size)
        else:
            apply_mask(y, output, self._y, y.shape[1])
            projected = product(self._y, copies.projection.t())
            apply_mask(projected, self._mask("projection"), features, size)
        logits, bias = self.logits, self.model.softmax_bias.detach()
        torch.mm(features, copies.softmax.t(), out=logits)
        cross_entropy(logits, bias, self.tokens[1], self.losses, _LIFT)
        if copies.projection is None:
            product(logits, copies.softmax, self._dy, self._scale)
            return
        d_features = product(logits, copies.softmax)
        width = d_features.shape[1]
        apply_mask(d_features, self._mask("projection"), self._d_projected, width)
        product(self._d_projected, copies.projection, self._dy, self._scale)

    def _table_gradients(self) -> None:
        """Computes the loss and the gradients of the softmax table and of the projection."""
        torch.sum(self.losses, 0, dtype=torch.float64, out=self.loss)
        self.loss /= self.config.objective.batch_size
        product(self.logits.t(), self.features, self._d_table, self._scale)
        if self.copies.projection is not None:
            product(self._d_projected.t(), self._y, self._d_projection, self._scale)

    def _input_gradient(self) -> None:
        """Adds the gradient of the embedding rows that were read."""
        dx = self.stack.input_gradient()
        if self._d_embedding is not self._d_table:
            self._d_embedding.zero_()
        scatter_masked(dx, self._mask("input"), self._d_embedding, dx.shape[1], self.tokens[0])
