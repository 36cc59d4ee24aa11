"""
Segmentation with a small U-Net
===============================

Segment generated shapes with a small U-Net, and choose how to predict its pixels afterwards.

::

    python examples/segmentation.py --out runs/segmentation

Takes under a minute on a CPU. The images hold a disc and a square on noise, which may overlap. The
U-Net has dropout at its bottom and before its output. The family is evaluated on some pixels of
each validation image (`targets_per_example`), with errors that cluster by image; the choice is
compared with eval mode on test images, and a picture shows where the predictor is uncertain.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.selection import Uncertainty, summary_table

SIZE, CLASSES = 32, 3


def shapes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [B, 1, 32, 32] and the class of each pixel: background, disc or square."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    place = torch.rand(4, count, 1, 1, generator=generator) * (SIZE - 12) + 6
    size = torch.rand(2, count, 1, 1, generator=generator) * 4 + 3
    disc = (x - place[0]) ** 2 + (y - place[1]) ** 2 < size[0] ** 2
    square = torch.maximum((x - place[2]).abs(), (y - place[3]).abs()) < size[1]
    labels = torch.zeros(count, SIZE, SIZE, dtype=torch.int64)
    labels[disc] = 1
    labels[square] = 2  # the square lies in front
    brightness = torch.tensor([0.0, 0.7, 1.0])[labels]
    images = brightness + 0.6 * torch.randn(count, SIZE, SIZE, generator=generator)
    return images[:, None], labels


class UNet(nn.Module):
    """Two scales, a skip connection, dropout of channels."""

    def __init__(self, channels: int = 16, rate: float = 0.3) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU())
        self.bottom = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 3, 2, padding=1),
            nn.ReLU(),
            nn.Dropout2d(rate),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
        )
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.out = nn.Sequential(
            nn.Conv2d(2 * channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Dropout2d(rate),
            nn.Conv2d(channels, CLASSES, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, 3, 32, 32]."""
        fine = self.down(images)
        return self.out(torch.cat([fine, self.up(self.bottom(fine))], 1))


def train(model: nn.Module, steps: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    images, labels = shapes(24, seed=0)  # few, as where labelling pixels is expensive
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        some = torch.randint(len(images), (16,), generator=order)
        loss = F.cross_entropy(model(images[some]), labels[some])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()


def image_mean(values: Tensor, where: Tensor) -> tuple[float, float]:
    """The mean over some pixels, and its standard error over images."""
    sums, counts = (
        (v * where).flatten(1).sum(1).double() for v in (values, torch.ones_like(values))
    )
    mean = sums.sum() / counts.sum()
    error = (sums - mean * counts).square().sum().sqrt() / counts.sum()
    return mean.item(), error.item()


def picture(path: Path, image: Tensor, labels: Tensor, found: Uncertainty) -> None:
    import matplotlib.pyplot as plt

    panels = {
        "image": image[0],
        "classes": labels,
        "prediction": found.log_probs[0].argmax(0),
        "entropy": found.predictive_entropy[0],
        "mutual information": found.mutual_information[0],
    }
    figure, row = plt.subplots(1, len(panels), figsize=(10, 2.6), layout="constrained")
    for axes, (title, values) in zip(row, panels.items()):
        axes.imshow(values.numpy(), cmap="viridis")
        axes.set_title(title)
        axes.set_axis_off()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Segment generated shapes.")
    parser.add_argument("--out", type=Path, default=Path("runs/segmentation"), help="run folder")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--num-samples", type=int, default=32, help="number of mask samples K")
    options = parser.parse_args()
    start, run = time.time(), ad.Run(options.out)
    torch.manual_seed(0)
    model = UNet()
    train(model, options.steps)

    settings = {"num_samples": options.num_samples, "class_dim": 1, "targets_per_example": 64}
    images, labels = shapes(64, seed=1)
    valid = list(zip(images.split(16), labels.split(16)))
    grid = ad.Grid((0.0, 0.5, 1.0), (0.0, 0.5, 1.0))
    scores = ad.evaluate(model, valid, grid=grid, progress=True, **settings)
    run.save_scores(scores)
    choice = ad.select(scores)
    run.save_choice(choice)
    print(choice, end="\n\n")

    images, labels = shapes(64, seed=2)
    test = list(zip(images.split(16), labels.split(16)))
    grid = ad.Grid((choice.member.alpha,), (0.0, choice.member.multiplier))
    final = ad.evaluate(
        model, test, grid=grid, split="test", temperatures=choice.temperatures, **settings
    )
    print("On pixels of test images, which were not used for the choice:")
    print(summary_table(final, [ad.DET, choice.member]))
    difference = final.difference(choice.member, ad.DET)
    print(
        f"Chosen minus eval mode: {difference.value:+.4f} ± {difference.error:.4f} nats per pixel"
    )

    predict = ad.Predictor(model, ad.AMC, options.num_samples, class_dim=1)
    found = predict.uncertainty(images)
    right = found.log_probs.argmax(1) == labels
    print(f"\nMutual information of the plain mean, over the pixels of {len(images)} test images:")
    for name, where in (("right", right), ("wrong", ~right)):
        mean, error = image_mean(found.mutual_information, where)
        print(
            f"  {name}: {mean:.4f} ± {error:.4f} nats  ({where.double().mean():.2%} of the pixels)"
        )
    try:
        picture(options.out / "uncertainty.png", images[0], labels[0], found)
    except ImportError:
        print("matplotlib is not installed: no picture")
    print(f"Wrote {options.out} in {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
