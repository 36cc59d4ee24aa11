"""An evaluation shared by ranks: which share each has, and joining the shares exactly.

Masks belong to examples and multipliers, not to processes, so any division gives the same numbers:

    batches       dealt out in turn to the ranks; results are put back in the order of the examples
    multipliers   where each batch needs the one before it (a sampled carry): every rank runs all
                  batches for a contiguous share of the multipliers

Results are only moved, never added: the Scores of N ranks hold the bits that the ranks computed.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from afterdrop.errors import DataError, RankError
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.schema import Results
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.member import Grid
from afterdrop.ranks import Ranks


def agree(protocol: Protocol, ranks: Ranks) -> Protocol:
    """The protocol of rank 0, if all ranks evaluate the same model with the same settings.

    Raises:
        ScoresError: If they do not; names the first difference.
    """
    first, *others = map(Protocol.from_json, ranks.gather(protocol.to_json()))
    for rank, other in enumerate(others, start=1):
        # The bracket comes from logits, whose last bits differ between devices: rank 0's counts.
        same = dataclasses.replace(other, low=first.low, high=first.high)
        first.require_same(same, f"the evaluations of rank 0 and rank {rank}")
    return first


def check_same_data(seen: str, ranks: Ranks) -> None:
    """Requires that every rank went through the same batches.

    Args:
        seen: A digest of what this rank went through.
        ranks: The processes that share the work.

    Raises:
        DataError: If they did not.
    """
    if ranks.count > 1 and len(set(ranks.gather(seen))) > 1:
        raise DataError(
            "the ranks were given different batches; give every rank all of the data in the same "
            "order (no DistributedSampler): evaluate itself shares the work"
        )


def gather_results(results: Results, ranks: Ranks) -> Results:
    """The results of all ranks in the order of the examples, on every rank.

    Example:
        >>> import torch
        >>> data = {"examples": torch.tensor([2, 2, 0, 1]), "targets": torch.tensor([5, 6, 7, 8])}
        >>> gather_results(schema.named("data", data), Ranks())["data.targets"]
        tensor([7, 8, 5, 6])
    """
    order: Tensor | None = None
    joined: Results = {}
    examples = schema.name_of("data", "examples")
    examples_first = sorted(results.items(), key=lambda item: item[0] != examples)
    for name, shares in ranks.gather_tensors(dict(examples_first)):
        whole = schema.join([{name: share} for share in shares], "N")[name]
        if name == examples and bool((whole[1:] < whole[:-1]).any()):
            order = whole.argsort(stable=True)  # targets of one example keep their order
        joined[name] = whole if order is None else schema.select_targets(name, whole, order)
    return joined


def split_multipliers(
    grid: Grid,
    ranks: Ranks,
    resume: str | Path | None,
    run: Callable[[Grid, Path | None], Scores],
) -> Scores:
    """Shares an evaluation over ranks by its multipliers.

    Args:
        grid: All members.
        ranks: The processes that share the work.
        resume: The folder for finished parts.
        run: Evaluates some members, with a folder for its own parts.

    Raises:
        RankError: If there are more ranks than multipliers.
    """
    most = max(1, len(grid.stochastic))
    if ranks.count > most:
        raise RankError(
            f"{ranks.count} ranks cannot share {len(grid.stochastic)} multipliers above 0: with "
            "carry='sampled' windows run in order, so ranks share the multipliers. Start at most "
            f"{most}, or use carry='deterministic', where they share windows."
        )
    mine = dataclasses.replace(grid, multipliers=grid.stochastic[ranks.share(most)])
    folder = None if resume is None else Path(resume)
    own = None if folder is None else folder / f"rank-{ranks.rank}-of-{ranks.count}"
    scores = run(mine, own)
    protocol = agree(scores.protocol.with_grid(grid), ranks)
    joined: Results = {}
    for name, shares in ranks.gather_tensors(scores.tensors):
        joined |= schema.join([{name: share} for share in shares], "M")
    return Scores(protocol, joined, parts=folder)
