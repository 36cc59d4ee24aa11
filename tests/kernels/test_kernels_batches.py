"""Evaluations with several batches in flight; one alpha, because the interpreter is slow."""

import itertools

import kernel_device
import pytest
import torch
from tiny_evaluation import MODELS, Float32Worker, assert_same, build, evaluated
from torch.utils._python_dispatch import TorchDispatchMode

from afterdrop import kernels
from afterdrop.evaluation.engines.text import StreamSettings
from afterdrop.evaluation.text_windows import Windows

pytestmark = kernel_device.quiet
device = kernel_device.device


ONE_BY_ONE = StreamSettings(time=3, stripes=1, windows=1)  # three batches
ORDER = ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "finish 2"]


class NotedWorker(Float32Worker):
    """Records the events of each batch; `change` is applied to the results of one of them."""

    change = staticmethod(lambda found: found)
    changed = 0  # its number

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.events, self.first_budget = [], self.budget

    def begin(self, batch, number):
        self.events.append(f"begin {number}")
        results = super().begin(batch, number)
        return lambda: self.events.append(f"finish {number}") or results()

    def _windows(self, batch, *args):
        found = super()._windows(batch, *args)
        return self.change(found) if self.chunks == self.changed + 1 else found

    def _sampled(self, batch, number):
        self.events.append(f"plain {number}")
        return super()._sampled(batch, number)


def too_low(found):
    return {**found, "mc_held": torch.full_like(found["mc_held"], -200.0)}


def no_memory(found):
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_kernel(found):
    raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")


@pytest.mark.parametrize(
    ("change", "changed", "plain"),
    [
        (too_low, 0, [0]),
        (too_low, 1, [1]),
        (no_memory, 0, []),
        (no_memory, 1, []),
        (no_kernel, 0, [0, 1, 2]),
        (no_kernel, 1, [1, 2]),  # the first, already in flight, is not lost
    ],
)
@pytest.mark.filterwarnings("ignore:.*continues without kernels")
def test_a_failure_in_one_batch_does_not_affect_the_others(change, changed, plain, device):
    model = build(device, **MODELS["projection"])
    wanted, _ = evaluated(model, Float32Worker, ONE_BY_ONE, alphas=(1,))
    kind = type("Changed", (NotedWorker,), {"change": staticmethod(change), "changed": changed})
    found, worker = evaluated(model, kind, ONE_BY_ONE, alphas=(1,))
    assert_same(found, wanted, kernel_device.within(device, 1e-5, 5e-3))
    expected = list(ORDER)
    for number in plain:
        expected.insert(expected.index(f"finish {number}") + 1, f"plain {number}")
    assert worker.events == expected
    assert (worker.budget < worker.first_budget) == (change is no_memory)


def test_an_interrupted_evaluation_resumes_with_the_kernels(device, tmp_path, monkeypatch):
    """Two batches are recorded when building the third is interrupted, with one in flight."""
    model = build(device, **MODELS["projection"])
    wanted, _ = evaluated(model, Float32Worker, ONE_BY_ONE, alphas=(1,))
    original = Windows.__iter__

    def ending(self):
        yield from itertools.islice(original(self), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(Windows, "__iter__", ending)
    with pytest.raises(KeyboardInterrupt):
        evaluated(model, Float32Worker, ONE_BY_ONE, alphas=(1,), resume=tmp_path / "p")
    monkeypatch.setattr(Windows, "__iter__", original)
    found, worker = evaluated(model, NotedWorker, ONE_BY_ONE, alphas=(1,), resume=tmp_path / "p")
    assert worker.events == ["begin 2", "finish 2"]
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


class WithoutWaits(Float32Worker):
    """Launches without reading from the device; the host's copy says which targets count."""

    def _launch(self, batch):
        with ForbidWaits() as self.waits:
            return super()._launch(batch)

    def _kept(self, *args):
        self.waits.allowed = True
        try:
            return super()._kept(*args)
        finally:
            self.waits.allowed = False


def test_launching_does_not_wait_for_the_device(device, monkeypatch):
    """Also where padding does not count. On a CPU, copies that would wait cannot be seen."""
    monkeypatch.setattr(kernels, "why_not", lambda device: None)  # use every kernel
    model = build(device, **MODELS["two layers"])
    stream = StreamSettings(time=3, stripes=2, windows=2)
    found, worker = evaluated(model, WithoutWaits, stream)
    wanted, _ = evaluated(model, Float32Worker, stream)
    assert worker.chunks and not worker.plain
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
