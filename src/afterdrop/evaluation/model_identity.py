"""By what a resumed evaluation recognises its model.

Weights have a fingerprint in every file of scores. Code, settings and state outside of them do not,
so the outputs for the first batch stand for these: without dropout, and under the masks of the
first sample, which show where dropout acts. Buffers that are not saved with the weights have a
fingerprint of their own, because the first batch may not need all of them.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from afterdrop.evaluation.batches import Batch
from afterdrop.evaluation.engines.model_passes import ModelPasses
from afterdrop.evaluation.engines.text import with_streams
from afterdrop.evaluation.likelihoods import Likelihood
from afterdrop.evaluation.output_summary import OutputSummary, summary
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.rounding import epsilon_of
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.models.fingerprint import tensors_fingerprint
from afterdrop.transfer import with_float64

_EXAMPLES = 8  # under masks, which need memory that a large batch may not leave


class ModelIdentity(NamedTuple):
    """What identifies a model beside its weights.

    Attributes:
        outputs: A summary of its outputs for the first batch.
        buffers: A fingerprint of the buffers that are not saved.
    """

    outputs: OutputSummary
    buffers: str

    def difference(self, outputs: Tensor | None, buffers: str, *, same_device: bool) -> str | None:
        """What another identity has that this one has not.

        Args:
            outputs: The projections of its outputs; None if there are none.
            buffers: The fingerprint of its buffers.
            same_device: Whether both outputs were computed on devices of one kind.
        """
        if outputs is None or not self.outputs.matches(outputs, same_device=same_device):
            return "other outputs"
        return "other buffers" if buffers != self.buffers else None


def identify(
    model: nn.Module,
    first: Batch,
    request: Request,
    likelihood: Likelihood,
    sites: Sites | None,
    plain: Tensor,
) -> ModelIdentity:
    """What identifies a model.

    Args:
        model: The model.
        first: The first batch.
        request: What is evaluated.
        likelihood: Finds the logits.
        sites: The dropout sites; None if no member samples.
        plain: The logits of the first batch without dropout.
    """
    outputs = summary(plain, epsilon_of(model, plain.dtype))
    if sites is not None:
        dropped = masked_output(model, first, request, likelihood, sites)
        outputs = outputs.joined(summary(dropped, epsilon_of(model, dropped.dtype)))
    return ModelIdentity(outputs, buffers_fingerprint(model))


def masked_output(
    model: nn.Module, first: Batch, request: Request, likelihood: Likelihood, sites: Sites
) -> Tensor:
    """What the model gives for examples of the first batch under the masks of the first sample."""
    count = min(_EXAMPLES, first.size) if sites.batched else first.size
    numbers = torch.arange(first.first, first.first + count, device=first.targets.device)
    rows = Rows(request.plan, (max(request.grid.stochastic),), range(1), numbers)
    sites = sites.without_prefix()
    if request.stream is not None:
        rows = dataclasses.replace(rows, streams=numbers % request.stream.stripes)
        if request.stream.lifetime == "stream":
            sites = with_streams(model, sites)
    passes = ModelPasses(model, sites, request.batch_dim)
    with passes.control.prepared(rows.multipliers):
        output = passes.run(first.inputs, first.size, rows, range(count))
    return with_float64(likelihood.read_output(output, first.host[:count], 1)[0])


def buffers_fingerprint(model: nn.Module) -> str:
    """A hash of the buffers that are not saved with the weights.

    Example:
        >>> net = nn.Identity()
        >>> net.register_buffer("scale", torch.ones(2), persistent=False)
        >>> before = buffers_fingerprint(net)
        >>> net.scale[1] = 2
        >>> buffers_fingerprint(net) == before
        False
    """
    saved = model.state_dict()
    return tensors_fingerprint({n: t for n, t in model.named_buffers() if n not in saved})
