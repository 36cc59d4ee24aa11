"""Several models, adapters or views of the inputs as the samples of one evaluation.

Models are taken one after another: each reads all batches, and its log-probabilities go to a
file, so that only one model is in memory at a time. With mask samples, each source (a model and a
view) gives several samples, from masks of its own.

Legend: M multipliers, S mask samples of a source, n targets of a batch that count, V classes or
parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from afterdrop.errors import DataError, FileError
from afterdrop.evaluation.batches import (
    AS_GIVEN,
    Batch,
    BatchReader,
    Source,
    call,
    digest_tensors,
    open_batches,
)
from afterdrop.evaluation.chunks import Memory
from afterdrop.evaluation.engines.model_passes import ModelPasses
from afterdrop.evaluation.ensemble import MOST_GROUPS, given_grid
from afterdrop.evaluation.ensemble_models import (
    Model,
    Views,
    adapters_restored,
    check_views,
    combined_fingerprint,
    load_model,
    mask_plan,
)
from afterdrop.evaluation.likelihoods.build_likelihood import build_likelihood
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.loop import (
    Execution,
    find_batch_sites,
    first_output,
    warn_of_randomness,
)
from afterdrop.evaluation.masked_logits import MaskedLogits
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.sample_evaluation import GivenSamples, score_samples
from afterdrop.evaluation.sample_reading import SampleLikelihood, as_array
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.evaluation.scratch_file import FEWER_SAMPLES, ScratchArray, ScratchFile
from afterdrop.evaluation.stored_samples import Column, Part
from afterdrop.masks.model_call import LogitsPlace
from afterdrop.masks.model_guard import guarded
from afterdrop.masks.sites import Sites
from afterdrop.masks.uniforms import Plan
from afterdrop.models.fingerprint import fingerprint


def run_ensemble(
    models: Mapping[str, Model],
    views: Views | None,
    batches: Iterable[Any],
    request: Request,
    execution: Execution,
    *,
    masks: Plan | None = None,
    logits: LogitsPlace | None = None,
    source: Source = AS_GIVEN,
    single: int | None = None,
    likelihood: str | ParametricLikelihood | None = None,
) -> Scores:
    """Scores of an ensemble.

    Args:
        models: By name.
        views: Functions of the inputs, by name; None for the inputs as they are.
        batches: As for `evaluate`, read once per model.
        request: What to evaluate; without masks, its multipliers do not count.
        execution: How to carry it out.
        masks: Mask samples per source; None where dropout stays off.
        logits: The function that finds the logits in the models' output, if the request has one.
        source: How batches are made of what is given.
        single: Which source stands alone; None for the best.
        likelihood: The user's own likelihood, if the request names one.
    """
    if views:
        check_views(views)
    sources = len(models) * max(1, len(views or ()))
    if sources < 2:
        raise DataError("an ensemble needs at least 2 models or views; give more, or one model")
    if single is not None and single not in range(sources):
        raise DataError(f"single={single} must be the number of a source, 0 to {sources - 1}")
    if execution.resume is not None or execution.ranks.count > 1:
        raise DataError(
            "resume= and ranks= do not take several models; evaluate each, store its "
            "log-probabilities, and give them to evaluate_samples"
        )
    if len(models) > 1 and iter(batches) is batches:
        raise DataError(
            f"batches is an iterator, which can be read once, and each of {len(models)} models "
            "reads all of it; give a list or a loader"
        )
    if masks is None:
        request = dataclasses.replace(request, grid=given_grid(request.grid))
    with ScratchFile() as scratch, adapters_restored(models.values()):
        reading = build_likelihood(request, logits, likelihood)
        run = _Recorder(
            views or {"": _as_given}, request, execution, masks, reading, source, scratch
        )
        prints = [run.record(model, batches, len(models)) for model in models.values()]
        total = sources * (1 if masks is None else masks.num_samples)
        groups = min(len(models) if len(models) > 1 else sources, MOST_GROUPS)
        plan = Plan(total, request.plan.seed, "given", groups)
        given = GivenSamples(
            run.columns(run.sampled) if masks else run.columns(run.alone),
            run.columns(run.alone) if masks else None,
            torch.cat(run.targets),
            tuple(models),
            tuple(views or ()),
            masks,
            combined_fingerprint(prints),
            examples=torch.cat(run.examples),
            single=single,
            labels=torch.cat(run.labels) if run.labels else None,
            recorded=True,
        )
        asked = dataclasses.replace(request, plan=plan)
        budget = Memory.of(torch.device("cpu"), execution.memory)
        return score_samples(given, asked, reading, budget)


def _as_given(inputs: Any) -> Any:
    return inputs


@dataclasses.dataclass
class _Recorder:
    """Runs models over batches and keeps their logits in a file."""

    views: Views
    request: Request
    execution: Execution
    masks: Plan | None
    likelihood: SampleLikelihood
    source: Source
    scratch: ScratchFile
    sources: int = 0
    targets: list[Tensor] = dataclasses.field(default_factory=list)
    examples: list[Tensor] = dataclasses.field(default_factory=list)
    labels: list[Tensor] = dataclasses.field(default_factory=list)
    digests: list[str] = dataclasses.field(default_factory=list)
    alone: list[list[Part]] = dataclasses.field(default_factory=list)  # by batch, then by source
    sampled: list[list[Part]] = dataclasses.field(default_factory=list)

    def record(self, model: Model, batches: Iterable[Any], models: int) -> str:
        """Runs one model; returns the fingerprint of its weights."""
        module = load_model(model)
        reader = BatchReader(module, self.likelihood, self.request, self.source.targets)
        with torch.no_grad(), guarded(module, self.execution.reset):
            head, stream, total = open_batches(batches, self.source.batch_size, self.source.collate)
            first = reader.read(head, 0, self.execution.first_example)
            first_output(module, first, self.request, self.likelihood)
            sites = self._sites(module, first)
            position, number = self.execution.first_example, -1
            shown = not self.execution.progress
            what = f"source {self.sources} of {models * len(self.views)}"
            for number, item in enumerate(tqdm(stream, what, total, disable=shown)):
                batch = reader.read(item, number, position)
                position += batch.size
                self._note(number, batch)
                self._run(module, number, batch, sites)
                if number == 0 and self.sources == 0 and total is not None:
                    self._check_disk(total * models)
        if number + 1 != len(self.digests):
            raise DataError(
                f"batches had {len(self.digests)} batches for the first model and {number + 1} for "
                "a later one; each model must read the same data"
            )
        self.sources += len(self.views)
        return fingerprint(module)

    def columns(self, parts: list[list[Part]]) -> list[Column]:
        """What was kept, batch by batch."""
        return [Column(tuple(row), row[0].shape[2]) for row in parts]

    def _sites(self, model: nn.Module, first: Batch) -> Sites | None:
        if self.masks is None:
            return None
        sites = find_batch_sites(model, first, self.request, self.likelihood, compute_once=False)
        if sites is not None and sites.randomness_off and self.sources == 0:
            warn_of_randomness(sites)
        return sites

    def _note(self, number: int, batch: Batch) -> None:
        """Keeps the targets that the first model sees, and requires them of the others."""
        digest = digest_tensors([batch.host])
        if number == len(self.digests) and self.sources == 0:
            counts = self.likelihood.counts(batch.host)
            each = batch.host.numel() // batch.size
            numbers = torch.arange(batch.first, batch.first + batch.size).repeat_interleave(each)
            self.targets.append(batch.host.flatten()[counts])
            self.examples.append(numbers[counts])
            if (labels := self.likelihood.labels(batch.host)) is not None:
                self.labels.append(labels)
            self.digests.append(digest)
            self.alone.append([])
            self.sampled.append([])
        elif number >= len(self.digests) or digest != self.digests[number]:
            raise DataError(
                f"batch {number} has other targets than for the first model; each model must read "
                "the same data in the same order: use a loader that does not shuffle"
            )

    def _run(self, model: nn.Module, number: int, batch: Batch, sites: Sites | None) -> None:
        """All views of a batch."""
        for view, function in enumerate(self.views.values()):
            source = self.sources + view
            inputs = function(batch.fresh_inputs(self.request.batch_dim))
            output = call(model, inputs)
            found = as_array(self.likelihood.read_output(output, batch.host, 1))
            self._check_classes(number, source, found.shape[-1])
            self.alone[number].append(_part(self.scratch.store(found[None])))
            if sites is None or self.masks is None:
                continue
            shape = (self.masks.num_samples, len(self.request.grid.stochastic), *found.shape[1:])
            room = self.scratch.allocate(shape, found.dtype)
            seen = dataclasses.replace(batch, inputs=function(batch.inputs))
            plan = mask_plan(self.masks, source)
            memory = Memory.of(batch.targets.device, self.execution.memory)
            passes = ModelPasses(model, sites, self.request.batch_dim)
            masked = MaskedLogits(passes, sites, plan, self.request, self.likelihood, memory)
            masked.write(seen, room.mapped())
            self.sampled[number].append(_part(room))

    def _check_classes(self, number: int, source: int, classes: int) -> None:
        """Refuses models that cannot be averaged."""
        others = self.alone[number]
        if others and others[0].shape[-1] != classes:
            raise DataError(
                f"model {source // len(self.views)} gives {classes} classes, and the first one "
                f"{others[0].shape[-1]}; models of an ensemble must have the same classes"
            )

    def _check_disk(self, times: int) -> None:
        """Refuses more than the disk holds, judging by the first batch."""
        needed, free = self.scratch.used * times, self.scratch.free + self.scratch.used
        if needed > free:
            raise FileError(
                f"the samples of all models take about {needed / 2**30:.1f} GiB in "
                f"{self.scratch.folder}, which has {free / 2**30:.1f} GiB; {FEWER_SAMPLES}"
            )


def _part(stored: ScratchArray) -> Part:
    return Part(stored, stored.shape, 2)
