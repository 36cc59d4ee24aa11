"""A whole training step of a language model: masks, passes, gradients, clip and update.

The step is that of `Trainer.train_step` with 16-bit operands: weights, cells, sums and gradients of
tables stay float32, those of the stack's weights are rounded as its operands are. It reads and
writes fixed tensors, so that it can be a CUDA graph.

Letters as in `models.fused`: R = time · B places, H units, E of the embedding, V token types.
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

_IN_STACK = ("state", "inter_layer")  # sites whose masks the stack holds
_TABLES, _RECURRENT, _INPUT = 0, 1, 2  # groups of parameters, as their gradients get done
_LIFT = 64.0  # of the gradients of logits, so that float16 has those of rare words


class FusedStep:
    """Buffers of a step, and the step.

    Args:
        config: The run's.
        model: The model; its parameters are updated in place.
        optimiser: Its squares are kept up to date.
        window: Time steps.
        step: The step to go on from.
        dtype: Of the operands of the stack's products, bfloat16 or float32.

    Attributes:
        tokens: [2, R] inputs and targets of the step.
        counter: The step's number, which its masks depend on.
        slot: A number for whoever fills `tokens`; each step adds one, as to the counter.
        loss: Of the last step, a scalar.
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
        self.features[:, size] = 1  # its gradient's column is that of the bias
        self.logits = half.new_zeros(R, len(half))  # then their gradient
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
        """The stack, and masks of the sites outside it."""
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
        """All parameters, each with the gradient that a step writes and its copy."""
        copies, model, stack = self.copies, self.model, self.copies.stack

        def gradient(copy: Tensor) -> Tensor:
            return torch.zeros(copy.shape, device=self.device)

        # A sum in float32, rounded as its operands are: two bytes less to write and to read twice.
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
            self._numbers += 1  # nothing reads them any more
        stack.backward(self._dy.view_as(stack.out), self.masks.get("output"))
        # Sums of squares wait for memory, products do not: they run beside one another.
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
        """Draws the masks that the input, the stack or what follows its output reads."""
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
        """A site's mask with a row for each of B, or for each place; None if nothing drops."""
        return self.masks[name].flatten(0, 1) if name in self.masks else None

    def _enter(self) -> None:
        """The dropped input."""
        table, x = self.copies.embedding, self.stack.x[0].flatten(0, 1)
        apply_mask(table, self._mask("input"), x, table.shape[1], self.tokens[0])

    def _softmax(self) -> None:
        """Losses, and gradients of the stack's dropped output."""
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
        """The loss, and gradients of the softmax's table and of the down-projection."""
        torch.sum(self.losses, 0, dtype=torch.float64, out=self.loss)
        self.loss /= self.config.objective.batch_size
        product(self.logits.t(), self.features, self._d_table, self._scale)
        if self.copies.projection is not None:
            product(self._d_projected.t(), self._y, self._d_projection, self._scale)

    def _input_gradient(self) -> None:
        """The gradient of the embedding's rows that were read."""
        dx = self.stack.input_gradient()
        if self._d_embedding is not self._d_table:
            self._d_embedding.zero_()
        scatter_masked(dx, self._mask("input"), self._d_embedding, dx.shape[1], self.tokens[0])
