"""What is computed for the digests: scores, choices, predictions and weights, for fixed seeds.

Each case gives a digest of numbers that a user can ask for, not of how they are stored, so that
digests survive any change of the code that does not change a number. With scores it also gives
means of their estimates.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import afterdrop as ad
from afterdrop import recipes, train
from afterdrop.evaluation import StreamSettings
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.train.checkpoint import read_checkpoint


def digest(values: Iterable[Any]) -> str:
    """A hash of tensors and numbers, to the bit."""
    total = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, Tensor):
            total.update(f"{tuple(value.shape)} {value.dtype}".encode())
            total.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        else:
            total.update(repr(value).encode())
    return total.hexdigest()


Found = tuple[str, dict[str, float]]  # a digest, and estimates by name
Case = Callable[[], Found]


def found_in(scores: ad.Scores, extra: Iterable[Any] = ()) -> Found:
    """The digest of scores and of other values, and their estimates."""
    return digest([*numbers_of(scores), *extra]), means_of(scores)


def means_of(scores: ad.Scores) -> dict[str, float]:
    """Means over the members that have them."""
    found: dict[str, list[float]] = {}
    for member in scores.members:
        xe, bounds = scores.xe(member), scores.bounds(member)
        named = {"xe": xe.value, "mask error": xe.mc_error, "data error": xe.data_error}
        named["tuned xe"] = scores.xe(scores.fit(member).member).value
        for name in ("objective", "bound", "jensen_gap", "normaliser_gap"):
            named[name] = getattr(bounds, name)
        for name, value in named.items():
            if math.isfinite(value):  # with one sample there is no mask error
                found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def numbers_of(scores: ad.Scores) -> Iterable[Any]:
    """Everything that Scores say of their members."""
    for member in scores.members:
        values = scores.values(member)
        yield from (values.whole, values.halves, scores.correct(member))
        fit = scores.fit(member)
        fewer = scores.fit(member, max(1, scores.num_samples // 2))
        for at in (member, fit.member, fewer.member):
            yield from (at.temperature, fit.at_edge, fewer.at_edge)
            yield from _estimates(scores, at)
        bounds = scores.bounds(member)
        yield from (bounds.objective, bounds.bound, bounds.jensen_gap, bounds.normaliser_gap)
        yield from (bounds.variance, bounds.jensen_approximation, bounds.normaliser_approximation)
        yield from (bounds.jensen_lower, bounds.jensen_upper, bounds.mean_probability)
        for k, point in scores.curve(member):
            yield from (k, point.value, point.data_error)


def _estimates(scores: ad.Scores, member: ad.Member) -> Iterable[float]:
    for found in (scores.xe(member), scores.brier(member), scores.entropy(member)):
        yield from (found.value, found.mc_error, found.data_error, found.num_samples)
    ece: Any = scores.ece(member)
    yield float(getattr(ece, "value", ece))
    yield scores.accuracy(member).value
    if member.alpha == 1 and member.temperature == 1 and not member.deterministic:
        yield scores.mutual_information(member).value


def numbers_of_choice(scores: ad.Scores, **options: Any) -> Iterable[Any]:
    """Everything that a selection says, but its words."""
    choice = ad.select(scores, resamples=40, **options)
    yield from (repr(choice.member), choice.gain.value, choice.gain.error, choice.num_samples)
    yield math.nan if choice.crossfit is None else choice.crossfit.value
    for candidate in choice.ranking:
        yield from (repr(candidate.member), candidate.xe, candidate.difference.value)
        yield from (candidate.difference.error, candidate.tuned, candidate.at_edge)
    for member, tuned, share in choice.recurrence:
        yield from (repr(member), tuned, share)


def perceptron(classes: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Dropout(0.2), nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, classes)
    )


def convolutional() -> nn.Module:
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.AlphaDropout(0.2),
        nn.Linear(6 * 25, 5),
    )
    return net.eval()


class Tagger(nn.Module):
    """A transformer that labels every position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class OwnMasks(nn.Module):
    """Draws a mask of its own, at a rate in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inside, self.outside, self.rate = nn.Linear(6, 16), nn.Linear(16, 3), 0.4

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x).relu()
        if self.training:
            x = x * torch.empty_like(x).bernoulli_(1 - self.rate) / (1 - self.rate)
        return self.outside(x)


def _batches(example: Tensor, classes: int, sizes: tuple[int, ...]) -> Any:
    generator = torch.Generator().manual_seed(5)
    found = []
    for size in sizes:
        inputs = example.expand(size, *example.shape).clone()
        if inputs.is_floating_point():
            inputs = inputs + torch.randn(inputs.shape, generator=generator)
            targets = torch.randint(classes, (size,), generator=generator)
        else:
            inputs = torch.randint(11, inputs.shape, generator=generator)
            targets = torch.randint(classes, inputs.shape, generator=generator)
            targets[0, :2] = -100
        found.append((inputs, targets))
    return found


VECTORS = _batches(torch.zeros(6), 4, (20, 20, 13))
THREE = _batches(torch.zeros(6), 3, (9,))
IMAGES = _batches(torch.zeros(2, 5, 5), 5, (12, 9))
TOKENS = _batches(torch.zeros(9, dtype=torch.int64), 7, (6, 5))


def classifier_cases() -> dict[str, Case]:
    """Scores, choices and predictions of classifiers."""
    sampled = ad.Grid((0, 0.5, 1), (0.5, 1), temper="sample")

    def scored(model: nn.Module, data: Any, **options: Any) -> Case:
        return lambda: found_in(ad.evaluate(model, data, **options))

    def chosen(model: nn.Module, data: Any, k: int | None, **options: Any) -> Case:
        def run() -> Found:
            scores = ad.evaluate(model, data, **options)
            return digest(numbers_of_choice(scores, num_samples=k)), {}

        return run

    def predicted(model: nn.Module, x: Tensor, *members: ad.Member, **o: Any) -> Case:
        return lambda: (digest(ad.Predictor(model, m, 12, 7, **o)(x) for m in members), {})

    some = ad.DET, ad.GMC, ad.Member(0.5, 0.7, 1.3), ad.Member(1, 0.4, 0.8, "sample")
    return {
        "perceptron, default grid": scored(perceptron(), VECTORS, num_samples=20),
        "perceptron, tempered samples": scored(perceptron(), VECTORS, num_samples=8, grid=sampled),
        "perceptron, independent masks": scored(
            perceptron(), VECTORS, num_samples=8, masks="iid", seed=3
        ),
        "perceptron, antithetic masks": scored(
            perceptron(), VECTORS, num_samples=8, masks="antithetic"
        ),
        "perceptron, one sample": scored(
            perceptron(), VECTORS, num_samples=1, grid=ad.Grid((1,), (0, 1))
        ),
        "convolutional, four blocks": scored(convolutional(), IMAGES, num_samples=16, blocks=4),
        "tagger, little memory": scored(Tagger(), TOKENS, num_samples=8, memory=2**20),
        "many classes": scored(perceptron(1100), VECTORS, num_samples=8, grid=sampled),
        "own masks": scored(OwnMasks(), THREE, num_samples=8, rates="rate"),
        "choice": chosen(perceptron(), VECTORS, None, num_samples=20),
        "choice for fewer samples": chosen(perceptron(), VECTORS, 6, num_samples=20),
        "choice of tempered samples": chosen(
            perceptron(), VECTORS, None, num_samples=8, grid=sampled
        ),
        "predictions of a perceptron": predicted(perceptron(), VECTORS[0][0], *some),
        "predictions of a tagger": predicted(
            Tagger(), TOKENS[0][0], *some, masks="iid", class_dim=-1
        ),
        "predictions of own masks": predicted(OwnMasks(), VECTORS[0][0], *some, rates="rate"),
    }


def language_model(**options: Any) -> LanguageModel:
    torch.manual_seed(6)
    defaults = {
        "vocabulary": 23,
        "hidden_sizes": (12, 12),
        "input_dropout": 0.3,
        "inter_layer_dropout": 0.2,
        "state_dropout": 0.4,
        "output_dropout": 0.5,
    }
    return LanguageModel(LanguageModelConfig(**{**defaults, **options})).eval()


TEXT = torch.randint(1, 23, (150,), generator=torch.Generator().manual_seed(8))


def language_cases() -> dict[str, Case]:
    """Scores and predictions of language models."""

    def scored(grid: ad.Grid, plan: Plan, stream: StreamSettings) -> Case:
        def run() -> Found:
            model = language_model()
            scores = ad.evaluate_text(
                model,
                TEXT,
                0,
                grid=grid,
                num_samples=plan.num_samples,
                seed=plan.seed,
                masks=plan.scheme,
                blocks=plan.blocks,
                lines=False,
                **dataclasses.asdict(stream),
            )
            means = [m for m in scores.members if m.alpha == 0 and not m.deterministic]
            integrated = [scores.integrated(m) for m in means]
            extra = [tensor for v in integrated for tensor in (v.whole, v.halves)]
            return found_in(scores, extra)

        return run

    def predicted(member: ad.Member, stream: StreamSettings) -> Case:
        def run() -> Found:
            predict = ad.StreamPredictor(language_model(), member, 8, 3, stream)
            found = [predict(TEXT[at : at + 10].view(2, 5)) for at in (0, 10, 20)]
            drawn = ad.StreamPredictor(language_model(), member, 4).sample(0, 12)
            return digest([*found, *drawn]), {}

        return run

    window, both = StreamSettings(window=7), ad.Grid((0, 0.5, 1), (0.5, 1), temper="sample")
    carried = StreamSettings(window=7, stripes=2, carry="sampled")
    kept = StreamSettings(window=10, stripes=3, lifetime="stream")
    return {
        "text, deterministic carry": scored(ad.Grid((0, 0.5, 1), (0.3, 1)), Plan(8), window),
        "text, sampled carry": scored(both, Plan(4, 2, "iid"), carried),
        "text, masks of the stream": scored(ad.Grid((0, 1), (1,)), Plan(8, blocks=4), kept),
        "predictions of a text": predicted(ad.Member(0.5, 0.8, 1.2), StreamSettings()),
        "predictions of a text, sampled carry": predicted(ad.Member(1, 1, 0.9, "sample"), carried),
        "predictions of a text, masks of the stream": predicted(ad.GMC, kept),
    }


def training_cases() -> dict[str, Case]:
    """Weights after 200 steps."""

    def trained(recipe: str, **changes: Any) -> Case:
        def run() -> Found:
            config = recipes.load(recipe).config
            config = config.override({k.replace("__", "."): v for k, v in changes.items()})
            with TemporaryDirectory() as folder:
                train.run(config, folder, progress=False, device="cpu")
                paths = [Path(folder, "checkpoint", f"{n}.safetensors") for n in ("best", "last")]
                saved = [read_checkpoint(path) for path in paths]
            groups = [saved[0].group("model"), saved[1].group("model"), saved[1].group("average")]
            return digest(group[name] for group in groups for name in sorted(group)), {}

        return run

    small = {"model__hidden_sizes": [24, 24], "objective__batch_size": 8, "objective__window": 12}
    schedule = {"schedule__intervals": 4, "schedule__steps_per_interval": 50}
    few = {"validation__max_targets": 300, "data__min_count": 60}
    return {
        "weights of a classifier": trained("digits-mlp", **schedule),
        "weights of a language model": trained("pydoc-small", **small, **schedule, **few),
        "weights of characters": trained(
            "pydoc-char-small", **small, **schedule, validation__max_targets=300
        ),
    }


def all_cases() -> dict[str, Case]:
    return {**classifier_cases(), **language_cases(), **training_cases()}
