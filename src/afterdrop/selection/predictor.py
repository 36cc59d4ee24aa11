"""A member as a module: inputs in, log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.errors import DataError, MemberError
from afterdrop.evaluation.chunks import Memory
from afterdrop.evaluation.engines.dispatch import Dispatcher, EngineMaker, operations_for
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.model_inputs import find_or_explain
from afterdrop.evaluation.request import Request, recorded_place
from afterdrop.family.member import Grid, Member
from afterdrop.masks.model_call import LogitsPlace, batch_size, check_inputs, take_rows
from afterdrop.masks.model_guard import Reset, guarded
from afterdrop.masks.sites import Sites, find_sites
from afterdrop.masks.uniforms import Plan, Scheme
from afterdrop.selection.example_keys import input_hashes, rows_interact
from afterdrop.selection.prediction_engine import PredictionEngine


class Predictor(nn.Module):
    """Predicts with one member of the family.

    A predictor is a fixed function: an example gets the same prediction whatever batch it is in,
    and the same seed gives the same output. By default all inputs share the masks of sample k;
    with `per_example=True` each input has masks of its own, keyed by a hash of it.

    Where the rows of a batch influence each other (nodes of a graph, attention over the batch),
    each row has masks of its own, keyed by its position, as in `evaluate`. A prediction then
    depends on the whole batch.

    `Choice.predictor` makes one from a choice, as it was evaluated.

    Args:
        model: The trained module.
        member: How to predict.
        num_samples: Mask samples, even; the deterministic member takes one pass without any.
        seed: Seed of the masks.
        masks: "lhs", "iid" or "antithetic".
        rates: Attributes that hold rates of masks which the model draws itself (`find_sites`).
        noise: Modules whose random draws are not dropout (`find_sites`).
        batch_dim: Batch dimension of inputs and logits.
        class_dim: Class dimension of the logits; needed where they are not [B, V].
        logits: Where the model's output holds its logits, if several of its tensors may be the
            logits: an index, a key or a function of the output.
        per_example: Whether each input has masks of its own. The mean over many inputs then has the
            small mask error of an evaluation (`Estimate.mc_error`); with shared masks it is larger.
        memory: Bytes for accumulators and activations.
        reset: Called with the model before each forward pass, to forget state that it keeps
            between calls.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> predict = Predictor(net, Member(alpha=1, multiplier=0.5), num_samples=8)
        >>> x = torch.randn(5, 4)
        >>> predict(x).shape, torch.allclose(predict(x)[:2], predict(x[:2]), atol=1e-6)
        (torch.Size([5, 3]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        member: Member,
        num_samples: int = 100,
        seed: int = 0,
        *,
        masks: Scheme = "lhs",
        rates: Sequence[str] = (),
        noise: Sequence[str] = (),
        batch_dim: int = 0,
        class_dim: int | None = None,
        logits: LogitsPlace | None = None,
        per_example: bool = False,
        memory: int | None = None,
        reset: Reset | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(member, Member):
            raise MemberError(
                f"member={member!r:.60} must be a Member, for example select(scores).member"
            )
        self.model, self.member, self.memory, self.reset = model, member, memory, reset
        self.per_example = per_example
        self.request = Request(
            Grid((member.alpha,), (member.multiplier,), member.temper),
            Plan(num_samples, seed, masks),
            rates=tuple(rates) if not isinstance(rates, str) else (rates,),
            noise=tuple(noise) if not isinstance(noise, str) else (noise,),
            batch_dim=batch_dim,
            class_dim=class_dim,
            logits=recorded_place(logits),
        )
        self._likelihood = Categorical.of(self.request, logits)
        self._sites: Sites | None = None
        self._found_on = 0  # the number of examples on which sites were found
        self._by_position = False
        self._dispatcher: tuple[torch.device, Dispatcher] | None = None

    def extra_repr(self) -> str:
        """Member, samples and seed, for the printed form."""
        plan = self.request.plan
        return f"{self.member}, K = {plan.num_samples}, seed = {plan.seed}"

    def __getstate__(self) -> dict[str, Any]:
        """What copies and files need: engines are made again."""
        return {**self.__dict__, "_dispatcher": None}

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """Log-probabilities of the inputs (as the model takes them), in the shape of the logits."""
        arguments = inputs, kwargs
        check_inputs([*islice(self.model.parameters(), 1), *arguments])
        with guarded(self.model, self.reset):
            if self.member.deterministic:
                logits, _ = self._logits(arguments)
                logits = logits.float() / self.member.temperature
                found = self._likelihood.predict(logits, "the input")
            else:
                found = self._sampled(arguments)
        return found.movedim(-1, -1 if self.request.class_dim is None else self.request.class_dim)

    def _logits(self, arguments: Any) -> tuple[Tensor, int]:
        """Logits of a pass in the model's present mode, and their batch dimension."""
        inputs, kwargs = arguments
        return self._likelihood.read_logits(self.model(*inputs, **kwargs))

    def _sampled(self, arguments: Any) -> Tensor:
        dim = self.request.batch_dim
        size = batch_size(arguments, dim)
        if size == 0:
            raise DataError("the input has no examples; give at least one")
        engines = self._engines(arguments, size)
        keys = torch.zeros(size, dtype=torch.int64)
        if self._by_position:
            keys = torch.arange(size)
        elif self.per_example:
            keys = input_hashes(arguments, size, dim)
        return engines.begin((arguments, keys))()

    def _engines(self, arguments: Any, size: int) -> Dispatcher:
        """The engines for the model's device, once its dropout sites are known."""
        if self._sites is None or self._found_on == 1 < size:  # one row says little of the others
            self._find_sites(arguments, size)
        assert self._sites is not None
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if self._dispatcher is None or self._dispatcher[0] != device:
            memory = Memory.of(device, self.memory)
            make = partial(
                PredictionEngine,
                self.model,
                self.member,
                self.request,
                self._likelihood,
                self._sites,
                memory,
            )
            candidates = [
                EngineMaker(partial(make, operations), operations.kernels)
                for operations in operations_for(self.request, self.model, device)
                if operations.sums is None  # those keep the targets only, not all classes
            ]
            self._dispatcher = device, Dispatcher(candidates, memory, "the prediction")
        return self._dispatcher[1]

    def _find_sites(self, arguments: Any, size: int) -> None:
        request, (inputs, kwargs) = self.request, arguments
        self._logits(take_rows(arguments, request.batch_dim, size, 0, size, 1))  # refuses early
        options: Any = {"rates": request.rates, "noise": request.noise}
        options |= {"batch_dim": request.batch_dim, "logits": self._likelihood.logits}
        self._sites = find_or_explain(
            lambda: find_sites(self.model, *inputs, **options, **kwargs), lambda: None
        )
        self._by_position = not self._sites.batched and rows_interact(
            self._logits, arguments, size, request.batch_dim
        )
        self._found_on, self._dispatcher = size, None
