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
from afterdrop.kernels.cuda_graph import SideStream
from afterdrop.kernels.lstm_stack import Stack
from afterdrop.kernels.training_masks import apply_mask, scatter_masked
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, lstm_layers
from afterdrop.models.mogrifier import Mogrifier
from afterdrop.train.config import TrainConfig
from afterdrop.train.fused_activations import ActivationPenalties
from afterdrop.train.fused_comparison import LogitComparison, compared_rows, undropped_rows
from afterdrop.train.fused_masks import StepMasks, stack_sharing
from afterdrop.train.fused_mixture import MixtureOutput
from afterdrop.train.fused_output import SoftmaxOutput
from afterdrop.train.optimiser import AdamTF
from afterdrop.train.penalties import active_penalties
from afterdrop.train.whole_masks import RankRows

# Groups of parameters, in the order in which their gradients become available.
_TABLES, _RECURRENT, _INPUT = 0, 1, 2


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
        R = window * rows.count
        self.tokens = torch.zeros(2, R, dtype=torch.int64, device=device)
        self._numbers = torch.tensor([step, 0], device=device)
        self.counter, self.slot = self._numbers[0], self._numbers[1:]
        self._prepare_losses(first)
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

    def _prepare_losses(self, first: RankRows) -> None:
        """Makes `numbers`, the data term and the penalties, which write them."""
        section, copies, time = self.config.objective, self.copies, self.stack.shape.time
        penalties, found = len(active_penalties(section)), min(2, first.samples)
        count = 2 + penalties if penalties else found
        self.numbers = torch.zeros(count, dtype=torch.float64, device=self.device)
        values, hidden = self.numbers[2:], self.stack.shape.hidden
        self._activations = ActivationPenalties(section, first, time, hidden, values)
        self._comparison: LogitComparison | None = None
        if self.rows != first:
            V = len(self.model.softmax_bias)
            self._comparison = LogitComparison(section, first, time, copies.softmax, V, values)
        self.output: SoftmaxOutput | MixtureOutput
        if copies.mixture is None:
            self.output = SoftmaxOutput(copies, self.stack, self.masks, first, self._comparison)
        else:
            assert self._comparison is None  # `fused_text.why_not` refuses both together
            self.output = MixtureOutput(copies, copies.mixture, self.stack, self.masks, first)
        passes = 1 if self._comparison is None else self._comparison.losses
        self._losses = passes * first.batch  # per time step; their mean is the data term
        # The loss and the effective number of samples of each target.
        targets = passes * time * first.count // first.samples
        self._of_targets = torch.zeros(found, targets, device=self.device)

    def _groups(self) -> list[list[Slot]]:
        """All parameters with the gradients that a step writes, and their 16-bit copies."""
        copies, model, stack = self.copies, self.model, self.copies.stack
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
        d_table = self.output.d_table
        tied = model.softmax is None
        self._d_embedding = d_table if tied else torch.zeros_like(d_table)
        d_bias = d_table[: len(model.softmax_bias), model.embedding.shape[1]]
        tables = [
            self._slot(model.softmax_bias, d_bias),
            self._slot(model.embedding, self._d_embedding, copies.embedding),
        ]
        if model.softmax is not None:
            tables.append(self._slot(model.softmax, d_table, copies.softmax))
        tables += [self._slot(*trained) for trained in self.output.trained]
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
        found = [self._d_w_x, self._d_w_h, *self._d_rounds, *self.output.summed, self.numbers]
        tied = self._d_embedding is self.output.d_table
        return found if tied else [*found, self._d_embedding]

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
        self.output.run(self.tokens[1], self._of_targets)
        with beside.work():
            self._table_gradients()
            self._numbers += 1  # nothing reads them after this
        dy = self.output.dy.view_as(stack.out)
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

    def _table_gradients(self) -> None:
        """Computes the numbers, and the gradients of the weights between stack and loss."""
        numbers = self.numbers[: len(self._of_targets)]
        torch.sum(self._of_targets, 1, dtype=torch.float64, out=numbers)
        numbers /= self._losses
        numbers[1:] /= self.stack.shape.time
        self.output.table_gradients()

    def _input_gradient(self) -> None:
        """Adds the gradient of the embedding rows that were read."""
        dx = self.stack.input_gradient()
        if self._d_embedding is not self.output.d_table:
            self._d_embedding.zero_()
        mask, factors = self.masks.rows_of("input"), self.masks.table
        scatter_masked(dx, mask, self._d_embedding, dx.shape[1], self.tokens[0], factors)
