"""
LoRA adapters
=============

A small vision transformer learns clean 8x8 digits. Three LoRA adapters with dropout are then
trained on a few noisy images each. Dropout is in the adapters alone, so that is where the family
lives: it is evaluated for one adapter, and for the ensemble of the three, each with dropout off.
Less than a minute on two cores.

::

    pip install 'afterdrop[transformers]' peft
    python examples/lora.py
"""

import argparse
import time

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import afterdrop as ad
from afterdrop.data import batches, load_images

SEEDS = (0, 1, 2)


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, lr: float) -> None:
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.Adam(learned, lr=lr)
    model.train()
    for epoch in range(epochs):
        for inputs, targets in batches(images, labels, 50, seed=epoch):
            loss = F.cross_entropy(model(pixel_values=inputs).logits, targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


def transformer() -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label={n: str(n) for n in range(10)},
        )
    )


def adapted(
    base: ViTForImageClassification, images: Tensor, labels: Tensor, epochs: int
) -> PeftModel:
    """The model with one adapter per seed, each trained on 150 images of its own."""
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)
    model: PeftModel = get_peft_model(base, config, adapter_name="seed0")
    for seed in SEEDS:
        torch.manual_seed(seed)
        if seed:
            model.add_adapter(f"seed{seed}", config)
        model.set_adapter(f"seed{seed}")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        own = order[:150]
        train(model, images[own], labels[own], epochs, lr=3e-3)
    return model


def report(name: str, choice: ad.Choice, model: nn.Module, images: Tensor, labels: Tensor) -> None:
    found = F.nll_loss(choice.predictor(model)(images), labels).item()
    print(f"{name}: {choice.member}\n  {choice.headline()}\n  test cross entropy {found:.4f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose a member for LoRA adapters.")
    parser.add_argument("--epochs", type=int, default=12, help="of the model itself")
    parser.add_argument("--adapter-epochs", type=int, default=30)
    parser.add_argument("--num-samples", type=int, default=20)
    options = parser.parse_args()
    start = time.time()
    torch.manual_seed(0)
    digits = load_images("builtin:digits")
    parts = [part.images.unsqueeze(1) for part in (digits.train, digits.valid, digits.test)]
    base = transformer()
    train(base, parts[0], digits.train.labels, options.epochs, lr=2e-3)
    noisy, valid_images, test_images = (part + 0.4 * torch.randn(part.shape) for part in parts)
    labels = digits.test.labels
    with torch.no_grad():
        before = F.cross_entropy(base(pixel_values=test_images).logits, labels).item()
    print(f"Test cross entropy on noisy images without an adapter: {before:.4f}\n")

    model = adapted(base, noisy, digits.train.labels, options.adapter_epochs)
    batch = [
        {"pixel_values": x, "labels": y} for x, y in batches(valid_images, digits.valid.labels, 100)
    ]
    model.set_adapter("seed0")
    print(ad.find_sites(model, pixel_values=valid_images[:4]), end="\n\n")
    grid = ad.Grid(alphas=(0, 0.5, 1), multipliers=(0, 0.5, 1))
    one = ad.evaluate(model, batch, grid=grid, num_samples=options.num_samples)
    report("One adapter", ad.select(one), model, test_images, labels)

    names = [f"seed{seed}" for seed in SEEDS]
    several = ad.evaluate(model, batch, adapters=names)
    report("Three adapters", ad.select(several), model, test_images, labels)
    print(f"Took {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
