"""Evaluates and selects in Lightning, after `fit` and in `validate`.

The trainer's own precision, device and process group are used. The module is called directly:
`validation_step` returns a loss or nothing, logs, and updates metrics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from afterdrop.errors import DataError, ExtraError
from afterdrop.evaluation import Scores, evaluate
from afterdrop.family.member import DET, Grid
from afterdrop.run_layout import RunLayout
from afterdrop.selection import Choice, select

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]
    except ImportError as missing:
        raise ExtraError.of(missing, "this callback needs lightning", "lightning") from missing

_GIVE_BATCHES = "give AfterdropCallback(batches=), a function that returns the validation batches"


class AfterdropCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Logs the deterministic XE at its best temperature; at the end evaluates, selects and saves.

    After each validation of `fit`, `afterdrop_xe` and `afterdrop_temperature` are logged: the
    cross entropy of the model without dropout at the temperature T* that suits it best, which
    early stopping and checkpoints can monitor. After `fit`, and in `validate`, all members of the
    family are evaluated and the best is chosen. Scores and choice are saved, by default beside the
    checkpoint. Training goes on as it would without the callback.

    Args:
        folder: Where to save `scores/valid.safetensors` and `choice.json`; by default beside
            the checkpoint that was evaluated, otherwise in the folder of the logger.
        weights: What is evaluated after `fit`: "best" for the best checkpoint of
            `ModelCheckpoint`, where there is one, or "last".
        module: The part of the LightningModule that returns logits, as in `lambda m: m.net`; by
            default the LightningModule itself, which then needs a `forward`.
        batches: A function without arguments that returns all validation batches; by default the
            trainer's validation loader is read.
        prefer: As for `select`.
        **options: Further arguments of `evaluate`, such as `grid`, `num_samples`, `targets`,
            `logits` and `likelihood`.

    Attributes:
        scores: The last Scores of the whole family; None before.
        choice: The choice made from them; None before.

    Example:
        >>> callback = AfterdropCallback(num_samples=20, prefer="cheapest")
        >>> callback.choice is None  # until Trainer(callbacks=[callback]).fit(...) has run
        True
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        weights: Literal["best", "last"] = "best",
        module: Callable[[Any], nn.Module] | None = None,
        batches: Callable[[], Iterable[Any]] | None = None,
        prefer: Literal["best", "cheapest"] = "best",
        **options: Any,
    ) -> None:
        if weights not in ("best", "last"):
            raise DataError(f"weights={weights!r} must be 'best' or 'last'")
        self.folder, self.weights, self.prefer = folder, weights, prefer
        self.module, self.batches, self.options = module, batches, options
        self.scores: Scores | None = None
        self.choice: Choice | None = None

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs the deterministic XE in `fit`; evaluates the family in `validate`."""
        if trainer.sanity_checking:
            return
        options = self.options
        if trainer.state.fn == "fit":  # one pass without dropout: no masks are drawn
            options = {**options, "grid": Grid((0.0,), (0.0,)), "num_samples": 2, "blocks": 2}
        scores = self._evaluate(trainer, pl_module, options)
        best = scores.fit(DET).member
        pl_module.log("afterdrop_xe", scores.xe(best).value, prog_bar=True, sync_dist=True)
        pl_module.log("afterdrop_temperature", best.temperature, sync_dist=True)
        if trainer.state.fn == "validate":
            self._choose(trainer, scores, trainer.ckpt_path)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Evaluates the family on the best or the last weights."""
        path = _best_checkpoint(trainer) if self.weights == "best" else None
        with _weights_of(trainer, pl_module, path):
            self._choose(trainer, self._evaluate(trainer, pl_module, self.options), path)

    def _choose(self, trainer: Any, scores: Scores, path: str | None) -> None:
        """Selects and saves beside the checkpoint at `path`, whose weights the scores are of."""
        self.scores, self.choice = scores, select(scores, prefer=self.prefer)
        beside = trainer.log_dir or trainer.default_root_dir if path is None else Path(path).parent
        folder = Path(self.folder or trainer.strategy.broadcast(beside))
        if not trainer.is_global_zero:
            return
        layout = RunLayout(folder)
        layout.scores(scores.split).parent.mkdir(parents=True, exist_ok=True)
        scores.save(layout.scores(scores.split))
        self.choice.save(layout.choice)
        found = {
            "afterdrop_chosen_xe": scores.xe(self.choice.member).value,
            "afterdrop_gain": self.choice.gain.value,
        }
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.global_step)

    def _evaluate(self, trainer: Any, pl_module: Any, options: dict[str, Any]) -> Scores:
        model = pl_module if self.module is None else self.module(pl_module)
        if not _has_forward(model):
            raise DataError(
                f"{type(model).__name__} has no forward that returns logits; give it one, or give "
                "AfterdropCallback(module=lambda m: m.net)"
            )
        precision, move = trainer.precision_plugin, trainer.strategy.batch_to_device
        ranks = {"ranks": "split"} if trainer.world_size > 1 else {}
        # A pass over a loader takes a seed from torch's generator, which training still needs.
        with torch.random.fork_rng(devices=[]), precision.forward_context():
            batches = _validation_loader(trainer) if self.batches is None else self.batches()

            def ready(batch: Any) -> Any:
                return precision.convert_input(move(batch))

            if options.keys() & {"batch_size", "collate"}:
                return evaluate(model, map(ready, batches), **{**ranks, **options})
            return evaluate(model, batches, collate=ready, **{**ranks, **options})


def _has_forward(model: nn.Module) -> bool:
    """Whether a class defines `forward`: that of Module and of LightningModule only raises."""
    defined_in = getattr(type(model).forward, "__module__", None) or ""
    return not defined_in.endswith(("torch.nn.modules.module", ".core.module"))


def _validation_loader(trainer: Any) -> Iterable[Any]:
    """All validation batches, once each: a DistributedSampler repeats some examples."""
    loader = trainer.val_dataloaders
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if loader is None or isinstance(loader, dict | list | tuple):
        several = "no validation loader" if loader is None else "several validation loaders"
        raise DataError(f"the trainer has {several}; {_GIVE_BATCHES}")
    sampler = getattr(loader, "sampler", None)
    if trainer.world_size == 1 or type(sampler) is SequentialSampler:
        return loader
    if not isinstance(loader, DataLoader) or not isinstance(sampler, DistributedSampler):
        raise DataError(
            f"the validation loader of {trainer.world_size} processes ({type(loader).__name__}) "
            f"cannot be read as a whole; {_GIVE_BATCHES}"
        )
    if loader.batch_size is None:
        raise DataError(f"the validation loader has a batch sampler of its own; {_GIVE_BATCHES}")
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _best_checkpoint(trainer: Any) -> str | None:
    checkpoint = trainer.checkpoint_callback
    return getattr(checkpoint, "best_model_path", "") or None


@contextlib.contextmanager
def _weights_of(trainer: Any, pl_module: Any, path: str | None) -> Iterator[None]:
    """The module with the weights of a checkpoint; afterwards with its own again."""
    if path is None:
        yield
        return
    own = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
    # The trainer of this process wrote the file; it may hold any hyperparameters.
    found = trainer.strategy.load_checkpoint(path, weights_only=False)
    pl_module.load_state_dict(found["state_dict"])
    try:
        yield
    finally:
        pl_module.load_state_dict(own)
