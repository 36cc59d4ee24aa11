"""Samples that `Predictor(tolerance=)` saves, on digits and on words.

    python benchmarks/result_tolerance.py [--samples 100]

Two small classifiers are trained: on the built-in digits, and of the next word given four words of
the built-in text. For each tolerance, the script prints the mean number of samples per input, the
XE, its difference to the predictor that runs all samples with the same masks, and the root mean
square difference of the inputs' log-probabilities of their targets.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.data import load_images, load_text

MEMBERS = (ad.GMC, ad.AMC)
TOLERANCES = (0.2, 0.1, 0.05, 0.02, 1e-9)
Data = tuple[Tensor, Tensor]


def trained(model: nn.Module, data: Data, steps: int) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (128,), generator=generator)
        optimiser.zero_grad()
        F.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
        optimiser.step()
    return model.eval()


def digits() -> tuple[nn.Module, Data]:
    found = load_images("builtin:digits")
    train, valid = ((part.images.flatten(1), part.labels) for part in (found.train, found.valid))
    layers = [nn.Dropout(0.2), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.5)]
    layers += [nn.Linear(48, 48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 10)]
    return trained(nn.Sequential(*layers), train, 600), valid


def words() -> tuple[nn.Module, Data]:
    text = load_text("builtin:pydoc")
    size = len(text.vocabulary)
    layers = [nn.Embedding(size, 32), nn.Dropout(0.3), nn.Flatten(), nn.Linear(128, 128)]
    layers += [nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, size)]
    valid = contexts(text.valid)
    part = torch.arange(0, len(valid[0]), max(1, len(valid[0]) // 400))
    return trained(nn.Sequential(*layers), contexts(text.train), 600), (
        valid[0][part],
        valid[1][part],
    )


def contexts(tokens: Tensor, length: int = 4) -> Data:
    """All runs of a few words, and the word after each."""
    tokens = tokens.long()
    return tokens[:-1].unfold(0, length, 1).contiguous(), tokens[length:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100)
    k = parser.parse_args().samples
    print("| model | inputs | member | tolerance | samples per input | XE | difference | rms |")
    print("|---|---|---|---|---|---|---|---|")
    for name, make in (("digits", digits), ("words", words)):
        torch.manual_seed(0)
        model, (x, y) = make()
        for member in MEMBERS:
            measure(name, model, member, x, y, k)


def measure(name: str, model: nn.Module, member: ad.Member, x: Tensor, y: Tensor, k: int) -> None:
    rows: list[int] = []
    found: dict[float, tuple[float, Tensor]] = {}
    for tolerance in TOLERANCES:
        predict = ad.Predictor(model, member, k, tolerance=tolerance)
        predict(x[:8])
        hook = model[-1].register_forward_hook(lambda module, args, out: rows.append(len(out)))
        rows.clear()
        own = predict(x).gather(-1, y[:, None]).squeeze(-1)
        hook.remove()
        found[tolerance] = sum(rows) / len(x), own
    whole = found[TOLERANCES[-1]][1]
    for tolerance, (spent, own) in found.items():
        shown = "all samples" if tolerance < 1e-6 else f"{tolerance:g}"
        rms = (own - whole).square().mean().sqrt()
        print(
            f"| {name} | {len(x)} | {member} | {shown} | {spent:.1f} | {-own.mean():.4f} "
            f"| {whole.mean() - own.mean():+.4f} | {rms:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
