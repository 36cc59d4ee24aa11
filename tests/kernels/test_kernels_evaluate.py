"""`FusedLanguageWorker` against `LanguageWorker`: every tensor of the scores.

Operands are float32 here, so both differ by rounding alone: within 1e-5 (from states that tf32
products carried: 5e-3), but partitions, where 1/T is up to 16, within 50 times that. Differences of
halves come from a few rungs of a ladder: within 100 times, beyond the lowest temperature 1000.
"""

import dataclasses
import importlib
import itertools

import kernel_device
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import afterdrop as ad
from afterdrop import kernels
from afterdrop.data.stream import EvalStripes
from afterdrop.errors import DataError
from afterdrop.evaluate.evaluate import Settings, run_evaluation
from afterdrop.evaluate.fused_features import SampledFeatures
from afterdrop.evaluate.fused_language import FusedLanguageWorker
from afterdrop.evaluate.language import LanguageWorker, StreamSettings
from afterdrop.evaluate.passes import Reader
from afterdrop.evaluate.protocol import Protocol
from afterdrop.evaluate.windows import Windows
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.models.fused import Copies, DeterministicPass

pytestmark = kernel_device.quiet
device = kernel_device.device
V = 13
HALF_NODES = 11  # then T = 1


class Float32Worker(FusedLanguageWorker):
    dtype = torch.float32
    chunks = plain = 0  # of the kernels, and batches of the plain form

    def _windows(self, *args):
        self.chunks += 1
        return super()._windows(*args)

    def _shrinking(self, *args):
        self.plain += 1
        return super()._shrinking(*args)


def build(device, **options):
    torch.manual_seed(1)
    model = LanguageModel(LanguageModelConfig(vocabulary=V, **options)).eval().to(device)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights hardly tell one mask from another
            parameter.mul_(3)
    return model


def evaluated(model, kind, stream, *, fused_states=False, alphas=(0, 1), resume=None):
    """The scores of a text of 9 tokens, and the worker that made them."""
    text = torch.randint(1, V, (9,), generator=torch.Generator().manual_seed(0))
    stripes = EvalStripes(text, 0, stream.stripes, stream.time, lines=False)
    passes = None
    if fused_states:
        copies = Copies(model, torch.float32)
        copies.pack()
        passes = DeterministicPass(copies, stream.stripes, stream.time)
    settings = Settings(ad.Grid(alphas, (0, 0.5, 1)), Plan(4), temperatures=(0.125, 8))
    settings = dataclasses.replace(settings, stream=stream.named(), reader=Reader(0, -100))
    settings = dataclasses.replace(settings, resume=resume)
    made = []

    def worker(*args):
        made.append(kind(*args, stream=stream))
        return made[0]

    windows = Windows(model, stripes, stream.windows, passes)
    return run_evaluation(model, windows, settings, worker, len(text)), made[0]


def assert_same(found, wanted, tolerance=1e-5):
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        mine = found.tensors[name]
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape, name
        near = tolerance * (50 if name.endswith("partition") else 1)
        if name.endswith("half"):
            # They come from every fourth rung of a ladder, and differ a lot with two samples each.
            # The last nodes lie beyond the lowest temperature.
            near = 100 * tolerance
            outer = slice(HALF_NODES - 3, HALF_NODES)
            assert (mine - tensor)[..., outer, :].abs().max() < 1000 * tolerance
            mine, tensor = (
                torch.cat([t[..., : outer.start, :], t[..., outer.stop :, :]], -2)
                for t in (mine, tensor)
            )
        torch.testing.assert_close(mine, tensor, rtol=near, atol=near, msg=lambda m, n=name: n + m)


MODELS = {
    "two layers": {
        "hidden_sizes": (6, 6),
        "input_dropout": 0.4,
        "inter_layer_dropout": 0.2,
        "state_dropout": 0.3,
        "output_dropout": 0.5,
    },
    "projection": {
        "hidden_sizes": (6,),
        "embedding_size": 4,
        "input_dropout": 0.4,
        "input_sharing": "sequence",
        "state_dropout": 0.3,
        "state_sharing": "step",
        "output_dropout": 0.5,
        "projection_dropout": 0.2,
    },
    "untied plain stack": {
        "hidden_sizes": (5, 5),
        "tied": False,
        "stacking": "plain",
        "input_gate": "plain",
        "state_dropout": 0.3,
        "output_dropout": 0.4,
        "output_sharing": "sequence",
    },
}


@pytest.mark.parametrize(
    ("name", "lifetime"),
    [
        ("two layers", "window"),
        ("two layers", "stream"),
        ("projection", "stream"),
        ("untied plain stack", "window"),
    ],
)
def test_all_scores_are_those_of_the_plain_worker(name, lifetime, device):
    model = build(device, **MODELS[name])
    stream = StreamSettings(time=3, stripes=2, windows=2, lifetime=lifetime)
    alphas = (0, 0.25, 1) if lifetime == "window" else (0, 1)
    found, worker = evaluated(model, Float32Worker, stream, fused_states=True, alphas=alphas)
    wanted, _ = evaluated(model, LanguageWorker, stream, alphas=alphas)
    assert (worker.chunks, worker.plain) == (1, 0)  # all windows at once
    assert_same(found, wanted, kernel_device.within(device, 1e-5, 5e-3))


def test_chunks_of_windows_and_targets_change_nothing(device, monkeypatch):
    """One window, of which one is all padding, and two targets at a time."""
    model = build(device, **MODELS["projection"])
    stream = StreamSettings(time=4, stripes=2, windows=2)
    whole, _ = evaluated(model, Float32Worker, stream)
    module = importlib.import_module(FusedLanguageWorker.__module__)
    monkeypatch.setattr(module, "_ROWS", 1)
    monkeypatch.setattr(module, "_LOGITS", 2 * 4 * 16)
    monkeypatch.setattr(module, "_MEANS", 3 * 2 * 16)  # three targets
    found, worker = evaluated(model, Float32Worker, stream)
    assert (worker.chunks, worker.plain, worker.targets_at_once) == (4, 0, 2)
    assert_same(found, whole)


@pytest.mark.parametrize("value", [-200.0, float("-inf")])
def test_too_low_log_probabilities_go_to_the_plain_worker(value, device):
    """Below exp(−150), or a class that is masked: sums underflow. Samples agree to the bit."""
    model = build(device, **MODELS["projection"])
    with torch.no_grad():
        model.softmax_bias[0] = value  # never a target
    stream = StreamSettings(time=3, stripes=2, windows=2)
    found, worker = evaluated(model, Float32Worker, stream, alphas=(1,))
    wanted, _ = evaluated(model, LanguageWorker, stream, alphas=(1,))
    assert worker.plain > 0
    for name, tensor in wanted.tensors.items():
        same = found.tensors[name].nan_to_num(7), tensor.nan_to_num(7)
        if name.startswith("det_"):  # the kernels' pass
            near = kernel_device.within(device, 1e-4, 1e-2)
            torch.testing.assert_close(*same, rtol=near, atol=near)
        else:
            assert torch.equal(*same), name


def test_logits_that_are_no_numbers_are_refused(device):
    model = build(device, **MODELS["projection"])
    stream = StreamSettings(time=3, stripes=2, windows=2)
    with torch.no_grad():
        model.softmax_bias[3] = float("nan")
    with pytest.raises(DataError, match="NaN or infinite logits"):
        evaluated(model, Float32Worker, stream)


def test_carried_states_are_those_of_the_model(device):
    """Three windows without dropout, states copied: within 1e-6 (tf32: 2e-3) of the norm."""
    model = build(device, **MODELS["two layers"])
    copies = Copies(model, torch.float32)
    copies.pack()
    passes = DeterministicPass(copies, 2, 3)
    tokens = torch.randint(V, (3, 2, 3), device=device)
    near = kernel_device.within(device, 1e-6, 2e-3)
    with torch.no_grad():
        for _ in range(2):  # the second time after a reset
            passes.reset()
            state, held = None, []
            for window in tokens:
                y, state = model.features(window, state)
                out = passes.run(window)[..., :6].transpose(0, 1)
                assert kernel_device.relative(out, y) < near
                held.append((state, passes.state))
            for wanted, found in held:  # later windows did not overwrite them
                for pair, ours in zip(wanted, found):
                    assert all(kernel_device.relative(b, a) < near for a, b in zip(pair, ours))


@pytest.mark.parametrize("gate", range(4))
def test_a_gate_that_is_no_number_shows_in_every_sample(gate, device):
    """The plain form would report it; here `require_held` must have something to see."""
    model = build(device, **MODELS["two layers"])
    with torch.no_grad():
        model.stack.layers[0].bias[6 * gate + 2] = torch.nan
    copies = Copies(model, torch.float32)
    copies.pack()
    grid = ad.Grid((1,), (0.5, 1))
    protocol = Protocol("valid", grid, Plan(4), 0.125, 8.0, V, "", batched=True, shared=False)
    sampled = SampledFeatures(copies, protocol, StreamSettings())
    zeros = torch.zeros(1, 6, device=device)
    tokens = torch.ones(1, 2, dtype=torch.int64, device=device)
    _, plain = sampled.run(tokens, ((zeros, zeros),) * 2, 0)
    seen = plain.view(2, 1, 2, 4, -1)[:, :, 1].isnan()  # the second step has what c was
    assert seen.any(-1).all()


# Several batches under way; one alpha, as the interpreter takes a while for each

ONE_BY_ONE = StreamSettings(time=3, stripes=1, windows=1)  # three batches
ORDER = ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "finish 2"]


class NotedWorker(Float32Worker):
    """Notes what happens to which batch; `change` is done to what a batch has launched."""

    change = staticmethod(lambda found: found)
    changed = 0  # the batch

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
        (no_kernel, 1, [1, 2]),  # the first, which is under way, is not lost
    ],
)
@pytest.mark.filterwarnings("ignore:.*goes on without kernels")
def test_what_goes_wrong_in_a_batch_leaves_the_others(change, changed, plain, device):
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


def test_an_interrupted_evaluation_goes_on_with_the_kernels(device, tmp_path, monkeypatch):
    """Two batches are recorded when the third cannot be made, although one was under way."""
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


class Questions(TorchDispatchMode):
    """Refuses operations that would wait for a GPU: their result decides a value or a shape."""

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


class Unasked(Float32Worker):
    """Launches without a question to the device; which targets count, the CPU's copy says."""

    def _launch(self, batch):
        with Questions() as self.questions:
            return super()._launch(batch)

    def _kept(self, *args):
        self.questions.allowed = True
        try:
            return super()._kept(*args)
        finally:
            self.questions.allowed = False


def test_launching_asks_the_device_for_nothing(device, monkeypatch):
    """Also where padding does not count. A CPU cannot show copies that wait."""
    monkeypatch.setattr(kernels, "why_not", lambda device: None)  # every kernel there is
    model = build(device, **MODELS["two layers"])
    stream = StreamSettings(time=3, stripes=2, windows=2)
    found, worker = evaluated(model, Unasked, stream)
    wanted, _ = evaluated(model, Float32Worker, stream)
    assert worker.chunks and not worker.plain
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
