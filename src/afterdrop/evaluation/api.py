"""Evaluating every member of the family on data.

evaluate           any module, or several
evaluate_text      a language model on a text
evaluate_samples   samples that were computed elsewhere
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from afterdrop.errors import DataError
from afterdrop.evaluation.batches import Source
from afterdrop.evaluation.chunks import Memory
from afterdrop.evaluation.dynamic_evaluation import DynamicEvaluation
from afterdrop.evaluation.ensemble import MOST_GROUPS, given_grid
from afterdrop.evaluation.ensemble_models import Model, Views, list_models
from afterdrop.evaluation.labelled_items import TargetsPlace
from afterdrop.evaluation.likelihoods.build_likelihood import build_likelihood, likelihood_name
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.model_ensemble import run_ensemble
from afterdrop.evaluation.request import (
    LIKELIHOODS,
    SAMPLES,
    Adaptive,
    Carry,
    Lifetime,
    Request,
    StreamSettings,
    default_samples,
    recorded_place,
    recorded_targets,
    requested_samples,
)
from afterdrop.evaluation.sample_evaluation import GivenSamples, score_samples
from afterdrop.evaluation.sample_reading import last_dimensions
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.evaluation.scratch_file import ScratchFile
from afterdrop.evaluation.stored_samples import (
    naming_files,
    open_samples,
    read_targets,
)
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.family.member import Grid
from afterdrop.masks.model_call import LogitsPlace
from afterdrop.masks.model_guard import Reset
from afterdrop.masks.uniforms import Plan, Scheme
from afterdrop.models import LanguageModel
from afterdrop.ranks import SINGLE_PROCESS, Splitting, current


def evaluate(
    model: nn.Module | Sequence[Model],
    batches: Iterable[Any],
    *,
    grid: Grid | None = None,
    num_samples: int | Literal["auto"] | None = None,
    adapters: Sequence[str] = (),
    augment: Views | None = None,
    single: int | None = None,
    mask_share: float = Adaptive.mask_share,
    beaten_by: float = Adaptive.beaten_by,
    seed: int = 0,
    split: str = "valid",
    masks: Scheme = "lhs",
    blocks: int = 2,
    rates: Sequence[str] = (),
    noise: Sequence[str] = (),
    batch_dim: int = 0,
    class_dim: int | None = None,
    ignore_index: int = -100,
    logits: LogitsPlace | None = None,
    targets: TargetsPlace | None = None,
    targets_per_example: int | None = None,
    batch_size: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    likelihood: str | ParametricLikelihood = "categorical",
    temperatures: tuple[float, float] | None = None,
    first_example: int = 0,
    memory: int | None = None,
    resume: str | Path | None = None,
    progress: bool = False,
    ranks: Splitting | None = None,
    reset: Reset | None = None,
    compute_once: bool = True,
) -> Scores:
    """Evaluates every member of the extended dropout family on data.

    The model is left as it was: modes, rates, statistics and weights. Masks depend on the seed and
    on the position of an example in the data, not on how the data are batched.

    Args:
        model: Any module that contains dropout; stays on its device. Or an ensemble: a list of
            modules, and of functions without arguments that load one (checkpoints), which are
            taken one after another. Its samples are its models with dropout off, or, with
            `num_samples`, models × masks.
        batches: Pairs (inputs, targets). Inputs are a tensor, a tuple of positional or a dict of
            keyword inputs, or an object with a method `to`; targets are class numbers [B] or
            [B, ...]. Also mappings with "labels", which are shifted by one position where the
            model's own loss shifts them, and objects such as PyG's `Data`, whose `y` holds the
            targets. The model returns logits [B, ..., V] as a tensor, in a tuple, or as `.logits`.
        grid: The members; by default 5 alphas × 11 multipliers, each at every temperature.
        num_samples: Number of mask samples K, even; or "auto": a pilot on part of the data drops
            multipliers that cannot win and finds the K that the others need, for a predictor with
            100 samples. By default "auto" on validation data (`split="valid"`), from which a member
            is chosen, and 100 with every multiplier on other data. Of an ensemble, mask samples
            per model and view; by default dropout stays off.
        adapters: Names of adapters of the model, switched on by its `set_adapter` (PEFT,
            transformers), which are the members of an ensemble.
        augment: Views of the inputs, by name: functions of a batch's inputs, whose predictions are
            the samples (test-time augmentation), of one model or of each of an ensemble.
        single: Ensembles: number of the model that is compared with, alone; by default the best.
        mask_share: With "auto": the mask error of differences between the leading members that is
            tolerated, as a share of the data error of their XE.
        beaten_by: With "auto": standard errors by which a multiplier must be worse to be dropped.
        seed: Seed of the masks.
        split: Name of the data; scores of "test" are refused by `select`.
        masks: "lhs" (two independent Latin hypercubes), "iid" or "antithetic".
        blocks: Independent blocks of samples, a power of two; more than 2 give a curve over K.
        rates: Attributes that hold rates of masks which the model draws itself (`find_sites`).
        noise: Modules whose random draws are not dropout (`find_sites`).
        batch_dim: Batch dimension of inputs, targets and logits.
        class_dim: Class dimension of the logits, such as 1 for [B, V, height, width]; by default
            the last, and refused if another one would fit the targets, too.
        ignore_index: Targets with this value do not count.
        logits: Where the model's output holds its logits, if several of its tensors may be the
            logits: an index, a key or a function of the output.
        targets: Where a batch holds its targets, if its kind does not say so: a key or attribute,
            or a function of the batch. They are not shifted. Of a pair, the first is the inputs;
            everything else goes into the model as it is, without that key.
        targets_per_example: How many targets of an example count at most, drawn by the seed: some
            pixels of each image, for example. Bounds the memory of results; errors still cluster
            by example.
        batch_size: Makes batches of this many examples, if `batches` is a dataset of single ones.
        collate: Makes a batch of a list of examples, as the `collate_fn` of a DataLoader does; or
            of whatever `batches` holds, as in `lambda item: (item["image"], item["label"])`.
        likelihood: The kind of targets: "categorical" (class numbers), "binary" or "multilabel" (0
            and 1, with one logit per target), "gaussian" (numbers; the model returns means and
            variances) or "squared_error" (numbers; the model returns means); or a likelihood of
            your own. Targets of NaN do not count.
        temperatures: Lowest and highest temperature; by default chosen from the first batch.
        first_example: Number of the first example, for data evaluated in parts (`Scores.merge`).
        memory: Bytes for accumulators and activations; by default 256 MiB on a CPU and 40 % of
            the free memory of a GPU.
        resume: A folder for finished parts: an interrupted evaluation resumes from there and ends
            with the same bytes. `Scores.save` removes the parts.
        progress: Whether to show a progress bar.
        ranks: "split" shares the batches over the ranks of the caller's process group: every rank
            makes this call with the same model and all batches, and gets the same Scores.
        reset: Called with the model before each forward pass, to forget state that it keeps
            between calls (a recurrent state in an attribute, for example).
        compute_once: Whether modules that finish before the first dropout site run once per batch
            instead of once per sample (`find_sites` lists them). The numbers are the same up to
            rounding; False runs every module in every pass.

    Returns:
        Scores of every member.

    Raises:
        DataError, SiteError, MemberError: For input that cannot be evaluated, with the remedy.
        RankError: If there is no process group to share the work in, or a rank is gone.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        >>> data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)]
        >>> evaluate(net, data, num_samples=4)
        Scores(split='valid', 51 members, K=4, 16 targets in 16 examples)
    """
    asked = default_samples(split) if num_samples is None else num_samples
    several = bool(adapters or augment or isinstance(model, list | tuple | nn.ModuleList))
    if several:
        if num_samples == "auto":
            raise DataError(
                "num_samples='auto' is for one model; give an ensemble a number of samples"
            )
        asked = SAMPLES if num_samples is None else num_samples
    elif single is not None:
        raise DataError(f"single={single} is for ensembles; leave it out for one model")
    plan, adaptive = requested_samples(asked, seed, masks, blocks, mask_share, beaten_by)
    request = Request(
        Grid() if grid is None else grid,
        plan,
        split,
        tuple(rates) if not isinstance(rates, str) else (rates,),
        tuple(noise) if not isinstance(noise, str) else (noise,),
        batch_dim,
        class_dim,
        ignore_index,
        temperatures,
        logits=recorded_place(logits),
        targets=recorded_targets(targets),
        targets_per_example=targets_per_example,
        adaptive=adaptive,
        likelihood=likelihood_name(likelihood),
    )
    group = SINGLE_PROCESS if ranks is None else current(ranks)
    execution = Execution(
        first_example, memory, resume, progress, group, reset=reset, compute_once=compute_once
    )
    source = Source(batch_size, collate, targets)
    if not several:
        one = cast(nn.Module, model)  # which the loop checks
        return run_evaluation(
            one, batches, request, execution, logits=logits, source=source, likelihood=likelihood
        )
    return run_ensemble(
        list_models(model, adapters),
        augment,
        batches,
        request,
        execution,
        masks=None if num_samples is None else plan,
        logits=logits,
        source=source,
        single=single,
        likelihood=likelihood,
    )


def evaluate_text(
    model: LanguageModel,
    tokens: Tensor,
    eos: int,
    *,
    grid: Grid | None = None,
    num_samples: int | Literal["auto"] | None = None,
    mask_share: float = Adaptive.mask_share,
    beaten_by: float = Adaptive.beaten_by,
    seed: int = 0,
    split: str = "valid",
    masks: Scheme = "lhs",
    blocks: int = 2,
    temperatures: tuple[float, float] | None = None,
    window: int = 35,
    stripes: int = 1,
    carry: Carry = "deterministic",
    lifetime: Lifetime = "window",
    lines: bool = True,
    memory: int | None = None,
    resume: str | Path | None = None,
    progress: bool = False,
    ranks: Splitting | None = None,
    dynamic: DynamicEvaluation | None = None,
    training: Tensor | None = None,
) -> Scores:
    """Evaluates every member of the extended dropout family on a text.

    The text is read in windows, each starting from a carried state. Arguments that are not
    described here are those of `evaluate`.

    Args:
        model: The language model; stays on its device.
        tokens: [N] the text.
        eos: The token before the first.
        grid: The members.
        num_samples: Number of mask samples K, even, or "auto"; by default as for `evaluate`, and
            100 with `carry="sampled"`.
        mask_share: With "auto": the tolerated mask error.
        beaten_by: With "auto": when a multiplier is dropped.
        seed: Seed of the masks.
        split: Name of the data.
        masks: How masks are drawn.
        blocks: Independent blocks of samples.
        temperatures: Lowest and highest temperature.
        window: Tokens per window.
        stripes: Contiguous shares of the text, each starting from a zero state; 1 reads the text
            as one exact stream, more are faster.
        carry: What a window starts from: "deterministic" or "sampled".
        lifetime: How long a mask that is shared over time lives: "window" or "stream".
        lines: Whether stripes consist of whole lines.
        memory: Bytes for accumulators and activations.
        resume: A folder for finished parts.
        progress: Whether to show a progress bar.
        ranks: "split" shares the work over the caller's process group.
        dynamic: Lets the weights learn from each window once it is predicted (deterministic member
            only); they are restored at the end.
        training: With `dynamic`: the training text, for statistics of its gradients.

    Returns:
        Scores with the tokens as targets and the windows as examples.

    Example:
        >>> import torch
        >>> from afterdrop.models import LanguageModelConfig
        >>> config = LanguageModelConfig(vocabulary=9, hidden_sizes=(8,), output_dropout=0.5)
        >>> text = torch.randint(1, 9, (100,))
        >>> evaluate_text(LanguageModel(config), text, 0, num_samples=4, lines=False)
        Scores(split='valid', 51 members, K=4, 100 targets in 3 examples)
    """
    asked = default_samples(split, carry) if num_samples is None else num_samples
    plan, adaptive = requested_samples(asked, seed, masks, blocks, mask_share, beaten_by)
    request = Request(
        Grid() if grid is None else grid,
        plan,
        split,
        temperatures=temperatures,
        stream=StreamSettings(window, stripes, carry, lifetime),
        adaptive=adaptive,
        dynamic=dynamic,
    )
    group = SINGLE_PROCESS if ranks is None else current(ranks)
    execution = Execution(0, memory, resume, progress, group)
    return run_text(model, tokens, eos, request, execution, lines=lines, training=training)


def evaluate_samples(
    samples: Any,
    targets: Any,
    *,
    grid: Grid | None = None,
    split: str = "valid",
    groups: int | None = None,
    shared: bool = True,
    examples: Any = None,
    names: Sequence[str] | None = None,
    single: int | None = None,
    ignore_index: int = -100,
    likelihood: str = "categorical",
    temperatures: tuple[float, float] | None = None,
    memory: int | None = None,
    progress: bool = False,
) -> Scores:
    """Evaluates every power mean of samples that were computed elsewhere.

    Samples are predictions of the members of an ensemble, of checkpoints, adapters, augmented
    inputs, or of masks. They have no multiplier: members of the family have multiplier 1, and the
    deterministic one is the best sample alone. The bound of each is the mean log-likelihood of the
    samples. The error from the samples (`Estimate.mc_error`) is a jackknife: it says how much other
    samples of the same kind, such as models trained from other seeds, would change the result.

    Args:
        samples: Log-probabilities or logits: an array [K, B, ..., V] (NumPy, torch, or a .npy or
            .safetensors file, which is read a few examples at a time), a list of [B, ..., V], one
            array or file per sample, or an iterable of batches [K, b, ..., V].
        targets: Class numbers [B] or [B, ...], or what the likelihood needs: an array, a file, or
            an iterable of batches.
        grid: The alphas, and where temperatures act; its multipliers do not count.
        split: Name of the data; scores of "test" are refused by `select`.
        groups: Groups of consecutive samples of which the jackknife leaves out one at a time; by
            default each sample for up to 12 of them, and 12 groups for more.
        shared: Whether all examples have the same samples, as from the models of an ensemble;
            False if each example has its own, as with masks.
        examples: [B] number of the cluster of each, if they are not independent of each other.
        names: Of the samples, for what is printed.
        single: Number of the sample that is compared with, alone; by default the best one on these
            data. For other data than those that choose, `choice.ensemble.ensemble.best`.
        ignore_index: Targets with this value do not count.
        likelihood: The kind of targets, as for `evaluate`. Samples of "binary" and "multilabel" are
            logits [K, N, ...] in the shape of the targets, of "gaussian" means and variances
            [K, N, ..., 2], and of "squared_error" means [K, N, ...].
        temperatures: Lowest and highest temperature; by default chosen from the first examples.
        memory: Bytes to use; by default 256 MiB.
        progress: Whether to show a progress bar.

    Returns:
        Scores, for `select` and everything else.

    Raises:
        DataError: For samples that cannot be evaluated, with the remedy.

    Example:
        >>> import numpy as np
        >>> logits = np.random.default_rng(0).normal(size=(5, 20, 3))
        >>> evaluate_samples(logits, np.arange(20) % 3)
        Scores(split='valid', 6 members, K=5, 20 targets in 20 examples)
    """
    name = likelihood_name(likelihood)
    if name not in LIKELIHOODS:
        raise DataError(
            f"likelihood={name!r} is your own, and stored samples do not say what its model "
            f"returned; give one of {', '.join(LIKELIHOODS)}, or the models to evaluate"
        )
    with ScratchFile() as scratch, naming_files(samples, targets):
        found = read_targets(targets)
        if found.dim() == 0 or not len(found):
            raise DataError(
                f"targets of shape {tuple(found.shape)}; give class numbers [B] or more"
            )
        columns = open_samples(samples, found, scratch, last_dimensions(name))
        count = columns[0].num_samples
        if count < 2:
            raise DataError(
                f"samples has {count} sample, whose means of all powers are the same; give at "
                "least 2, stacked along the first dimension"
            )
        called = tuple(names or (f"sample {number}" for number in range(count)))
        if len(called) != count:
            raise DataError(f"names has {len(called)} entries for {count} samples")
        if single is not None and single not in range(count):
            raise DataError(f"single={single} must be the number of a sample, 0 to {count - 1}")
        if groups is not None and groups < 2:
            raise DataError(f"groups={groups} must be from 2 to the {count} samples")
        plan = Plan(count, 0, "given", groups or min(count, MOST_GROUPS))
        request = Request(
            given_grid(grid),
            plan,
            split,
            ignore_index=ignore_index,
            temperatures=temperatures,
            likelihood=name,
        )
        clusters = None if examples is None else torch.as_tensor(examples)
        if clusters is not None and clusters.shape != found.shape[:1]:
            raise DataError(
                f"examples of shape {tuple(clusters.shape)} must have one number for each of the "
                f"{len(found)} examples"
            )
        given = GivenSamples(
            columns, None, found, called, shared=shared, examples=clusters, single=single
        )
        budget = Memory.of(torch.device("cpu"), memory)
        return score_samples(given, request, build_likelihood(request), budget, progress=progress)
