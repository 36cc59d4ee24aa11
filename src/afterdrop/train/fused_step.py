"""A complete training step of a language model in kernels: masks, passes, clipping and update.

It computes `Trainer.train_step` with 16-bit operands: weights, cells, sums and gradients of the
tables stay float32; gradients of the weights of the stack are rounded like its operands. It reads
and writes fixed tensors, so that it can be recorded as a CUDA graph.

Legend as in `models.fused`: R = time · rows places, H units, E of the embedding, V token types.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afterdrop.kernels.adam import Adam, Slot
from afterdrop.kernels.cross_entropy import cross_entropy
from afterdrop.kernels.cuda_graph import SideStream
from afterdrop.kernels.lstm_stack import Stack, product
from afterdrop.kernels.sample_cross_entropy import sample_cross_entropy
from afterdrop.kernels.training_masks import apply_mask, scatter_masked
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, lstm_layers
from afterdrop.models.mogrifier import Mogrifier
from afterdrop.train.config import TrainConfig
from afterdrop.train.fused_activations import ActivationPenalties
from afterdrop.train.fused_comparison import LogitComparison, compared_rows, undropped_rows
from afterdrop.train.fused_masks import StepMasks, stack_sharing
from afterdrop.train.optimiser import AdamTF
from afterdrop.train.penalties import active_penalties
from afterdrop.train.whole_masks import RankRows

# Groups of parameters, in the order in which their gradients become available.
_TABLES, _RECURRENT, _INPUT = 0, 1, 2
# Scales gradients of logits, so that those of rare words fit into float16. Several samples divide
# them by their number on average, so it is multiplied by it.
_LIFT = 64.0


class FusedStep:
    """The buffers of a training step, and the step itself.

    Args:
        config: The configuration of the run.
        model: The model; its parameters are updated in place.
        optimiser: The optimiser, whose squares are kept up to date.
        rows: The rows of the batch that this rank computes. If they are not all of them, the
            `summed` gradients must be summed over ranks between `gradients` and `update`.
        window: Time steps per window.
        step: The step to continue from.
        dtype: Dtype of the operands of the stack's products, bfloat16 or float32.

    Attributes:
        tokens: [2, R] inputs and targets of the step.
        rows: The rows that the stack computes, of all passes.
        counter: The number of the step, which its masks depend on.
        slot: A number for the code that fills `tokens`; each step adds one to it.
        numbers: [1, 2 or 2 + P] float64: the data term of the last step, with several samples their
            mean effective number, and what P penalties added to the loss (`StepLoss.numbers`).
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        optimiser: AdamTF,
        rows: RankRows,
        window: int,
        step: int,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.model, self.optimiser = config, model, optimiser
        first, rows = rows, compared_rows(config.objective, rows)
        self.rows = rows
        self.device = model.softmax_bias.device
        self.copies = Copies(model, dtype)
        self.copies.pack()
        copies, device = self.copies, self.device
        shape = copies.shape(rows.count, window)
        self.stack = Stack(shape, copies.stack, *stack_sharing(copies.config))
        still = undropped_rows(config.objective, first)
        self.masks = StepMasks(config, copies, self.stack, rows, still)
        R, size = window * rows.count, model.embedding.shape[1]
        self.tokens = torch.zeros(2, R, dtype=torch.int64, device=device)
        self._numbers = torch.tensor([step, 0], device=device)
        self.counter, self.slot = self._numbers[0], self._numbers[1:]
        half = copies.softmax
        self.features = half.new_zeros(R, half.shape[1])
        self.features[:, size] = 1  # the column of its gradient is that of the bias
        self._prepare_penalties(first)
        scored = len(self._scored)
        self.logits = half.new_zeros(scored, len(half))  # overwritten by their gradient
        self._lift = _LIFT * first.samples
        self._losses = rows.batch * scored // (window * first.count)  # whose mean is the loss
        self._scale = 1 / (self._lift * self._losses)
        # The loss and the effective number of samples of each target.
        found = min(2, first.samples)
        self._of_targets = torch.zeros(found, scored // first.samples, device=device)
        width = self.stack.out.shape[-1]
        self._dy = torch.zeros(R, width, device=device)
        if copies.projection is not None:
            self._y = half.new_zeros(R, width)
            self._d_projected = torch.zeros_like(self.features)
        self._d_rounds: list[Tensor] = []  # of the Mogrifier rounds, if there are any
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

    def _prepare_penalties(self, first: RankRows) -> None:
        """Makes `numbers`, and the penalties that write some of them."""
        section, shape = self.config.objective, self.stack.shape
        penalties = len(active_penalties(section))
        count = 2 + penalties if penalties else min(2, first.samples)
        self.numbers = torch.zeros(count, dtype=torch.float64, device=self.device)
        values = self.numbers[2:]
        self._activations = ActivationPenalties(section, first, shape.time, shape.hidden, values)
        self._comparison: LogitComparison | None = None
        self._scored = self.features  # those of the places that have a loss
        if self.rows != first:
            table, V = self.copies.softmax, len(self.model.softmax_bias)
            self._comparison = LogitComparison(section, first, self.features, table, V, values)
            self._scored = self._comparison.scored

    def _groups(self) -> list[list[Slot]]:
        """All parameters with the gradients that a step writes, and their 16-bit copies."""
        copies, model, stack = self.copies, self.model, self.copies.stack

        def gradient(copy: Tensor) -> Tensor:
            return torch.zeros(copy.shape, device=self.device)

        # Summed in float32 and rounded like its operands, which saves memory traffic.
        d_w_x, d_w_h = torch.zeros_like(stack.w_x), torch.zeros_like(stack.w_h)
        if stack.rounds is not None:
            self._d_rounds = [torch.zeros_like(w) for w in (stack.rounds.down, stack.rounds.up)]
        self._d_w_x, self._d_w_h = d_w_x.flatten(1, 2), d_w_h.flatten(1, 2)
        inputs, recurrent = [], []
        for at, layer in enumerate(lstm_layers(model)):
            d_x, d_h = self._d_w_x[at], self._d_w_h[at]
            inputs.append(self._slot(layer.weight_x, d_x, stack.w_x[at].flatten(0, 1), 4))
            recurrent.append(self._slot(layer.weight_h, d_h, stack.w_h[at].flatten(0, 1), 4))
            d_gates = d_h[:, layer.hidden_size]
            recurrent.append(self._slot(layer.bias, d_gates, stack.bias[at].flatten(), 4))
            recurrent += self._round_slots(layer.mogrifier, at)
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

    def _round_slots(self, mogrifier: Mogrifier, layer: int) -> list[Slot]:
        """The parameters of the Mogrifier rounds of a layer."""
        slots: list[Slot] = []
        weights = self.copies.stack.rounds
        if weights is None:
            return slots
        d_down, d_up = (gradient[:, layer] for gradient in self._d_rounds)
        for number, (down, up, bias) in enumerate(
            zip(mogrifier.down, mogrifier.up, mogrifier.bias)
        ):
            d_bias = d_up[number, :, weights.rank]
            slots += [
                self._slot(down, d_down[number], weights.down[number, layer]),
                self._slot(up, d_up[number], weights.up[number, layer]),
                self._slot(bias, d_bias, weights.bias[number, layer]),
            ]
        return slots

    def _slot(
        self, parameter: nn.Parameter, grad: Tensor, copy: Tensor | None = None, groups: int = 1
    ) -> Slot:
        state = self.optimiser.state[parameter]
        if not state:
            state["square"] = torch.zeros_like(parameter)
        return Slot(parameter.detach(), grad, state["square"], copy, groups)

    @property
    def summed(self) -> list[Tensor]:
        """What `gradients` computes, of the rows of this rank: gradients and `numbers`."""
        found = [self._d_w_x, self._d_w_h, *self._d_rounds, self._d_table, self.numbers]
        if self._d_embedding is not self._d_table:
            found.append(self._d_embedding)
        return found if self.copies.projection is None else [*found, self._d_projection]

    @torch.no_grad()
    def gradients(self) -> None:
        """The gradients of the loss of `tokens`."""
        stack, beside = self.stack, self._beside
        with beside.work():
            self.masks.draw("stack", self.counter)
        self.masks.draw("input", self.counter)
        self._enter()
        beside.join()
        with beside.work():
            self.masks.draw("output", self.counter)
        if self._comparison is not None:
            self._comparison.start(stack)
        stack.start(self.masks.kept if self.config.objective.state_reset else None)
        stack.forward()
        beside.join()
        self._softmax()
        with beside.work():
            self._table_gradients()
            self._numbers += 1  # nothing reads them after this
        dy = self._dy.view_as(stack.out)
        mask = self._activations.add(stack.out, self.masks.units.get("output"), dy)
        stack.backward(dy, mask)
        # Sums of squares are limited by memory and products are not, so they run concurrently.
        with beside.work():
            self._input_gradient()
            self._sum_squares(_TABLES)
        stack.recurrent_gradients(self._d_w_h)
        if stack.rounds is not None:
            stack.round_gradients(*self._d_rounds)
        with beside.work():
            self._sum_squares(_RECURRENT)
        stack.input_weight_gradients(self._d_w_x)
        self._sum_squares(_INPUT)
        beside.join()

    def _sum_squares(self, group: int) -> None:
        if self.rows.whole:  # otherwise the gradients are not complete yet
            self.adam.sum_squares(group)

    @torch.no_grad()
    def update(self) -> None:
        """Clips the gradients and updates all weights and their copies."""
        if not self.rows.whole:
            for group in (_TABLES, _RECURRENT, _INPUT):
                self.adam.sum_squares(group)
        self.adam.step()

    def _enter(self) -> None:
        """Writes the dropped input into the stack."""
        table, x = self.copies.embedding, self.stack.x[0].flatten(0, 1)
        mask, factors = self.masks.rows_of("input"), self.masks.table
        apply_mask(table, mask, x, table.shape[1], self.tokens[0], factors)

    def _softmax(self) -> None:
        """Computes losses and the gradients of the stack's dropped output."""
        copies, size = self.copies, self.model.embedding.shape[1]
        y, features, masks = self.stack.out.flatten(0, 1), self.features, self.masks
        if copies.projection is None:
            apply_mask(y, masks.rows_of("output"), features, size)
        else:
            apply_mask(y, masks.rows_of("output"), self._y, y.shape[1])
            projected = product(self._y, copies.projection.t())
            apply_mask(projected, masks.rows_of("projection"), features, size)
        logits, bias, targets = self.logits, self.model.softmax_bias.detach(), self.tokens[1]
        if self._comparison is not None:
            self._comparison.compare()
            targets = self._comparison.targets(targets)
        torch.mm(self._scored, copies.softmax.t(), out=logits)
        found, lift = self._of_targets, self._lift
        if self.config.objective.samples > 1:
            B = self.rows.count // self.rows.samples
            sample_cross_entropy(logits, bias, targets, found[0], found[1], B, lift)
        else:
            cross_entropy(logits, bias, targets, found[0], lift)
        if copies.projection is None:
            self._feature_gradient(self._scale, self._dy)
            return
        d_features = self._feature_gradient(1.0)
        width = d_features.shape[1]
        apply_mask(d_features, masks.rows_of("projection"), self._d_projected, width)
        product(self._d_projected, copies.projection, self._dy, self._scale)

    def _feature_gradient(self, scale: float, out: Tensor | None = None) -> Tensor:
        """The gradient of the features from that of the logits, times `scale`."""
        if self._comparison is None:
            return product(self.logits, self.copies.softmax, out, scale)
        of_losses = product(self.logits, self.copies.softmax, scale=scale)
        return self._comparison.feature_gradient(of_losses, scale / self._scale, out)

    def _table_gradients(self) -> None:
        """Computes the numbers and the gradients of the softmax table and of the projection."""
        numbers = self.numbers[: len(self._of_targets)]
        torch.sum(self._of_targets, 1, dtype=torch.float64, out=numbers)
        numbers /= self._losses
        numbers[1:] /= self.stack.shape.time
        product(self.logits.t(), self._scored, self._d_table, self._scale)
        if self._comparison is not None:
            self._comparison.add_table_gradient(self._d_table)
        if self.copies.projection is not None:
            product(self._d_projected.t(), self._y, self._d_projection, self._scale)

    def _input_gradient(self) -> None:
        """Adds the gradient of the embedding rows that were read."""
        dx = self.stack.input_gradient()
        if self._d_embedding is not self._d_table:
            self._d_embedding.zero_()
        mask, factors = self.masks.rows_of("input"), self.masks.table
        scatter_masked(dx, mask, self._d_embedding, dx.shape[1], self.tokens[0], factors)
