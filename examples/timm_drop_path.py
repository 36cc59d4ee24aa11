"""
Drop path of timm
=================

A vision transformer of timm with stochastic depth (`drop_path_rate`) is trained on 8x8 digits.
Whole residual branches are dropped then, and they are dropout sites like any other: the multiplier
scales their rates, and the family is chosen as for plain dropout.

::

    pip install timm
    python examples/timm_drop_path.py

timm needs torchvision, each build of which fits one build of torch only. afterdrop is developed
without it, so the documentation site does not run this example. With timm 1.0.31, torchvision
0.28.0 and torch 2.13.0 it printed:

.. code-block:: text

    site                 operator           rate  calls
    blocks.1.drop_path1  drop_path          0.15      1
    blocks.1.drop_path2  drop_path          0.15      1
    blocks.2.drop_path1  drop_path           0.3      1
    blocks.2.drop_path2  drop_path           0.3      1
    4 sites, 4 random operations per pass; samples: batched with the examples
    computed once per batch: patch_embed, pos_drop, patch_drop and 5 more

    XE in nats on valid, K = 20, each at its own optimal T
    multiplier           alpha=0       alpha=0.5         alpha=1
    0 (DET)        0.2633 (1.35)
    0.25           0.2638 (1.34)   0.2643 (1.33)   0.2659 (1.32)
    0.5            0.2629 (1.33)   0.2615 (1.30)   0.2611 (1.26)
    0.75           0.2624 (1.32)   0.2609 (1.28)   0.2621 (1.22)
    1              0.2615 (1.31)   0.2601 (1.25)   0.2631 (1.18)

    Chosen: power mean 0.5, dropout rates x1, T = 1.251
    Gained 0.0281 ± 0.0167 nats over deterministic evaluation at T = 1 (this ± ignores the
    selection; 0.0227 ± 0.0200 cross-fitted); temperature alone gives 88 % of it.
    Cross entropy on test data: 0.2633 deterministic at T = 1, 0.2520 chosen.
"""

import argparse
import time

import timm
import torch
import torch.nn.functional as F

import afterdrop as ad
from afterdrop.data import batches, load_images
from afterdrop.selection import family_table


def train(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for epoch in range(epochs):
        for inputs, targets in batches(images, labels, 50, seed=epoch):
            loss = F.cross_entropy(model(inputs), targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose a member for a model with drop path.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--num-samples", type=int, default=20)
    options = parser.parse_args()
    start = time.time()
    torch.manual_seed(0)
    digits = load_images("builtin:digits")
    train_images, valid_images, test_images = (
        part.images.unsqueeze(1) for part in (digits.train, digits.valid, digits.test)
    )
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=48,
        depth=3,
        num_heads=4,
        drop_path_rate=0.3,
    )
    train(model, train_images, digits.train.labels, options.epochs)
    print(ad.find_sites(model, valid_images[:4]), end="\n\n")

    grid = ad.Grid(alphas=(0, 0.5, 1), multipliers=(0, 0.25, 0.5, 0.75, 1))
    valid = batches(valid_images, digits.valid.labels, 100)
    scores = ad.evaluate(model, valid, grid=grid, num_samples=options.num_samples)
    print(family_table(scores, tuned=True), end="\n\n")
    choice = ad.select(scores)
    print(f"Chosen: {choice.member}\n{choice.headline()}")

    predict = choice.predictor(model)
    with torch.no_grad():
        plain = F.cross_entropy(model(test_images), digits.test.labels).item()
    chosen = F.nll_loss(predict(test_images), digits.test.labels).item()
    print(f"Cross entropy on test data: {plain:.4f} deterministic at T = 1, {chosen:.4f} chosen.")
    print(f"Took {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
