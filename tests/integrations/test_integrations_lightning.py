"""The callback for Lightning: training is unchanged, and what it saves is what was evaluated."""

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.integrations.lightning import AfterdropCallback

pytestmark = pytest.mark.slow
GRID = ad.Grid((0, 1), (0, 0.5, 1))


class Module(pl.LightningModule):
    """A classifier whose validation step logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, _, dataloader_idx=0):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Bare(Module):
    """The same without a forward of its own."""

    forward = pl.LightningModule.forward

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _, dataloader_idx=0):
        return None


class Data(pl.LightningDataModule):
    """96 examples for training and 75 held out, in batches that do not divide them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(171, 4, generator=generator)
        noise = torch.randn(171, 3, generator=generator)
        y = (x[:, :3] + noise).argmax(-1)
        self.fitted, self.held_out = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])

    def train_dataloader(self):
        return DataLoader(self.fitted, 16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, 16)


def trainer(folder: Path, callbacks: list[pl.Callback], **options) -> pl.Trainer:
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": CSVLogger(folder),
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    return pl.Trainer(callbacks=callbacks, **settings)


def fit(folder: Path, callbacks: list[pl.Callback], module: pl.LightningModule | None = None, **kw):
    pl.seed_everything(0, verbose=False)
    module = Module() if module is None else module
    run = trainer(folder, callbacks, **kw)
    run.fit(module, datamodule=Data())
    return run, module


def callback(*args, **options) -> AfterdropCallback:
    return AfterdropCallback(*args, **{"grid": GRID, "num_samples": 4, **options})


def test_training_goes_on_as_without_the_callback(tmp_path):
    losses = []
    for callbacks in ([], [callback()]):
        run, module = fit(tmp_path, callbacks, enable_checkpointing=False)
        losses.append((run.callback_metrics["val_loss"], module.state_dict()))
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(losses[0][1][name], value) for name, value in losses[1][1].items())


def test_early_stopping_can_monitor_the_cross_entropy_at_the_best_temperature(tmp_path):
    stop = EarlyStopping("afterdrop_xe", patience=0, min_delta=100.0)  # nothing is good enough
    run, module = fit(tmp_path, [callback(), stop], max_epochs=5, enable_checkpointing=False)
    assert run.current_epoch < 5
    logits = module.eval()(Data().held_out.tensors[0]).detach().double()
    targets = Data().held_out.tensors[1]
    temperature = run.callback_metrics["afterdrop_temperature"].item()
    xe = [nn.functional.cross_entropy(logits / t, targets) for t in (temperature, 1.0)]
    assert run.callback_metrics["afterdrop_xe"].item() == pytest.approx(xe[0].item(), abs=1e-5)
    assert xe[0] <= xe[1]


def test_the_best_checkpoint_and_its_choice_lie_in_one_folder(tmp_path):
    keep, hook = ModelCheckpoint(monitor="afterdrop_xe"), callback()
    run, module = fit(tmp_path, [keep, hook], max_epochs=4)
    last = {name: value.clone() for name, value in module.state_dict().items()}
    folder = Path(keep.best_model_path).parent
    choice = ad.Choice.load(folder)
    assert choice == hook.choice
    scores = ad.Scores.load(folder / "scores" / "valid.safetensors")
    assert scores.xe(choice.member).value == hook.scores.xe(choice.member).value
    assert scores.num_examples == 75
    best = Module.load_from_checkpoint(keep.best_model_path)
    assert choice.predictor(best)(torch.randn(2, 4)).shape == (2, 3)
    again = ad.evaluate(best, Data().val_dataloader(), grid=GRID, num_samples=4)
    assert again.xe(choice.member).value == pytest.approx(scores.xe(choice.member).value, abs=1e-6)
    # The module itself keeps the weights of the last step.
    assert all(torch.equal(last[name], value) for name, value in module.state_dict().items())
    metrics = (Path(run.log_dir) / "metrics.csv").read_text()
    assert "afterdrop_xe" in metrics and "afterdrop_gain" in metrics


def test_the_last_weights_and_a_folder_of_ones_own(tmp_path):
    hook = callback(tmp_path / "out", weights="last")
    _, module = fit(tmp_path, [hook])
    choice = ad.Choice.load(tmp_path / "out")
    assert choice.predictor(module)(torch.randn(2, 4)).shape == (2, 3)
    with pytest.raises(DataError, match="weights='worst' must be 'best' or 'last'"):
        AfterdropCallback(weights="worst")


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_the_precision_is_that_of_the_trainer(precision, tmp_path):
    hook = callback()
    run, module = fit(tmp_path, [hook], precision=precision, enable_checkpointing=False)
    # The last validation saw the last weights; bfloat16 has three significant digits.
    tolerance = 1e-6 if precision == "64-true" else 4e-3
    loss = run.callback_metrics["val_loss"].item()
    assert hook.scores.xe(ad.DET).value == pytest.approx(loss, abs=tolerance)
    whole = ad.evaluate(module.float(), Data().val_dataloader(), grid=GRID, num_samples=4)
    assert torch.equal(whole.targets, hook.scores.targets)
    assert whole.xe(ad.DET).value != hook.scores.xe(ad.DET).value


def test_weights_of_16_bits_are_loaded_as_such(tmp_path):
    keep, hook = ModelCheckpoint(monitor="val_loss"), callback()
    fit(tmp_path, [keep, hook], precision="bf16-true")
    best = Module.load_from_checkpoint(keep.best_model_path)
    with pytest.raises(DataError, match="weights of the model"):
        hook.choice.predictor(best)
    predict = hook.choice.predictor(best.to(torch.bfloat16))
    assert predict(torch.randn(2, 4, dtype=torch.bfloat16)).shape == (2, 3)


def test_validate_evaluates_the_family(tmp_path):
    _, module = fit(tmp_path, [], enable_checkpointing=False)
    hook = callback(tmp_path / "out")
    run = trainer(tmp_path, [hook])
    (found,) = run.validate(module, datamodule=Data(), verbose=False)
    assert hook.scores.members == ad.Scores.load(tmp_path / "out/scores/valid.safetensors").members
    assert found["afterdrop_xe"] == pytest.approx(
        hook.scores.xe(hook.choice.deterministic).value, abs=1e-6
    )
    loaders = [Data().val_dataloader(), Data().val_dataloader()]
    with pytest.raises(DataError, match=r"several validation loaders; give .*batches="):
        run.validate(module, loaders, verbose=False)
    whole = callback(tmp_path / "own", batches=Data().val_dataloader)
    trainer(tmp_path, [whole]).validate(module, loaders, verbose=False)
    assert whole.choice == hook.choice


def test_a_module_without_forward_says_which_part_has_the_logits(tmp_path):
    settings = {"enable_checkpointing": False, "max_epochs": 1}
    with pytest.raises(DataError, match=r"Bare has no forward .*module=lambda m: m.net"):
        fit(tmp_path, [callback()], Bare(), **settings)
    hook = callback(module=lambda m: m.net)
    _, module = fit(tmp_path, [hook], Bare(), **settings)
    assert hook.choice.predictor(module.net)(torch.randn(2, 4)).shape == (2, 3)


def on_two_ranks(folder: Path) -> None:
    """Fits in two processes; each writes the choice that it made."""
    hook = callback(weights="last")
    run, module = fit(folder, [hook], devices=2, strategy="ddp")
    hook.choice.save(folder / f"choice{run.global_rank}.json")
    hook.scores.save(folder / f"scores{run.global_rank}.safetensors")
    torch.save(module.state_dict(), folder / "weights.pt")


@pytest.mark.subprocess
def test_two_processes_share_the_evaluation_of_every_example_once(tmp_path):
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(tmp_path)], env=settings, check=True, timeout=300)
    scores = [ad.Scores.load(tmp_path / f"scores{rank}.safetensors") for rank in (0, 1)]
    assert [s.num_examples for s in scores] == [75, 75]
    assert ad.Choice.load(tmp_path / "choice0.json") == ad.Choice.load(tmp_path / "choice1.json")
    module = Module()
    module.load_state_dict(torch.load(tmp_path / "weights.pt"))
    alone = ad.evaluate(module, Data().val_dataloader(), grid=GRID, num_samples=4)
    for name, tensor in alone.tensors.items():
        assert torch.equal(tensor, scores[0].tensors[name]), name


if __name__ == "__main__":
    on_two_ranks(Path(sys.argv[1]))
