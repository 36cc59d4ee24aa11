"""Evaluating every member of the family on data: `evaluate` for any module, `evaluate_text`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.request import (
    Carry,
    Lifetime,
    Request,
    StreamSettings,
    recorded_place,
)
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.family.member import Grid
from afterdrop.masks.model_call import LogitsPlace
from afterdrop.masks.model_guard import Reset
from afterdrop.masks.uniforms import Plan, Scheme
from afterdrop.models import LanguageModel
from afterdrop.ranks import SINGLE_PROCESS, Splitting, current


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    grid: Grid | None = None,
    num_samples: int = 100,
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
    temperatures: tuple[float, float] | None = None,
    first_example: int = 0,
    memory: int | None = None,
    resume: str | Path | None = None,
    progress: bool = False,
    ranks: Splitting | None = None,
    reset: Reset | None = None,
) -> Scores:
    """Evaluates every member of the extended dropout family on data.

    The model is left as it was: modes, rates, statistics and weights. Masks depend on the seed and
    on the position of an example in the data, not on how the data are batched.

    Args:
        model: Any module that contains dropout; stays on its device.
        batches: Pairs (inputs, targets). Inputs are a tensor, a tuple of positional or a dict of
            keyword inputs; targets are class numbers [B] or [B, ...]. The model returns logits
            [B, ..., V] as a tensor, in a tuple, or as `.logits`.
        grid: The members; by default 5 alphas × 11 multipliers, each at every temperature.
        num_samples: Number of mask samples K, even.
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
        temperatures: Lowest and highest temperature; by default chosen from the first batch.
        first_example: Number of the first example, for data evaluated in parts (`Scores.merge`).
        memory: Bytes for accumulators and activations; by default 256 MiB on a CPU and 40 % of
            the free memory of a GPU.
        resume: A folder for finished parts: an interrupted evaluation resumes from there and ends
            with the same bytes. Removed when done.
        progress: Whether to show a progress bar.
        ranks: "split" shares the batches over the ranks of the caller's process group: every rank
            makes this call with the same model and all batches, and gets the same Scores.
        reset: Called with the model before each forward pass, to forget state that it keeps
            between calls (a recurrent state in an attribute, for example).

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
    request = Request(
        Grid() if grid is None else grid,
        Plan(num_samples, seed, masks, blocks),
        split,
        tuple(rates) if not isinstance(rates, str) else (rates,),
        tuple(noise) if not isinstance(noise, str) else (noise,),
        batch_dim,
        class_dim,
        ignore_index,
        temperatures,
        logits=recorded_place(logits),
    )
    group = SINGLE_PROCESS if ranks is None else current(ranks)
    execution = Execution(first_example, memory, resume, progress, group, reset=reset)
    return run_evaluation(model, batches, request, execution, logits=logits)


def evaluate_text(
    model: LanguageModel,
    tokens: Tensor,
    eos: int,
    *,
    grid: Grid | None = None,
    num_samples: int = 100,
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
) -> Scores:
    """Evaluates every member of the extended dropout family on a text.

    The text is read in windows, each starting from a carried state. Arguments that are not
    described here are those of `evaluate`.

    Args:
        model: The language model; stays on its device.
        tokens: [N] the text.
        eos: The token before the first.
        grid: The members.
        num_samples: Number of mask samples K, even.
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
    request = Request(
        Grid() if grid is None else grid,
        Plan(num_samples, seed, masks, blocks),
        split,
        temperatures=temperatures,
        stream=StreamSettings(window, stripes, carry, lifetime),
    )
    group = SINGLE_PROCESS if ranks is None else current(ranks)
    execution = Execution(0, memory, resume, progress, group)
    return run_text(model, tokens, eos, request, execution, lines=lines)
