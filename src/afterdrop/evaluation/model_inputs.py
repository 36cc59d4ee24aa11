"""Inputs that a model does not take: refused, with the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from afterdrop.errors import AfterdropError, DataError, SiteError
from afterdrop.evaluation.batches import call
from afterdrop.masks.sites import Sites


def check_call(model: nn.Module, inputs: Any) -> None:
    """Refuses inputs whose number or names are not those of the model's `forward`.

    Raises:
        DataError: If they are not.

    Example:
        >>> check_call(nn.Linear(2, 2), {"x": 1})
        Traceback (most recent call last):
        afterdrop.errors.DataError: the inputs do not fit forward(input: ...
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # of a scripted module
        return
    try:
        call(signature.bind, inputs)
    except TypeError as error:
        raise DataError(
            f"the inputs do not fit forward{signature}: {error}; {_remedy(signature, inputs)}"
        ) from None


def _remedy(signature: inspect.Signature, inputs: Any) -> str:
    kinds = (
        "a tuple holds positional inputs, a dict keyword inputs; collate= makes (inputs, targets) "
        "of anything else"
    )
    if isinstance(inputs, Mapping | tuple):
        try:
            signature.bind(inputs)
        except TypeError:
            return kinds
        return f"{kinds}; if forward takes the {type(inputs).__name__} itself, give (inputs,)"
    return kinds


def find_or_explain(find: Callable[[], Sites], run: Callable[[], Any]) -> Sites:
    """The sites of a model, or why its train-mode pass fails where eval mode does not.

    Args:
        find: Finds the sites.
        run: Runs the model in eval mode, on the same inputs.

    Raises:
        SiteError: If only train mode fails.
    """
    try:
        return find()
    except AfterdropError:
        raise
    except Exception as error:  # the user's model may fail in any way
        run()
        raise SiteError(
            f"the model runs in eval mode, but not in train mode, in which masks are controlled "
            f"({type(error).__name__}: {error}); forward must take the same inputs in both: if it "
            "needs the targets in training, give them among the inputs, too, as in "
            "({'x': x, 'targets': targets}, targets)"
        ) from error
