"""Stochastic depth: modules that drop whole rows of a batch, or all of it.

The modules of timm, transformers, torchvision and their many copies compute the mask from a random
draw, by operators that do not show a rate. They are recognised by what they do to a small input
(`drop_path_of`), whatever they are called, and their forward is replaced by one that asks for its
mask. A module that does something else runs as it is.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from afterdrop.masks.operators import MaskSource

_SHAPE = (3, 2, 2)  # of the input that modules are tried with
_DRAWS = (torch.rand, torch.rand_like, torch.Tensor.uniform_)
_BERNOULLI = (torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_)


@dataclasses.dataclass(frozen=True)
class DropPath:
    """What a stochastic depth module does.

    Attributes:
        attribute: The attribute that holds its rate.
        by_row: Whether each row has a mask of its own; otherwise the batch shares one.
        rescales: Whether what is kept is divided by the probability of keeping.
    """

    attribute: str
    by_row: bool
    rescales: bool


# What was found of each module, and the attributes that were tried.
_known: weakref.WeakKeyDictionary[nn.Module, tuple[set[str], DropPath | None]] = (
    weakref.WeakKeyDictionary()
)


def drop_path_of(module: nn.Module) -> DropPath | None:
    """What a stochastic depth module does, or None for any other module.

    Example:
        >>> class Skip(nn.Module):
        ...     rate = 0.25
        ...     def forward(self, x):
        ...         keep = torch.rand(len(x), *[1] * (x.dim() - 1)) >= self.rate
        ...         return x * keep / (1 - self.rate) if self.training else x
        >>> drop_path_of(Skip())
        DropPath(attribute='rate', by_row=True, rescales=True)
        >>> drop_path_of(nn.Dropout(0.25)) is None
        True
    """
    if type(module).__module__.startswith("torch.nn."):
        return None
    if any(True for _ in module.children()) or any(True for _ in module.parameters()):
        return None
    tried, found = _known.get(module, (set[str](), None))
    for name, rate in _rates(module).items():
        if found is None and name not in tried:
            tried.add(name)
            found = _tried(module, name, rate)
    _known[module] = tried, found
    return found


def _rates(module: nn.Module) -> dict[str, float]:
    """Attributes that may hold a rate, of the module and of its class."""
    names = dict.fromkeys([*vars(type(module)), *vars(module)])
    values = {name: getattr(module, name, None) for name in names if not name.startswith("_")}
    return {n: float(v) for n, v in values.items() if isinstance(v, float) and 0 < v < 1}


class _GivenDraws(TorchFunctionMode):
    """Answers random operators with one number, and notes the shapes that were asked for."""

    def __init__(self, uniform: float) -> None:
        super().__init__()
        self.uniform, self.shapes = uniform, list[tuple[int, ...]]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            like = func(*args, **kwargs)
            self.shapes.append(tuple(like.shape))
            return like.fill_(self.uniform)
        if func in _BERNOULLI:
            keep = args[1] if len(args) > 1 else kwargs.get("p", args[0])
            like = func(*args, **kwargs)
            self.shapes.append(tuple(like.shape))
            return like.copy_(torch.as_tensor(self.uniform >= 1 - keep).to(like.dtype))
        return func(*args, **kwargs)


def _tried(module: nn.Module, attribute: str, rate: float) -> DropPath | None:
    """What the module does if it is stochastic depth at a rate; None if it is not."""
    x = torch.linspace(1.0, 2.0, 12).view(_SHAPE)
    mode = module.training
    try:
        module.training = True
        dropped, kept = _answer(module, x, rate - 1e-4), _answer(module, x, rate + 1e-4)
    except Exception:  # a module that is something else may fail in any way
        return None
    finally:
        module.training = mode
    by_row = (_SHAPE[0], *[1] * (len(_SHAPE) - 1))
    if dropped is None or kept is None or dropped[1] != kept[1] or dropped[0].abs().max() > 0:
        return None
    if dropped[1] not in ([by_row], [(1,) * len(_SHAPE)]):
        return None
    for rescales in (True, False):
        if torch.allclose(kept[0], x / (1 - rate) if rescales else x, rtol=1e-3):
            return DropPath(attribute, dropped[1] == [by_row], rescales)
    return None


def _answer(
    module: nn.Module, x: Tensor, uniform: float
) -> tuple[Tensor, list[tuple[int, ...]]] | None:
    """The output where every draw is `uniform`, and the shapes of the draws."""
    draws = _GivenDraws(uniform)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), draws:
        found = module(x.clone())
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return None
    return found, draws.shapes


@contextlib.contextmanager
def replaced_forwards(modules: Iterable[nn.Module], source: MaskSource) -> Iterator[None]:
    """Makes stochastic depth modules ask `source` for masks; restores them on exit.

    Args:
        modules: All modules of a model.
        source: Answers with masks.
    """
    # A forward that was set on the instance, by another library for example, is put back.
    replaced = [
        (module, drop, module.__dict__.get("forward"))
        for module in modules
        if (drop := drop_path_of(module)) is not None
    ]
    try:
        for module, drop, _ in replaced:
            module.__dict__["forward"] = _controlled_forward(module, drop, source)
        yield
    finally:
        for module, _, forward in replaced:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


def _controlled_forward(
    module: nn.Module, drop: DropPath, source: MaskSource
) -> Callable[[Tensor], Tensor]:
    """What the module's own forward does in training, with a mask from `source`."""

    def forward(x: Tensor) -> Tensor:
        rate = getattr(module, drop.attribute)
        if not rate:
            return x
        shape = [1] * x.dim()
        if drop.by_row:
            shape[0] = x.shape[0]
        mask = source.mask("drop_path", rate, x.new_empty(()).expand(shape), x)
        if mask is None:
            return x
        if drop.rescales:
            return mask.drop(x)
        return (mask.unfold(x) * mask.mask).reshape(x.shape)

    return forward
