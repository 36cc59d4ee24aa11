"""Error of XE at equal K: corrected Latin hypercubes compared with independent masks, on digits.

An MLP with dropout is trained on the built-in digits. The reference is an evaluation with many
samples. For each scheme and K, the script measures the mean squared error of XE over seeds, raw
(the value at K as an estimate of the limit) and corrected. Its ratio to that of independent masks
without correction is the gain at equal cost.

    python benchmarks/bench_error.py [--seeds 20]
"""

import argparse
import math

import torch
import torch.nn.functional as F

import afterdrop as ad
from afterdrop.data import batches, load_images
from afterdrop.models import Classifier, ClassifierConfig

MEMBERS = (ad.Member(0.0, 1.0), ad.Member(0.5, 1.0), ad.Member(1.0, 1.0), ad.Member(1.0, 0.5))


def trained() -> tuple[Classifier, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    digits = load_images("builtin:digits")
    model = Classifier(ClassifierConfig(64, 10, (256, 256), input_dropout=0.2))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(60):
        for x, y in batches(digits.train.images, digits.train.labels, 100, seed=epoch):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model.eval(), list(batches(digits.valid.images, digits.valid.labels, 200))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--truth", type=int, default=20_000, help="samples of the reference")
    options = parser.parse_args()
    model, data = trained()
    grid = ad.Grid((0.0, 0.5, 1.0), (0.5, 1.0))
    exact = ad.evaluate(model, data, grid=grid, num_samples=options.truth, seed=10**6)
    truth = {m: exact.xe(m).corrected for m in MEMBERS}
    worst = max(exact.xe(m).mc_error for m in MEMBERS)
    print(f"{options.seeds} seeds; reference K = {options.truth}, its mask error <= {worst:.1e}")
    print(
        f"{'member':<44}{'K':>4}{'iid raw':>10}{'iid corr':>10}{'lhs raw':>10}{'lhs corr':>10}"
        f"{'MSE ratio':>11}"
    )
    for k in (8, 32, 100):
        errors: dict[tuple[ad.Member, str], list[float]] = {}
        for scheme in ("iid", "lhs"):
            for seed in range(options.seeds):
                scores = ad.evaluate(model, data, grid=grid, num_samples=k, seed=seed, masks=scheme)
                for member in MEMBERS:
                    xe = scores.xe(member)
                    errors.setdefault((member, f"{scheme} raw"), []).append(xe.value)
                    errors.setdefault((member, f"{scheme} corr"), []).append(xe.corrected)
        for member in MEMBERS:
            rms = {
                kind: math.sqrt(
                    sum((v - truth[member]) ** 2 for v in errors[member, kind]) / options.seeds
                )
                for kind in ("iid raw", "iid corr", "lhs raw", "lhs corr")
            }
            cells = "".join(f"{rms[kind]:>10.5f}" for kind in rms)
            ratio = (rms["iid raw"] / rms["lhs corr"]) ** 2
            print(f"{member!s:<44}{k:>4}{cells}{ratio:>11.1f}")
    print("Columns: root mean square error of XE in nats. MSE ratio: iid raw over lhs corrected.")


if __name__ == "__main__":
    main()
