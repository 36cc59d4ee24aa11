"""The calls of docs/coming_from.md: other libraries and afterdrop on one small network.

    pip install torch-uncertainty baal laplace-torch netcal
    python benchmarks/result_peers.py

Prints what each library finds beside what afterdrop finds. On a machine where torchvision and
torch are builds for different devices, `--without-torchvision-operators` declares the two operators
without which torchvision cannot be imported; none of the calls uses them.
"""

import importlib.metadata
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import afterdrop as ad

SAMPLES = 64
CENTRES = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))


class FunctionalDropout(nn.Module):
    """Dropout that is a call, not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 4]."""
        return self.out(F.dropout(x, 0.5, self.training))


def draw(count: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(4, (count,))
    return CENTRES[y] + 1.5 * torch.randn(count, 10), y


def trained(x: Tensor, y: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def xe(probs: Any, labels: Tensor) -> str:
    return f"{F.nll_loss(torch.as_tensor(probs).double().log(), labels).item():.4f}"


def torch_uncertainty(model: nn.Module, valid: Any, x: Tensor, y: Tensor) -> None:
    from torch_uncertainty.methods import mc_dropout
    from torch_uncertainty.post_processing import TemperatureScaler

    mean = mc_dropout(model, num_estimators=SAMPLES).eval()(x).reshape(SAMPLES, len(x), -1)
    ours = ad.Predictor(model, ad.AMC, num_samples=SAMPLES, per_example=True)
    print(f"dropout in training mode afterwards: {model[2].training}")  # type: ignore[index]
    model.eval()
    print(f"XE of the mean: {xe(mean.softmax(-1).mean(0), y)}, ours {xe(ours(x).exp(), y)}")
    scaler = TemperatureScaler(model)
    scaler.fit(valid, progress=False)
    found = ad.evaluate(model, valid, num_samples=2).fit(ad.DET).member
    print(f"T: {scaler.temperature[0].item():.3f}, ours {found.temperature:.3f}")
    try:
        mc_dropout(FunctionalDropout(), num_estimators=2)
    except ValueError as error:
        print(f"functional dropout: {error}")


def baal(model: nn.Module, x: Tensor, y: Tensor) -> None:
    from baal import ModelWrapper
    from baal.active.heuristics import BALD
    from baal.bayesian.dropout import MCDropoutModule
    from baal.modelwrapper import TrainingArgs

    with MCDropoutModule(model) as bayesian:
        wrapper = ModelWrapper(bayesian, TrainingArgs(use_cuda=False, batch_size=100))
        samples = wrapper.predict_on_dataset(TensorDataset(x, y), SAMPLES, verbose=False)
        theirs = torch.tensor(BALD().get_uncertainties(samples))
    predict = ad.Predictor(model, ad.AMC, num_samples=SAMPLES)
    ours = predict.uncertainty(x).mutual_information
    same = BALD().get_uncertainties(predict.samples(x).exp().permute(1, 2, 0).numpy())
    print(f"samples {samples.shape}; mean BALD {theirs.mean():.4f}, ours {ours.mean():.4f}")
    print(f"correlation {torch.corrcoef(torch.stack([theirs, ours]))[0, 1]:.3f}")
    print(f"BALD of our samples differs by at most {(ours - torch.tensor(same)).abs().max():.0e}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bayesian = MCDropoutModule(FunctionalDropout().eval())
        spread = (bayesian(x) - bayesian(x)).abs().max()
        print(f"functional dropout: {caught[0].message} Two passes differ by {spread:.1f}.")


def laplace(model: nn.Module, train: Any, x: Tensor, y: Tensor) -> None:
    from laplace import Laplace

    found = Laplace(model, "classification", subset_of_weights="last_layer")
    found.fit(train)
    found.optimize_prior_precision(method="marglik")
    print(f"XE {xe(found(x, link_approx='probit'), y)}")


def netcal(model: nn.Module, valid: Any, x: Tensor, y: Tensor) -> None:
    from netcal.metrics import ECE
    from netcal.scaling import TemperatureScaling

    inputs, labels = (torch.cat(parts) for parts in zip(*valid))
    with torch.no_grad():
        probs, test = model(inputs).softmax(-1).numpy(), model(x).softmax(-1).numpy()
    for kind in ("float32", "float64"):
        scaling = TemperatureScaling()
        scaling.fit(probs.astype(kind), labels.numpy())
        print(f"{kind}: 1 / T = {scaling.temperature[0]:.4f}")
    calibrated = scaling.transform(test.astype("float64"))
    scores = ad.evaluate(model, [(x, y)], num_samples=2)
    member = ad.evaluate(model, valid, num_samples=2).fit(ad.DET).member
    print(f"ours: 1 / T = {1 / member.temperature:.4f}")
    print(f"XE {xe(calibrated, y)}, ours {scores.xe(member).value:.4f}")
    print(f"ECE {ECE(15).measure(calibrated, y.numpy()):.4f}, ours {scores.ece(member).value:.4f}")


def main() -> None:
    if "--without-torchvision-operators" in sys.argv:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.manual_seed(0)
    x, y = draw(100)
    model = trained(x, y)
    train = DataLoader(TensorDataset(x, y), 50)
    valid = DataLoader(TensorDataset(*draw(500)), 100)
    test = draw(1000)
    version = importlib.metadata.version
    print(f"== torch-uncertainty {version('torch-uncertainty')}")
    torch_uncertainty(model, valid, *test)
    print(f"== baal {version('baal')}")
    baal(model, *test)
    print(f"== laplace-torch {version('laplace-torch')}")
    laplace(model, train, *test)
    print(f"== netcal {version('netcal')}")
    netcal(model, valid, *test)
    choice = ad.select(ad.evaluate(model, valid, num_samples=SAMPLES))
    print(f"== afterdrop {version('afterdrop')}\n{choice.headline()}")
    print(f"XE of the choice {xe(choice.predictor(model)(test[0]).exp(), test[1])}")


if __name__ == "__main__":
    main()
