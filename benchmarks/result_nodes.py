"""Accuracy of temperatures from nodes: compared with exact partitions, on a CPU and as in kernels.

    python benchmarks/result_nodes.py --data DIR --out RUN [--targets 420]

On the first validation tokens of a trained language model, without dropout, in float64, prints the
error of G between the nodes (`family.temperature`), for one target and for the mean over targets,
in bands of temperature; and the error at the nodes if they come from powers by repeated squaring
(`family.partition_ladder`), as in the kernels.
"""

import argparse
import itertools
from pathlib import Path

import torch
from torch import Tensor

from afterdrop import train
from afterdrop.data import load_text
from afterdrop.family.partition_ladder import PartitionLadder
from afterdrop.family.temperature import Nodes
from afterdrop.models import LanguageModel

NODES = Nodes(0.125, 8.0)
BANDS = (0.0625, 0.125, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0)


def partition(log_probs: Tensor, inverse: Tensor) -> Tensor:
    """G [J, N], exact."""
    below = log_probs - log_probs.amax(-1, keepdim=True)
    return torch.stack([(b * below).logsumexp(-1) for b in inverse])


def row(name: str, error: Tensor) -> str:
    """Of errors [J, N]: of one target, and of their mean."""
    largest, mean = error.abs().max(), error.mean(1).abs().max()
    return f"| {name} | {error.pow(2).mean().sqrt():.1e} | {largest:.1e} | {mean:.1e} |"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the run folder")
    parser.add_argument("--targets", type=int, default=420)
    options = parser.parse_args()
    model, config, _ = train.load_model(options.out, device="cpu")
    assert isinstance(model, LanguageModel)
    tokens = load_text(config.data.name, options.data).split("valid")[: options.targets].long()
    logits, _ = model(tokens.unsqueeze(0), None)
    log_probs = logits[0].double().log_softmax(-1)
    at_nodes = partition(log_probs, NODES.inverse())
    print(f"{len(tokens)} targets, {log_probs.shape[-1]} classes\n")
    print("| T | rms | largest | mean over targets |\n|---|---|---|---|")
    for low, high in itertools.pairwise(BANDS):
        inverse = torch.linspace(1 / high, 1 / low, 13, dtype=torch.float64)
        error = NODES.weights(inverse) @ at_nodes - partition(log_probs, inverse)
        print(row(f"{low:g} to {high:g}", error), flush=True)
    ladder = PartitionLadder(NODES)
    error = ladder.fine @ partition(log_probs, ladder.inverse) - at_nodes
    print(row("the nodes themselves, from the ladder", error))


if __name__ == "__main__":
    main()
