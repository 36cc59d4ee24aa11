"""What dropout before the last layer of a large network costs: its body runs once per batch.

The network has the size of ResNet-50 (bottleneck blocks, 3-4-6-3) and drops its pooled features.
Baselines, alternated with what is measured, the least of several repeats of each:

    evaluate    one evaluation of the same batches with the deterministic member alone
    Predictor   model.eval() with a log-softmax

Goals: the default grid with K = 100 within 2 times one deterministic evaluation, a predictor with
K = 100 within 1.2 times model.eval().

    python benchmarks/bench_prefix.py [--device cpu] [--size 128] [--classes 10] [--repeats 3]
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import afterdrop as ad


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv(inside, width, 1, 1),
            nn.ReLU(inplace=True),
            *_conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv(width, 4 * width, 1, 1),
        )
        changes = stride > 1 or inside != 4 * width
        self.skip = nn.Sequential(*_conv(inside, 4 * width, 1, stride) if changes else [])

    def forward(self, x: Tensor) -> Tensor:
        """Adds the block's input to its output."""
        return (self.body(x) + self.skip(x)).relu_()


def _conv(inside: int, outside: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outside)]


def network(classes: int, rate: float = 0.5) -> nn.Module:
    """25.6 million parameters with 1,000 classes, as ResNet-50 has."""
    torch.manual_seed(0)
    layers = [*_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inside, width, stride if number == 0 else 1))
            inside = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(rate), nn.Linear(inside, classes)]
    return nn.Sequential(*layers).eval()


def least(runs: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """The least seconds of each run (of the processor's time on a CPU); the runs take turns."""
    best = dict.fromkeys(runs, float("inf"))
    # On a shared machine, the time that other programs take does not count.
    clock = time.process_time if device == "cpu" else time.perf_counter
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            begun = clock()
            run()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if repeat:  # the first is a warm-up
                best[name] = min(best[name], clock() - begun)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=128, help="pixels on a side")
    parser.add_argument("--classes", type=int, nargs="+", default=[10])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--each", action="store_true", help="also time all modules in each pass")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.device}, K = 100")
    print(f"{'network':<16}{'what':<26}{'baseline':>12}{'afterdrop':>12}{'ratio':>8}")
    for classes in args.classes:
        measure(args, classes)


@torch.no_grad()
def measure(args: argparse.Namespace, classes: int) -> None:
    model = network(classes).to(args.device)
    shape = (args.batch, 3, args.size, args.size)
    data = [
        (torch.randn(shape, device=args.device), torch.randint(classes, (args.batch,)))
        for _ in range(args.batches)
    ]
    predict = ad.Predictor(model, ad.Member(1, 0.8), num_samples=100)
    x, name = data[0][0], f"{classes} classes"
    options = {"temperatures": (0.5, 2.0)}
    runs: dict[str, Callable[[], object]] = {
        "one": lambda: ad.evaluate(model, data, grid=ad.Grid((1,), (0,)), **options),
        "grid": lambda: ad.evaluate(model, data, num_samples=100, **options),
        "eval": lambda: model(x).log_softmax(-1),
        "predict": lambda: predict(x),
    }
    if args.each:
        every = {"num_samples": 100, "compute_once": False}
        runs["each"] = lambda: ad.evaluate(model, data, **every, **options)
    found = least(runs, args.repeats, args.device)
    for what, baseline, measured in (
        ("evaluate, whole grid", "one", "grid"),
        (f"Predictor, batch {args.batch}", "eval", "predict"),
        ("evaluate, compute_once=False", "one", "each"),
    ):
        if measured in found:
            a, b = found[baseline], found[measured]
            print(f"{name:<16}{what:<26}{a:>10.3f} s{b:>10.3f} s{b / a:>8.2f}")


if __name__ == "__main__":
    main()
