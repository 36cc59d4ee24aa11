"""
A classifier of Hugging Face transformers
=========================================

A small vision transformer is trained from scratch on 8x8 digits by a `Trainer`. A callback logs the
cross entropy at the best temperature after each epoch and keeps the best checkpoint by it. When
training has ended, the callback evaluates the family, chooses, and writes the choice beside the
checkpoint, from where both are loaded for test data. Less than a minute on two cores.

::

    python examples/hugging_face.py --out runs/hugging-face
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import afterdrop as ad
from afterdrop.data import load_images
from afterdrop.integrations.transformers import add_callback


def examples(images: torch.Tensor, labels: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [
        {"pixel_values": image.view(1, 8, 8), "labels": label}
        for image, label in zip(images, labels)
    ]


def make_trainer(out: Path, epochs: int) -> Any:
    digits = load_images("builtin:digits")
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.1,
        id2label={n: str(n) for n in range(10)},
    )
    arguments = TrainingArguments(
        str(out),
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=100,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="tempered_loss",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    torch.manual_seed(0)
    return Trainer(
        ViTForImageClassification(config),
        arguments,
        train_dataset=examples(digits.train.images, digits.train.labels),
        eval_dataset=examples(digits.valid.images, digits.valid.labels),
    )


def picture(path: Path, history: list[dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, label in (("eval_loss", "T = 1"), ("eval_tempered_loss", "best T")):
        axes.plot(*zip(*[(e["epoch"], e[name]) for e in history if name in e]), label=label)
    axes.set(xlabel="epoch", ylabel="validation cross entropy, nats")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose a member for a model of transformers.")
    parser.add_argument("--out", type=Path, default=Path("runs/hugging-face"), help="folder")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--num-samples", type=int, default=20)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    trainer = make_trainer(options.out, options.epochs)
    callback = add_callback(trainer, num_samples=options.num_samples)
    trainer.train()
    print(callback.choice, end="\n\n")

    checkpoint = trainer.state.best_model_checkpoint
    model = ViTForImageClassification.from_pretrained(checkpoint)
    predict = ad.Choice.load(checkpoint).predictor(model)
    test = load_images("builtin:digits").test
    pixels = test.images.view(-1, 1, 8, 8)
    with torch.no_grad():
        plain = F.cross_entropy(model(pixel_values=pixels).logits, test.labels).item()
    chosen = F.nll_loss(predict(pixels), test.labels).item()
    print(f"Cross entropy on test data: {plain:.4f} deterministic at T = 1, {chosen:.4f} chosen.")
    try:
        picture(options.out / "losses.png", trainer.state.log_history)
    except ImportError:
        print("matplotlib is not installed: no picture")


if __name__ == "__main__":
    main()
