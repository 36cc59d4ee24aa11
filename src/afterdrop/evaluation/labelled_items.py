"""What of a user's batch goes into the model, and what are its targets.

(inputs, targets)       as they are
{..., "labels": ...}    the other entries are keyword inputs; the targets are the labels, shifted
                        by one position if the model's own loss shifts them
an object with to()     the input itself; its attribute y holds the targets, as in PyG's Data
anything else           targets= says where the targets are, by key or as a function of the batch
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.likelihoods.model_loss import shifts_targets
from afterdrop.masks.model_call import is_movable

# Where a batch holds its targets: a key (or attribute), or a function of the batch.
TargetsPlace = str | Callable[[Any], Any]
LABELS = "labels"
_FORMS = (
    "give pairs (inputs, targets), mappings with 'labels', or say where the targets are: targets= "
    "a key or a function of the batch"
)


def split_item(item: Any, place: TargetsPlace | None, number: int) -> tuple[Any, Any]:
    """The inputs and the targets of a batch.

    Args:
        item: The batch as the user gives it.
        place: Where its targets are; None where its kind says so.
        number: Which batch, for messages.

    Raises:
        DataError: If it has no targets there.

    Example:
        >>> split_item({"input_ids": 1, "label": 2}, "label", 0)
        ({'input_ids': 1}, 2)
    """
    if isinstance(place, str):
        return _at_key(item, place, number)
    pair = isinstance(item, list | tuple) and len(item) == 2
    if place is not None:
        return item[0] if pair else _without(item, LABELS), place(item)
    if pair:
        return item[0], item[1]
    if isinstance(item, Mapping):
        return _at_key(item, LABELS, number)
    if is_movable(item) and getattr(item, "y", None) is not None:
        return item, item.y
    hint = "; if it is a list of examples, collate= makes a batch of it" * isinstance(item, list)
    raise DataError(f"batch {number} is {type(item).__name__}, without targets; {_FORMS}{hint}")


def _at_key(item: Any, key: str, number: int) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        if key not in item:
            raise DataError(
                f"batch {number} has no {key!r} (its keys: {', '.join(map(str, item))}); {_FORMS}"
            )
        return _without(item, key), item[key]
    if not hasattr(item, key):
        raise DataError(
            f"targets={key!r}: batch {number} is {type(item).__name__}, which has no such key or "
            f"attribute; {_FORMS}"
        )
    return item, getattr(item, key)


def _without(item: Any, key: str) -> Any:
    if isinstance(item, Mapping):
        return {name: value for name, value in item.items() if name != key}
    return item


def inputs_of(item: Any, unlabelled: bool = False) -> Any:
    """The inputs of a batch whose targets, if it has any, are not needed.

    Args:
        item: A batch as for `split_item`, or inputs alone.
        unlabelled: Whether a list or tuple holds positional inputs alone. Otherwise one of two is a
            pair (inputs, targets).

    Example:
        >>> inputs_of((1, 2)), inputs_of((1, 2), unlabelled=True), inputs_of({"x": 1, "labels": 2})
        (1, (1, 2), {'x': 1})
    """
    if isinstance(item, list | tuple):
        pair = len(item) == 2 and not unlabelled
        inputs = item[0] if pair else item
        return tuple(inputs) if isinstance(inputs, list) else inputs
    return _without(item, LABELS)


def shifts_labels(
    model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, likelihood: Categorical
) -> bool:
    """Whether a model's own loss compares the logits at position t with the label at t + 1.

    Args:
        model: The model, in eval mode.
        inputs: Keyword inputs without labels, on the model's device.
        labels: [B, ...] with the batch dimension first, on the CPU.
        likelihood: Reads the output.

    Raises:
        DataError: If the loss is neither that of the labels nor that of the shifted ones.
    """
    if labels.dim() < 2 or labels.is_floating_point() or not _takes(model, LABELS):
        return False
    return shifts_targets(model(**inputs, labels=_beside(model, labels)), labels, likelihood)


def with_decoder_inputs(model: nn.Module, inputs: Any, labels: Tensor) -> Any:
    """The inputs, with those that an encoder-decoder of transformers makes of its labels."""
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None or "decoder_input_ids" in inputs:
        return inputs
    return {**inputs, "decoder_input_ids": prepare(labels=_beside(model, labels))}


def _beside(model: nn.Module, labels: Tensor) -> Tensor:
    """Labels on the model's device."""
    return labels.to(next((p.device for p in model.parameters()), torch.device("cpu")))


def _takes(model: nn.Module, name: str) -> bool:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # of a scripted module
        return False
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)
