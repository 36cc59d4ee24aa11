"""How long a block of text must be: the error of XE by the length of the blocks it is made from.

    python benchmarks/result_error_clusters.py --data DIR --out RUN [--split valid]

Evaluates a trained language model deterministically over 32 stripes. Prints errors of the mean XE
at T = 1, and of the paired difference from a higher temperature, from the spread between blocks of
a given number of tokens. If the error grows with the length, shorter blocks are not independent.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from afterdrop import train
from afterdrop.data import load_text
from afterdrop.evaluation.error_clusters import TEXT_BLOCKS
from afterdrop.models import LanguageModel

STRIPES = 32
WINDOW = 70
LENGTHS = (1, 5, 35, 70, 140, 350, 700, 1400, 2800)


def error(values: Tensor, length: int) -> float:
    """Standard error of the mean, from blocks of `length` values."""
    runs = values[: len(values) // length * length].view(-1, length).mean(1)
    return runs.std().item() / math.sqrt(len(runs))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the run folder")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--temperature", type=float, default=1.13)
    options = parser.parse_args()
    model, config, _ = train.load_model(options.out, device="cpu")
    assert isinstance(model, LanguageModel)
    text = load_text(config.data.name, options.data)
    tokens = text.split(options.split).long()
    tokens = tokens[: len(tokens) // STRIPES * STRIPES]
    before = torch.cat([torch.tensor([text.vocabulary.eos_id]), tokens[:-1]])
    inputs, targets = (t.view(STRIPES, -1) for t in (before, tokens))
    state, plain, tempered = None, [], []
    for start in range(0, inputs.shape[1], WINDOW):
        part = slice(start, start + WINDOW)
        logits, state = model(inputs[:, part], state)
        own = targets[:, part].unsqueeze(-1)
        plain.append(-logits.log_softmax(-1).gather(-1, own).squeeze(-1))
        warm = (logits / options.temperature).log_softmax(-1)
        tempered.append(-warm.gather(-1, own).squeeze(-1))
    xe = torch.cat(plain, 1).flatten().double()
    difference = torch.cat(tempered, 1).flatten().double() - xe
    print(
        f"{options.split}: {len(xe)} targets, XE {xe.mean():.4f}, at T = {options.temperature:g} "
        f"{difference.mean():+.4f}; {TEXT_BLOCKS} blocks have {len(xe) // TEXT_BLOCKS} tokens\n"
    )
    print("| tokens per block | blocks | error of XE | of the difference |\n|---|---|---|---|")
    for length in LENGTHS:
        errors = error(xe, length), error(difference, length)
        print(f"| {length} | {len(xe) // length} | {errors[0]:.4f} | {errors[1]:.5f} |")


if __name__ == "__main__":
    main()
