"""Train-mode passes of a model: plain ones, with the model's own dropout, and controlled ones.

Legend: K samples, N targets, V classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from afterdrop.evaluation.batches import Batch, call
from afterdrop.evaluation.chunks import Memory, plan_chunks
from afterdrop.evaluation.engines.model_passes import ModelPasses, run_samples
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.masks.model_call import without_fast_path
from afterdrop.masks.model_guard import ModelState, Reset, guarded
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.masks.uniforms import Plan


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model that is checked, and what it is checked on.

    Attributes:
        model: The model.
        batch: A batch of its data.
        likelihood: Reads its outputs.
        options: Of `find_sites`.
        reset: Called before each pass.
        plan: The samples.
    """

    model: nn.Module
    batch: Batch
    likelihood: Categorical
    options: dict[str, Any]
    reset: Reset | None
    plan: Plan

    def inputs(self) -> Any:
        """A copy of the inputs, because a model may write into them."""
        return self.batch.fresh_inputs(self.likelihood.batch_dim)

    def log_probs(self, output: Any, copies: int) -> Tensor:
        """Log-probabilities [copies, N, V] of an output."""
        logits = self.likelihood.read_output(output, self.batch.host, copies)
        return self.likelihood.predict(logits, "the first batch")


class RandomCounter(TorchDispatchMode):
    """Counts the random operations that reach torch's kernels.

    Attributes:
        masks: Operations that draw more than one number.
        single: Operations that draw one number, which often only steers the control flow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.masks = self.single = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            draws = _draws(func, args, kwargs or {})
            first = out[0] if isinstance(out, list | tuple) else out
            if first.numel() > 1:
                self.masks += draws
            else:
                self.single += draws
        return out


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """How many masks an operation draws; fused kernels draw none at a rate of 0 or in eval mode."""
    given = {a.name: a.default_value for a in func._schema.arguments}
    given |= dict(zip(given, args)) | kwargs
    if any(given.get(name, 1) == 0 for name in ("dropout_p", "dropout")):
        return 0
    if any(given.get(name) is False for name in ("train", "training")):
        return 0
    if "dropout" in func.overloadpacket.__name__ and given.get("p", 1) == 0:
        return 0
    if func.overloadpacket.__name__.endswith("_rnn"):  # cuDNN's: a mask between any two layers
        return max(0, given["num_layers"] - 1)
    return 1


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds all global generators; restores them on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":  # torch.manual_seed would seed the other GPUs as well
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def train_mode(subject: Subject, held: frozenset[str]) -> Iterator[ModelState]:
    """The model in train mode but for held modules, its generators seeded; restored on exit."""
    model = subject.model
    device = subject.batch.targets.device
    with (
        torch.no_grad(),
        guarded(model, subject.reset),
        seeded(subject.plan.seed, device),
        without_fast_path(),
    ):
        state = ModelState(model, by_value=True)
        try:
            for name, module in model.named_modules():
                module.training = name not in held
            yield ModelState(model, by_value=True)
        finally:
            state.restore()


def count_random(subject: Subject, held: frozenset[str]) -> tuple[int, int, list[str]]:
    """Counts the random operations of a plain train-mode pass.

    Returns:
        Those that draw more than one number, those that draw one, and the global generators
        outside torch that were used.
    """
    counter = RandomCounter()
    with train_mode(subject, held):
        python, numpy = random.getstate(), str(np.random.get_state())
        with counter:
            call(subject.model, subject.inputs())
        used = ["Python"] * (random.getstate() != python)
        used += ["NumPy"] * (str(np.random.get_state()) != numpy)
    return counter.masks, counter.single, used


def own_samples(subject: Subject, sites: Sites, targets: int) -> Tensor:
    """Log-probabilities [K, N, V] of the first targets under the model's own dropout."""
    found = []
    with train_mode(subject, sites.held) as state:
        for _ in range(subject.plan.num_samples):
            output = call(subject.model, subject.inputs())
            found.append(subject.log_probs(output, 1)[:, :targets].cpu())
            state.restore()
    return torch.cat(found)


def controlled_samples(
    subject: Subject, sites: Sites, plan: Plan, targets: int | None = None
) -> Tensor:
    """Log-probabilities [K, N, V] of all or of the first targets under controlled masks."""
    batch, batch_dim = subject.batch, subject.likelihood.batch_dim
    sites = sites.without_prefix()
    passes = ModelPasses(subject.model, sites, batch_dim)
    memory = Memory.of(batch.targets.device)
    chunks = plan_chunks(sites, plan, batch.size, 1, 0, memory)
    numbers = torch.arange(batch.size, device=batch.targets.device)
    found: list[Tensor] = []

    def add(samples: range) -> None:
        rows = Rows(plan, (1.0,), samples, numbers)
        output = passes.run(batch.inputs, batch.size, rows, range(batch.size))
        found.append(subject.log_probs(output, len(samples))[:, :targets].cpu())

    at_once = chunks.samples if chunks.examples == batch.size else 1
    with torch.no_grad(), guarded(subject.model, subject.reset):
        run_samples(passes.control, plan, (1.0,), at_once, add, lambda: None)
    return torch.cat(found)
