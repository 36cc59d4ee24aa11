"""A member as a module: inputs in, log-probabilities out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.errors import DataError, MemberError
from afterdrop.evaluation.accumulators import log_softmax
from afterdrop.evaluation.chunks import split_evenly
from afterdrop.evaluation.passes import memory_budget, plan_chunks, sample_ranges
from afterdrop.family.member import Member
from afterdrop.family.power_mean import PowerSums
from afterdrop.masks.eval_mode import eval_mode
from afterdrop.masks.model_output import output_tensor
from afterdrop.masks.nested_inputs import batch_size, take_rows
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites, find_sites
from afterdrop.masks.uniforms import Plan, Scheme


class Predictor(nn.Module):
    """Predicts with one member of the family.

    The masks of sample k are the same for every input, so the predictor is a fixed function: an
    example gets the same prediction whatever batch it is in, and the same seed the same output.

    Args:
        model: The trained module.
        member: How to predict; `Member.load` reads a chosen one.
        num_samples: Mask samples, even; the deterministic member takes one pass without any.
        seed: Of the masks.
        masks: "lhs", "iid" or "antithetic".
        rates: Attributes that hold rates of masks which the model draws itself (`find_sites`).
        noise: Modules whose random draws are not dropout (`find_sites`).
        batch_dim: Batch dimension of inputs and logits.
        memory: Bytes for accumulators and activations.

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
        memory: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(member, Member):
            raise MemberError(
                f"member={member!r:.60} must be a Member, for example select(scores).member"
            )
        self.model, self.member = model, member
        self.plan = Plan(num_samples, seed, masks)
        self.batch_dim, self.memory = batch_dim, memory
        self._options: dict[str, Any] = {"rates": rates, "noise": noise, "batch_dim": batch_dim}
        self._sites: Sites | None = None

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """Log-probabilities [B, ..., V] of the inputs (as the model takes them)."""
        with eval_mode(self.model):
            if self.member.deterministic:
                logits = output_tensor(self.model(*inputs, **kwargs))
                return log_softmax(logits.float() / self.member.temperature, "the input")
            return self._sampled(inputs, kwargs)

    def _sampled(self, inputs: Any, kwargs: Any) -> Tensor:
        size = batch_size((inputs, kwargs), self.batch_dim)
        if size == 0:
            raise DataError("the input has no examples; give at least one")
        if self._sites is None:
            self._sites = find_sites(self.model, *inputs, **self._options, **kwargs)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        budget, cache = memory_budget(self.memory, device)
        # Accumulators are a few times what one row's logits take, which row_bytes contains.
        accumulators = 4 * self._sites.row_bytes
        chunks = plan_chunks(self._sites, self.plan, size, 1, accumulators, budget, cache)
        parts = [
            self._chunk((inputs, kwargs), size, part, chunks.samples)
            for part in split_evenly(size, chunks.examples)
        ]
        return torch.cat(parts, self.batch_dim)

    def _chunk(self, arguments: Any, size: int, part: range, step: int) -> Tensor:
        assert self._sites is not None
        member, dim = self.member, self.batch_dim
        sums = PowerSums((member.alpha,))
        control = self._sites.control(self.model)
        with control.prepared(member.multiplier):
            for samples in (s for block in sample_ranges(self.plan, step) for s in block):
                same = torch.zeros(len(part), dtype=torch.int64)
                rows = Rows(self.plan, (member.multiplier,), samples, same)
                args, kwargs = take_rows(arguments, dim, size, part.start, part.stop, len(samples))
                logits = output_tensor(control.forward(rows, *args, **kwargs)).float()
                if member.temper == "sample":
                    logits = logits / member.temperature
                lp = log_softmax(logits, "the input")
                sums.add(lp.unflatten(dim, (len(samples), -1)).movedim(dim, 0))
        log_means = sums.log_mean(member.alpha)
        if member.temper == "mean":
            log_means = log_means / member.temperature
        return log_means.log_softmax(-1)
