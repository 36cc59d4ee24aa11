"""The models of an ensemble: modules, functions that load one, and adapters of one model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from afterdrop.errors import DataError
from afterdrop.masks.sites import check_model
from afterdrop.masks.uniforms import Plan, site_key

Model = nn.Module | Callable[[], nn.Module]
Views = Mapping[str, Callable[[Any], Any]]


def list_models(model: Any, adapters: Sequence[str] = ()) -> dict[str, Model]:
    """The models of an ensemble by name: several of them, or one with several adapters.

    Args:
        model: A module, or a sequence of modules and of functions that load one.
        adapters: Names for the model's own `set_adapter`, which are switched on one after another.
    """
    if adapters:
        if not callable(getattr(model, "set_adapter", None)):
            raise DataError(
                f"adapters={tuple(adapters)!r} needs a model with set_adapter(name), as those of "
                f"PEFT and transformers; {type(model).__name__} has none"
            )
        return {name: _Adapter(model, name) for name in adapters}
    several = isinstance(model, list | tuple | nn.ModuleList)
    models = list(model) if several else [model]
    for number, one in enumerate(models):
        if not callable(one):
            raise DataError(
                f"model {number} is {type(one).__name__}; give modules, or functions that load one "
                "(functools.partial(load, path))"
            )
    return {f"model {number}": one for number, one in enumerate(models)}


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """Switches an adapter of a model on."""

    model: Any
    name: str

    def __call__(self) -> nn.Module:
        self.model.set_adapter(self.name)
        return self.model


def load_model(model: Model) -> nn.Module:
    """A model as it is, or from the function that loads it."""
    loaded = model if isinstance(model, nn.Module) else model()
    if not isinstance(loaded, nn.Module):
        raise DataError(f"a model was loaded as {type(loaded).__name__}, not as a torch.nn.Module")
    check_model(loaded)
    return loaded


def mask_plan(masks: Plan, source: int) -> Plan:
    """The mask samples of a source: the masks of each are its own."""
    return dataclasses.replace(masks, seed=site_key(masks.seed, "source", source))


def combined_fingerprint(fingerprints: Iterable[str]) -> str:
    """One fingerprint of several models, in their order."""
    joined = " ".join(fingerprints).encode()
    return hashlib.blake2b(joined, digest_size=16).hexdigest()
