"""A member as a module: inputs in, log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.errors import DataError, MemberError
from afterdrop.evaluation.chunks import Memory, plan_chunks, split_evenly
from afterdrop.evaluation.engines.dispatch import Dispatcher, EngineMaker, operations_for
from afterdrop.evaluation.engines.generic import ModelPasses, Operations, run_samples
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.scores.schema import Results
from afterdrop.family.member import Grid, Member
from afterdrop.masks.model_call import batch_size, output_tensor
from afterdrop.masks.model_guard import Reset, guarded
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites, find_sites
from afterdrop.masks.uniforms import Plan, Scheme
from afterdrop.selection.member_mean import MemberMean


class Predictor(nn.Module):
    """Predicts with one member of the family.

    The masks of sample k are the same for every input, so the predictor is a fixed function: an
    example gets the same prediction whatever batch it is in, and the same seed the same output.

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
        class_dim: Class dimension of the logits.
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
        class_dim: int = -1,
        memory: int | None = None,
        reset: Reset | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(member, Member):
            raise MemberError(
                f"member={member!r:.60} must be a Member, for example select(scores).member"
            )
        self.model, self.member, self.memory, self.reset = model, member, memory, reset
        self.request = Request(
            Grid((member.alpha,), (member.multiplier,), member.temper),
            Plan(num_samples, seed, masks),
            rates=tuple(rates) if not isinstance(rates, str) else (rates,),
            noise=tuple(noise) if not isinstance(noise, str) else (noise,),
            batch_dim=batch_dim,
            class_dim=class_dim,
        )
        self._sites: Sites | None = None
        self._dispatcher: tuple[torch.device, Dispatcher] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What copies and files need: engines are made again."""
        return {**self.__dict__, "_dispatcher": None}

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """Log-probabilities of the inputs (as the model takes them), in the shape of the logits."""
        request = self.request
        with guarded(self.model, self.reset):
            if self.member.deterministic:
                likelihood = Categorical.of(request)
                logits, _ = likelihood.classes_last(output_tensor(self.model(*inputs, **kwargs)))
                found = likelihood.predict(logits.float() / self.member.temperature, "the input")
            else:
                if batch_size((inputs, kwargs), request.batch_dim) == 0:
                    raise DataError("the input has no examples; give at least one")
                found = self._engines(inputs, kwargs).begin((inputs, kwargs))()
        return found.movedim(-1, request.class_dim)

    def _engines(self, inputs: Any, kwargs: Any) -> Dispatcher:
        """The engines for the model's device, once its dropout sites are known."""
        request = self.request
        if self._sites is None:
            options: Any = {"rates": request.rates, "noise": request.noise}
            self._sites = find_sites(
                self.model, *inputs, **options, batch_dim=request.batch_dim, **kwargs
            )
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if self._dispatcher is None or self._dispatcher[0] != device:
            memory = Memory.of(device, self.memory)
            make = partial(_PredictionEngine, self.model, self.member, request, self._sites, memory)
            candidates = [
                EngineMaker(partial(make, operations), operations.kernels)
                for operations in operations_for(request, self.model, device)
                if operations.sums is None  # those keep the targets only, not all classes
            ]
            self._dispatcher = device, Dispatcher(candidates, memory, "the prediction")
        return self._dispatcher[1]


class _PredictionEngine:
    """Log-probabilities of nested inputs, from chunks of rows under the same masks for all.

    Args:
        model: The model.
        member: How to predict.
        request: Samples and dimensions.
        sites: The model's dropout sites.
        memory: The budget.
        operations: Plain ones, or kernels.
    """

    ahead = 0

    def __init__(
        self,
        model: nn.Module,
        member: Member,
        request: Request,
        sites: Sites,
        memory: Memory,
        operations: Operations,
    ) -> None:
        self.member, self.request, self.sites, self.memory = member, request, sites, memory
        self.kernels = operations.kernels
        self.passes = ModelPasses(model, sites, request.batch_dim, operations.draw)
        self.likelihood = Categorical.of(request)

    def begin(self, batch: Any, number: int) -> Callable[[], Tensor]:
        """Returns what computes the log-probabilities, with the classes last."""
        return partial(self._run, batch)

    def clear(self) -> None:
        """Nothing is kept."""

    def carried(self) -> Results:
        """Nothing."""
        return {}

    def restore(self, carried: Results) -> None:
        """Nothing to do."""

    def _run(self, arguments: Any) -> Tensor:
        size = batch_size(arguments, self.request.batch_dim)
        # Accumulators are a few times what one row's logits take, which row_bytes contains.
        accumulators = 4 * self.sites.row_bytes
        chunks = plan_chunks(self.sites, self.request.plan, size, 1, accumulators, self.memory)
        ranges = split_evenly(size, chunks.examples)
        parts = [self._chunk(arguments, size, part, chunks.samples) for part in ranges]
        dims = {dim for _, dim in parts}
        return torch.cat([found for found, _ in parts], dims.pop())

    def _chunk(self, arguments: Any, size: int, part: range, at_once: int) -> tuple[Tensor, int]:
        """Log-probabilities of some examples, and their batch dimension."""
        mean, multipliers, plan = (
            MemberMean(self.member),
            (self.member.multiplier,),
            self.request.plan,
        )
        same = torch.zeros(len(part), dtype=torch.int64)
        dim = 0

        def add(samples: range) -> None:
            nonlocal dim
            rows = Rows(plan, multipliers, samples, same)
            output = self.passes.run_arguments(arguments, size, rows, part)
            logits, dim = self.likelihood.classes_last(output_tensor(output))
            mean.add(logits.unflatten(dim, (len(samples), -1)).movedim(dim, 0), "the input")

        run_samples(self.passes.control, plan, multipliers, at_once, add, lambda: None)
        return mean.log_probs(), dim
