"""Hugging Face transformers: evaluate what a Trainer trains, and choose when it has trained.

evaluate       scores of a Trainer's model, or of a model, a dataset and a collator
add_callback   logs the cross entropy at its best temperature after each evaluation, and chooses at
               the end of training

Labels, padding, shift and ignored positions are those of the model's own loss: `afterdrop.evaluate`
compares both on the first batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from afterdrop.errors import DataError
from afterdrop.evaluation import Scores
from afterdrop.evaluation import evaluate as evaluate_batches
from afterdrop.evaluation.labelled_items import LABELS
from afterdrop.family.member import DET, Grid
from afterdrop.masks.uniforms import site_key
from afterdrop.models.fingerprint import fingerprint
from afterdrop.selection import Choice, select

Collator = Callable[[list[Any]], Any]
_SPAN = ("start_positions", "end_positions")  # of models that answer questions
_DETERMINISTIC = Grid((0.0,), (0.0,))
# Options of the final evaluation that a deterministic pass after each epoch does not have.
_OF_SAMPLES = {"grid", "num_samples", "adapters", "augment", "single", "blocks", "resume"}


def evaluate(
    model: Any,
    dataset: Any = None,
    collator: Collator | None = None,
    *,
    batch_size: int | None = None,
    **options: Any,
) -> Scores:
    """Evaluates every member of the family for a model of transformers.

    Args:
        model: A `Trainer`, whose model, evaluation data, collator, batch size and processes are
            used; or a model, PEFT models included.
        dataset: The examples; by default those of the Trainer. If the Trainer has several data sets
            by name, the name of one.
        collator: Makes a batch of a list of examples; by default the Trainer's, or that of
            transformers. If it draws at random (masked language models), it draws the same for
            the same seed.
        batch_size: Examples per batch; by default the Trainer's `eval_batch_size`, or 8.
        **options: As for `afterdrop.evaluate`: `grid`, `num_samples`, `adapters` and so on.

    Returns:
        Scores of every member.

    Raises:
        DataError: If the data or their labels cannot be evaluated, with the remedy.
    """
    trainer = model if hasattr(model, "get_eval_dataloader") else None
    if trainer is not None:
        model = trainer.model
        dataset = _trainer_dataset(trainer, dataset)
        collator = trainer.data_collator if collator is None else collator
        batch_size = trainer.args.eval_batch_size if batch_size is None else batch_size
        if trainer.args.world_size > 1:
            options.setdefault("ranks", "split")
    if dataset is None:
        raise DataError("dataset is missing; give the examples to evaluate on")
    names = _label_names(model) if trainer is None else list(trainer.label_names)
    if LABELS not in names and "targets" not in options:
        raise DataError(
            f"{type(model).__name__} takes the labels {', '.join(names) or 'none'}, not 'labels'; "
            "say which of a batch are the targets: targets= a key or a function of the batch"
        )
    columns = None
    if trainer is None or trainer.args.remove_unused_columns:
        columns = {*inspect.signature(_base(model).forward).parameters, *names}
        columns |= {"label", "label_ids"}
    seed = options.get("seed", 0)
    batches = _Batches(dataset, collator or _default_collator(), batch_size or 8, seed, columns)
    return evaluate_batches(model, batches, **options)


def add_callback(
    trainer: Any,
    dataset: Any = None,
    *,
    folder: str | Path | None = None,
    choose: Callable[[Scores], Choice] = select,
    **options: Any,
) -> FamilyEvents:
    """Makes a Trainer log what selection minimises, and choose at the end of training.

    After each evaluation the metrics have `eval_tempered_loss`, the cross entropy of the
    deterministic model at its best temperature, and `eval_best_temperature`. So
    `metric_for_best_model="tempered_loss"` stops early and keeps checkpoints by what temperature
    cannot repair. When training has ended, the family of the weights that it ended with (the best
    ones with `load_best_model_at_end`) is evaluated, and `choice.json` is written to the output
    folder and to the checkpoint that has these weights.

    Args:
        trainer: The Trainer, before `train()`.
        dataset: As for `evaluate`.
        folder: Another folder for the choice.
        choose: Makes the choice of the Scores, as `functools.partial(select, prefer="cheapest")`.
        **options: As for `evaluate`.

    Returns:
        The callback, whose `scores` and `choice` are set when training has ended.
    """
    from transformers import TrainerCallback

    # Trainers call every event of their callbacks, whose default is in this base class.
    kind = type("FamilyCallback", (FamilyEvents, TrainerCallback), {})
    callback = kind(trainer, dataset, None if folder is None else Path(folder), choose, options)
    # Callbacks run in their order, and one that stops early needs the metrics of this one.
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


@dataclasses.dataclass(eq=False)
class FamilyEvents:
    """What happens at the events of a Trainer; `add_callback` makes it.

    Attributes:
        trainer: The Trainer.
        dataset: As for `evaluate`.
        folder: Another folder for the choice.
        choose: Makes the choice.
        options: As for `evaluate`.
        scores: Of the family, when training has ended.
        choice: Made of them.
    """

    trainer: Any
    dataset: Any
    folder: Path | None
    choose: Callable[[Scores], Choice]
    options: dict[str, Any]
    scores: Scores | None = None
    choice: Choice | None = None

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        """Adds the cross entropy at the best temperature to the metrics and to the log."""
        prefix = f"eval_{self.dataset}_" if isinstance(self.dataset, str) else "eval_"
        if not any(name.startswith(prefix) for name in metrics):
            return  # an evaluation of other data
        options = {n: v for n, v in self.options.items() if n not in _OF_SAMPLES}
        scores = evaluate(self.trainer, self.dataset, grid=_DETERMINISTIC, num_samples=2, **options)
        best = scores.fit(DET).member
        found = {
            f"{prefix}tempered_loss": scores.xe(best).value,
            f"{prefix}best_temperature": best.temperature,
        }
        metrics.update(found)
        self.trainer.log(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluates the family, chooses, and writes the choice."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            _finish_loading(self.trainer, state.best_model_checkpoint)
        self.scores = evaluate(self.trainer, self.dataset, **self.options)
        self.choice = self.choose(self.scores)
        chosen = self.choice.member
        self.trainer.log(
            {
                "chosen_alpha": chosen.alpha,
                "chosen_multiplier": chosen.multiplier,
                "chosen_temperature": chosen.temperature,
                "chosen_gain": self.choice.gain.value,
            }
        )
        if args.should_save:
            for folder in self._folders(args, state):
                folder.mkdir(parents=True, exist_ok=True)
                self.choice.save(folder)

    def _folders(self, args: Any, state: Any) -> list[Path]:
        if self.folder is not None:
            return [self.folder]
        out = Path(args.output_dir)
        checkpoint = out / f"checkpoint-{state.global_step}"
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            checkpoint = Path(state.best_model_checkpoint)
        return [out, *([checkpoint] if checkpoint.is_dir() else [])]


def _finish_loading(trainer: Any, checkpoint: str) -> None:
    """Loads what a Trainer has left out of its best checkpoint.

    Some models, such as ViT, have other names for their weights in memory than in files. Trainers
    load files by the names in memory, and leave weights that they do not find as they were at the
    end of training (transformers 5.22).
    """
    model = trainer.model
    if not hasattr(model, "from_pretrained") or hasattr(model, "get_base_model"):
        return  # a module of the user, or one with adapters
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    whole = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    if fingerprint(whole) != fingerprint(model):
        warnings.warn(
            f"the Trainer has loaded only a part of the weights of {checkpoint}, whose names in "
            "the file are others; the rest is loaded now, before the choice is made",
            stacklevel=2,
        )
        model.load_state_dict(whole.state_dict())


@dataclasses.dataclass(frozen=True)
class _Batches:
    """Batches of a dataset, the same ones however often they are read.

    A collator or a dataset may draw at random: each batch is made from a seed of its own, and the
    random state of the training goes on as if nothing had been drawn.
    """

    dataset: Any
    collator: Collator
    batch_size: int
    seed: int
    columns: set[str] | None  # those that the collator gets; None for all

    def __len__(self) -> int:
        if not _indexed(self.dataset):
            raise TypeError("a stream of examples has no length")
        return -(-len(self.dataset) // self.batch_size)

    def __getitem__(self, number: int) -> Any:
        first = number * self.batch_size
        some = range(first, min(first + self.batch_size, len(self.dataset)))
        return self._made(map(self.dataset.__getitem__, some), number)

    def __iter__(self) -> Iterator[Any]:
        stream = iter(_examples(self.dataset))
        for number in count():
            batch = self._made(islice(stream, self.batch_size), number)
            if batch is None:
                return
            yield batch

    def _made(self, stream: Iterable[Any], number: int) -> Any:
        """A batch of examples, read and collated with its own seed; None of none."""
        with _seeded(site_key(self.seed, "batch", number)):
            examples = [self._kept(example) for example in stream]
            return self.collator(examples) if examples else None

    def _kept(self, example: Any) -> Any:
        if self.columns is None or not isinstance(example, Mapping):
            return example
        return {name: value for name, value in example.items() if name in self.columns}


def _indexed(dataset: Any) -> bool:
    return isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")


def _examples(dataset: Any) -> Iterable[Any]:
    if _indexed(dataset):
        # Not by iteration: some datasets never raise the IndexError that would end it.
        return map(dataset.__getitem__, range(len(dataset)))
    return dataset


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random draws from a seed, after which the global generators are as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _trainer_dataset(trainer: Any, dataset: Any) -> Any:
    held = trainer.eval_dataset
    if isinstance(held, dict) and (dataset is None or isinstance(dataset, str)):
        if dataset not in held:
            raise DataError(
                f"dataset={dataset!r}: the Trainer's eval_dataset has {', '.join(map(repr, held))};"
                " give the name of one of them"
            )
        return held[dataset]
    if dataset is None and held is None:
        raise DataError("the Trainer has no eval_dataset; give dataset=")
    return held if dataset is None else dataset


def _base(model: nn.Module) -> nn.Module:
    """The model itself, without PEFT around it."""
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def _label_names(model: nn.Module) -> list[str]:
    """The parameters of a model's `forward` that transformers takes for labels."""
    names = inspect.signature(_base(model).forward).parameters
    return [name for name in names if "label" in name or name in _SPAN]


def _default_collator() -> Collator:
    from transformers import default_data_collator

    return default_data_collator
