"""Evaluations with several batches in flight; one alpha, because the interpreter is slow."""

import itertools

import kernel_device
import pytest
import torch
from tiny_evaluation import (
    MODELS,
    Engines,
    Float32Engine,
    assert_same,
    build,
    evaluate_nine,
)
from torch.utils._python_dispatch import TorchDispatchMode

from afterdrop.evaluation.request import StreamSettings

pytestmark = kernel_device.quiet
device = kernel_device.device


def three_batches(model, engines, **options):
    """The scores of three windows, one per batch."""
    return evaluate_nine(
        model, engines, StreamSettings(window=3), windows=1, alphas=(1,), **options
    )


class RecordingEngine(Float32Engine):
    """Records the events of each batch.

    Args:
        events: Where to record them.
        changes: What to apply to the results of a batch when it first begins, by its number.
    """

    def __init__(self, *args, events, changes=None, **options):
        super().__init__(*args, **options)
        self.events, self.changes = events, dict(changes or {})

    def begin(self, batch, number):
        self.events.append(f"begin {number}")
        self.change = self.changes.pop(number, lambda found: found)
        results = super().begin(batch, number)
        return lambda: self.events.append(f"finish {number}") or results()

    def _windows(self, *args):
        return self.change(super()._windows(*args))


def too_low(found):
    return {**found, "lowest": torch.full_like(found["lowest"], -200.0)}


def no_memory(found):
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_kernel(found):
    raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")


# Changes by batch, then the events of the fused engine and the batches of the plain one.
FAILURES = [
    ({}, "begin 0, begin 1, finish 0, begin 2, finish 1, finish 2", []),
    ({0: too_low}, "begin 0, begin 1, finish 0, finish 1", [0, 2]),
    ({1: too_low}, "begin 0, begin 1, finish 0, begin 2, finish 1, finish 2", [1]),
    ({0: too_low, 1: too_low}, "begin 0, begin 1, finish 0, finish 1", [0, 1, 2]),
    ({0: no_memory}, "begin 0, begin 0, begin 1, finish 0, begin 2, finish 1, finish 2", []),
    ({1: no_memory}, "begin 0, begin 1, begin 1, finish 0, begin 2, finish 1, finish 2", []),
    ({0: no_kernel}, "begin 0", [0, 1, 2]),
    ({1: no_kernel}, "begin 0, begin 1, finish 0", [1, 2]),  # 0, already in flight, is not lost
    ({0: too_low, 1: no_kernel}, "begin 0, begin 1, finish 0", [0, 1, 2]),
]


def change_names(changes):
    return " ".join(f"{number}:{change.__name__}" for number, change in changes.items()) or "none"


@pytest.mark.parametrize(
    ("changes", "events", "plain"),
    FAILURES,
    ids=[change_names(changes) for changes, *_ in FAILURES],
)
@pytest.mark.filterwarnings("ignore:.*continues without kernels")
def test_a_failure_in_one_batch_does_not_affect_the_others(changes, events, plain, device):
    model, recorded = build(device, **MODELS["projection"]), []
    wanted = three_batches(model, Engines())
    engines = Engines(fused=RecordingEngine, events=recorded, changes=changes)
    found = three_batches(model, engines)
    assert_same(found, wanted, kernel_device.within(device, 1e-5))
    assert ", ".join(recorded) == events
    assert [number for engine in engines.made[1:] for number in engine.batches] == plain
    assert (engines.memory.budget < engines.budget) == (no_memory in changes.values())


def test_an_interrupted_evaluation_resumes_with_the_kernels(device, tmp_path):
    """Two batches are recorded when building the third is interrupted, with one in flight."""
    model = build(device, **MODELS["projection"])
    wanted = three_batches(model, Engines(fused=Float32Engine))

    def interrupted(batches):
        yield from itertools.islice(batches, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engines = Engines(fused=Float32Engine)
        three_batches(model, engines, resume=tmp_path / "p", change=interrupted)
    events = []
    engines = Engines(fused=RecordingEngine, events=events)
    found = three_batches(model, engines, resume=tmp_path / "p")
    assert events == ["begin 2", "finish 2"]
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


class ForbidWaits(TorchDispatchMode):
    """Fails on operations that would wait for a GPU, because the host needs a value or a shape."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
    allowed = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = (
            args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        )
        masked = any(torch.is_tensor(i) and i.dtype == torch.bool for i in indices)
        assert self.allowed or not (masked or name in self.OPERATIONS), name
        return function(*args, **(kwargs or {}))


class WithoutWaits(Float32Engine):
    """Launches without reading from the device; the host's copy says which targets count."""

    def _launched(self, batch):
        with ForbidWaits() as self.waits:
            yield from super()._launched(batch)

    def _kept(self, *args):
        self.waits.allowed = True
        try:
            return super()._kept(*args)
        finally:
            self.waits.allowed = False


def test_launching_does_not_wait_for_the_device(device):
    """Also where padding does not count. On a CPU, copies that would wait cannot be seen."""
    model = build(device, **MODELS["two layers"])
    stream, engines = StreamSettings(window=3, stripes=2), Engines(fused=WithoutWaits)
    found = evaluate_nine(model, engines, stream)
    wanted = evaluate_nine(model, Engines(fused=Float32Engine), stream)
    (engine,) = engines.made
    assert engine.chunks
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
