"""The recipes of docs/integrations/recipes.md, on models that look like those of the packages."""

import pytest
import torch

import afterdrop as ad
from afterdrop.errors import SiteError
from oracles.lookalikes import (
    ArgumentMode,
    GraphAttention,
    ModeAdapter,
    Segmenter,
    SkipNet,
    VisionTransformer,
)

GRID = ad.Grid((0, 1), (0, 0.5, 1))


def images(size: int = 6):
    return [(torch.randn(size, 1, 8, 8), torch.randint(3, (size,))) for _ in range(2)]


def pixels(size: int = 4):
    return [(torch.randn(size, 1, 8, 8), torch.randint(3, (size, 8, 8))) for _ in range(2)]


def graph():
    x, edges = torch.randn(12, 4), torch.randint(12, (2, 30))
    targets = torch.randint(3, (12,)).where(torch.arange(12) % 2 == 0, torch.tensor(-100))
    return [((x, edges), targets)]


def pair(batch):
    return batch["image"], batch["label"].squeeze(1)


def volumes():
    return [{"image": x, "label": y.unsqueeze(1)} for x, y in pixels()]


CASES = {
    "timm": (VisionTransformer, images, {}, 9),
    "torchvision": (
        Segmenter,
        pixels,
        {"logits": "out", "class_dim": 1, "targets_per_example": 16},
        2,
    ),
    "PyG": (GraphAttention, graph, {}, 2),
    "MONAI": (SkipNet, volumes, {"collate": pair, "class_dim": 1, "targets_per_example": 16}, 2),
    "Keras": (
        lambda: ModeAdapter(ArgumentMode()),
        lambda: [(torch.randn(6, 4), torch.randint(3, (6,)))],
        {},
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_evaluates_selects_and_predicts(name):
    make, data, options, sites = CASES[name]
    model, batches = make().eval(), data()
    scores = ad.evaluate(model, batches, grid=GRID, num_samples=4, **options)
    choice = ad.select(scores)
    inputs = pair(batches[0])[0] if name == "MONAI" else batches[0][0]
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    found = choice.predictor(model)(*inputs)
    total = found.exp().sum(options.get("class_dim", -1))
    assert torch.allclose(total, torch.ones_like(total), atol=1e-5)
    assert len(ad.find_sites(model, *inputs, logits=options.get("logits"))) == sites


@pytest.mark.parametrize("name", CASES)
def test_the_dropout_of_a_recipe_is_that_of_the_model(name):
    make, data, options, _ = CASES[name]
    batches = [pair(batch) for batch in data()] if name == "MONAI" else data()
    places = {key: options[key] for key in ("logits", "class_dim") if key in options}
    found = ad.check(make(), batches, num_samples=50, **places)
    assert found.passed, str(found)


def test_a_mode_that_is_an_argument_needs_the_wrapper():
    with pytest.raises(SiteError, match=r"training=self\.training"):
        ad.find_sites(ArgumentMode(), torch.randn(4, 4))
