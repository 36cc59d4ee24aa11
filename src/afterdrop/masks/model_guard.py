"""Exclusive use of a model, which is left as it was.

Forward passes under masks need modules in train mode, and that is a plain attribute which every
thread sees. So each module has a lock: threads that use the same module take turns. On exit every
module has its mode, buffers, attributes (with the contents of lists and dicts) and registered
tensors back, even after an exception.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.masks.attribute_contents import Contents, differing
from afterdrop.masks.identity_snapshot import IdentitySnapshot
from afterdrop.masks.thread_lock import ThreadLock, in_forked_processes
from afterdrop.stop_request import signals_wait

Reset = Callable[[nn.Module], object]

_registry = ThreadLock()
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_held: dict[int, tuple[int, ModelState]] = {}  # the models in use, with the threads that use them
_TABLES = ("_parameters", "_buffers", "_modules")  # what a module registers, by name
# Also changed in place: transformers' models register hooks in their first pass.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_ALL = _TABLES + _HOOKS


@contextlib.contextmanager
def guarded(model: nn.Module, reset: Reset | None = None) -> Iterator[None]:
    """Puts a model into eval mode, for this thread alone; restores everything on exit.

    Compiled modules run as the eager ones that they were made from.

    Args:
        model: The module.
        reset: Called with the model before each of its forward passes, to forget state that it
            keeps between calls.

    Example:
        >>> model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())
        >>> with guarded(model):
        ...     [module.training for module in model.modules()]
        [False, False, False]
        >>> [module.training for module in model.modules()]
        [True, True, False]
    """
    held = contextlib.ExitStack()
    try:
        held.enter_context(_locked(_locks_of(model)))
        held.enter_context(_eager)
        state = ModelState(model)
        held.callback(_held.pop, id(state))
        held.callback(state.restore)
        _held[id(state)] = threading.get_ident(), state
        if reset is not None:
            hook = model.register_forward_pre_hook(_resetting(reset), prepend=True)
            held.callback(hook.remove)
        for module in state.modules:
            module.training = False
        yield
    finally:
        with signals_wait():  # a Ctrl-C in between would leave the model half restored
            held.close()


def _take_over() -> None:
    """Restores, in a forked process, the models that threads were using which it does not have."""
    _locks.clear()
    for thread, state in reversed(list(_held.values())):  # the outermost of nested ones last
        if thread != threading.get_ident():
            with contextlib.suppress(RuntimeError):  # buffers on a GPU, which forks cannot use
                state.restore()
            _eager.__exit__()
            del _held[id(state)]


in_forked_processes(_take_over)


def _locks_of(model: nn.Module) -> list[Any]:
    """The locks of all modules, in an order that is the same in all threads."""
    with _registry:
        modules = sorted(model.modules(), key=id)
        return [_locks.setdefault(module, threading.RLock()) for module in modules]


@contextlib.contextmanager
def _locked(locks: list[Any]) -> Iterator[None]:
    """Holds all of some locks. An `ExitStack` would keep an object for each."""
    held = 0
    try:
        for lock in locks:
            lock.acquire()
            held += 1
        yield
    finally:
        for lock in locks[:held]:
            lock.release()


def _resetting(reset: Reset) -> Callable[[nn.Module, Any], None]:
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            reset(module)

    return hook


class _Eager:
    """Makes whatever is compiled run as the eager code that it was made from.

    The stance of torch.compile belongs to the process: the first thread sets it, the last restores
    it. Where nothing was compiled, torch's compiler, which takes seconds to import, is left alone.
    """

    def __init__(self) -> None:
        self._count, self._stance = 0, None

    def __enter__(self) -> None:
        with _registry:
            self._count += 1
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *exc: object) -> None:
        with _registry:
            self._count -= 1
            if self._count == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


_eager = _Eager()


class ModelState:
    """Buffers, attributes, hooks and registered objects of all modules of a model.

    Attributes include the contents of containers (`attribute_contents`).

    Args:
        model: The module.
        by_value: Whether to compare the values of buffers, which waits for a device, and not only
            their versions, which some operators of torch do not count up.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> state = ModelState(model, by_value=True)
        >>> _ = model(torch.randn(3, 2))
        >>> sorted(state.changed()[""])
        ['num_batches_tracked', 'running_mean', 'running_var']
        >>> state.restore()
        >>> state.changed(), model.num_batches_tracked
        ({}, tensor(0))
    """

    def __init__(self, model: nn.Module, *, by_value: bool = False) -> None:
        self._by_value = by_value
        named = [
            (name, module)
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        self.modules = [module for _, module in named]
        self._names = [name for name, _ in named]
        self._attributes = IdentitySnapshot(self._now())
        self._contents = Contents(self._now())
        self._tables = {table: IdentitySnapshot(self._now(table)) for table in _ALL}
        self._buffers = [
            (buffer, _version(buffer), buffer.detach().clone())
            for module in self.modules
            for buffer in module._buffers.values()
            if isinstance(buffer, Tensor)
        ]

    def changed(self) -> dict[str, set[str]]:
        """Names of modules that differ by now, each with the names of what differs in it.

        Modes do not count. Containers and small tensors are compared by their contents, other
        objects by identity.
        """
        found: dict[str, set[str]] = {}

        def add(number: int, names: set[str]) -> None:
            if names:
                found.setdefault(self._names[number], set()).update(names)

        for number, attributes in self._attributes.changed(self._now()):
            now = self.modules[number].__dict__
            add(number, differing(now, attributes) - {*_TABLES, "training"})
        for table in _TABLES:
            for number, before in self._tables[table].changed(self._now(table)):
                add(number, differing(self.modules[number].__dict__[table], before))
        for number, names in self._contents.changed().items():
            add(number, names)
        if written := {id(entry[0]) for entry in self._buffers if self._wrote(*entry)}:
            for number, buffers in enumerate(self._now("_buffers")):
                add(number, {name for name, buffer in buffers.items() if id(buffer) in written})
        return found

    def restore(self) -> None:
        """Restores everything, modes too."""
        for table in _ALL:
            for number, before in self._tables[table].changed(self._now(table)):
                now = self.modules[number].__dict__[table]
                now.clear()
                now.update(before)
        for number, attributes in self._attributes.changed(self._now()):
            now = self.modules[number].__dict__
            for name in now.keys() - attributes.keys() - set(_TABLES):
                del now[name]
            now.update({n: value for n, value in attributes.items() if n not in _TABLES})
        self._contents.restore()
        with torch.no_grad():
            for number, (buffer, version, values) in enumerate(self._buffers):
                if self._wrote(buffer, version, values):
                    buffer.copy_(values)
                    self._buffers[number] = buffer, _version(buffer), values

    def _now(self, table: str | None = None) -> Iterator[dict[str, Any]]:
        """The attributes of each module, or one of its tables, as they are."""
        for module in self.modules:
            yield module.__dict__ if table is None else module.__dict__[table]

    def _wrote(self, buffer: Tensor, version: int, values: Tensor) -> bool:
        """Whether a buffer was written to."""
        if _version(buffer) != version:
            return True
        return self._by_value and not torch.equal(buffer, values)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version
