"""The models of an ensemble: modules, functions that load one, and adapters of one model."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from afterdrop.errors import DataError
from afterdrop.masks.model_guard import guarded
from afterdrop.masks.sites import check_model
from afterdrop.masks.uniforms import Plan, site_key

Model = nn.Module | Callable[[], nn.Module]
Views = Mapping[str, Callable[[Any], Any]]
_REMEDY = (
    "give modules, or functions without arguments that load one: lambda: torch.load('a.pt', "
    "weights_only=False), or functools.partial(load, path) with a function load of your own"
)


def list_models(model: Any, adapters: Sequence[str] = ()) -> dict[str, Model]:
    """The models of an ensemble by name: several of them, or one with several adapters.

    Args:
        model: A module, or a sequence of modules and of functions that load one.
        adapters: Names for the model's own `set_adapter`, which are switched on one after another.
    """
    if adapters:
        return _list_adapters(model, adapters)
    several = isinstance(model, list | tuple | nn.ModuleList)
    models = list(model) if several else [model]
    for number, one in enumerate(models):
        if not callable(one):
            what = f"the path {str(one)!r}" if isinstance(one, str | Path) else type(one).__name__
            raise DataError(f"model {number} is {what}; {_REMEDY}")
    return {f"model {number}": one for number, one in enumerate(models)}


def check_views(augment: Any) -> None:
    """Refuses views that are not functions by name."""
    if not isinstance(augment, Mapping) or not all(map(callable, augment.values())):
        raise DataError(
            f"augment={augment!r:.80} must be functions of the inputs by name, such as "
            "{'plain': lambda x: x, 'flipped': lambda x: x.flip(-1)}"
        )


def _list_adapters(model: Any, adapters: Sequence[str]) -> dict[str, Model]:
    if isinstance(adapters, str):
        raise DataError(
            f"adapters={adapters!r} must be a list of names, such as [{adapters!r}, 'other']"
        )
    if not callable(getattr(model, "set_adapter", None)):
        raise DataError(
            f"adapters={tuple(adapters)!r} needs a model with set_adapter(name), as those of "
            f"PEFT and transformers; {type(model).__name__} has none"
        )
    if any(getattr(module, "merged", False) is True for module in model.modules()):
        raise DataError(
            "an adapter is merged into the weights of the model, and switching to another would "
            "change them; call model.unmerge_adapter() first"
        )
    return {name: _Adapter(model, name) for name in adapters}


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """Switches an adapter of a model on."""

    model: Any
    name: str

    def __call__(self) -> nn.Module:
        try:
            self.model.set_adapter(self.name)
        except (KeyError, TypeError, ValueError) as error:
            known = getattr(self.model, "peft_config", None)
            remedy = "give names of its adapters"
            if isinstance(known, Mapping):
                remedy += f": {', '.join(map(repr, known))}"
            raise DataError(
                f"the model cannot switch to the adapter {self.name!r} ({error}); {remedy}"
            ) from error
        return self.model


@contextlib.contextmanager
def adapters_restored(models: Iterable[Model]) -> Iterator[None]:
    """Leaves models whose adapters are switched as they were, even after an exception.

    That is which adapters are active, and which weights are trained. Until then no other thread
    uses the model.
    """
    adapted = {id(one.model): one.model for one in models if isinstance(one, _Adapter)}
    with contextlib.ExitStack() as held:
        for model in adapted.values():
            trained = [(weight, weight.requires_grad) for weight in model.parameters()]
            held.enter_context(guarded(model))
            held.callback(_set_trained, trained)
        yield


def _set_trained(weights: Iterable[tuple[nn.Parameter, bool]]) -> None:
    for weight, trained in weights:
        weight.requires_grad_(trained)


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
