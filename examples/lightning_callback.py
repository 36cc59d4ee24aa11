"""
Choose a member in Lightning
============================

Train a classifier of 8x8 digits with Lightning, and choose how it predicts when training ends.

::

    python examples/lightning_callback.py --out runs/lightning

Takes under a minute on a CPU. The callback logs the cross entropy at the best temperature after
each epoch, which early stopping and the checkpoint monitor here. After training it evaluates the
family on the best checkpoint and saves the choice beside it.
"""

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import afterdrop as ad
from afterdrop.data import load_images
from afterdrop.integrations.lightning import AfterdropCallback
from afterdrop.models import Classifier, ClassifierConfig

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Digits(pl.LightningModule):
    """A classifier with dropout; `forward` returns logits."""

    def __init__(self) -> None:
        super().__init__()
        config = ClassifierConfig(input_size=64, classes=10, hidden_sizes=(128, 128))
        self.net = Classifier(config)

    def forward(self, images: Tensor) -> Any:
        """Logits."""
        return self.net(images)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        """Logs the loss at T = 1, for comparison."""
        self.log("valid_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose a member in Lightning.")
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"), help="folder to write")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--num-samples", type=int, default=20, help="number of mask samples K")
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    digits = load_images("builtin:digits")
    train = TensorDataset(digits.train.images[:200], digits.train.labels[:200])
    valid = TensorDataset(digits.valid.images, digits.valid.labels)

    checkpoint = ModelCheckpoint(options.out, monitor="afterdrop_xe")
    stop = EarlyStopping("afterdrop_xe", patience=5)
    choose = AfterdropCallback(num_samples=options.num_samples)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        logger=False,
        callbacks=[checkpoint, stop, choose],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(train, 20, shuffle=True), DataLoader(valid, 100))
    metrics = trainer.callback_metrics
    print(
        f"After epoch {trainer.current_epoch}: valid loss {metrics['valid_loss']:.4f} at T = 1, "
        f"{metrics['afterdrop_xe']:.4f} at T = {metrics['afterdrop_temperature']:.2f}"
    )

    choice = ad.Choice.load(options.out)  # lies beside the best checkpoint
    print(choice)
    model = Digits.load_from_checkpoint(checkpoint.best_model_path).eval()
    predict = choice.predictor(model)
    log_probs = predict(digits.test.images)
    plain = F.cross_entropy(model(digits.test.images), digits.test.labels)
    chosen = F.nll_loss(log_probs, digits.test.labels)
    print(f"\nOn test data: {plain:.4f} nats in eval mode, {chosen:.4f} with the choice.")


if __name__ == "__main__":
    main()
