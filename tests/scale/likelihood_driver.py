"""Runs in each of two ranks that torchrun starts: Scores of every likelihood.

torchrun --nproc-per-node 2 likelihood_driver.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import afterdrop as ad

KINDS = ("binary", "multilabel", "gaussian", "squared_error")


class Pair(nn.Module):
    """A network that returns means and variances."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        mean, raw = self.net(x).unbind(-1)
        return mean, nn.functional.softplus(raw) + 0.05


def evaluated(kind: str, cut: int | None = None, **options) -> ad.Scores:
    """Scores of a tiny model on five batches; interrupted after `cut` of them."""
    torch.manual_seed(0)
    outputs = {"multilabel": 3, "gaussian": 2}.get(kind, 1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, outputs))
    batches = []
    for size in (6, 6, 3, 6, 5):
        x = torch.randn(size, 4)
        y = x[:, :3] if kind == "multilabel" else x.sum(-1)
        batches.append((x, (y > 0) if kind in ("binary", "multilabel") else y))

    def given():
        for number, batch in enumerate(batches):
            if number == cut:
                raise KeyboardInterrupt
            yield batch

    model = Pair(net) if kind == "gaussian" else net
    grid = ad.Grid((0, 0.5, 1), (0, 0.5, 1))
    return ad.evaluate(model, given(), grid=grid, num_samples=4, likelihood=kind, **options)


if __name__ == "__main__":
    folder, rank = Path(sys.argv[-1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in KINDS:
        scores = evaluated(kind, ranks="split", resume=folder / f"{kind}.parts")
        scores.save(folder / f"{kind}-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()
