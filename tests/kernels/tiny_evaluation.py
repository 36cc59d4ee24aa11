"""Evaluations small enough for the interpreter: language models on nine tokens."""

from functools import partial

import torch

import afterdrop as ad
from afterdrop.data import EvalStripes
from afterdrop.evaluation.engines.dispatch import Dispatcher, EngineMaker
from afterdrop.evaluation.engines.generic import GenericEngine, Operations
from afterdrop.evaluation.engines.model_passes import ModelPasses
from afterdrop.evaluation.engines.text import TextPasses
from afterdrop.evaluation.engines.text_fused import TextFusedEngine
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.text_windows import Windows
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.models.fused import Copies, DeterministicPass

V = 13
HALF_NODES = 11  # coarse nodes; T = 1 follows them


class Float32Engine(TextFusedEngine):
    """The fused engine with float32 operands; counts its chunks."""

    def __init__(self, *args, **options):
        super().__init__(*args, dtype=torch.float32, **options)
        self.chunks = 0

    def _windows(self, *args):
        self.chunks += 1
        return super()._windows(*args)


class PlainEngine(GenericEngine):
    """The generic engine; records the numbers of its batches."""

    def __init__(self, *args):
        super().__init__(*args)
        self.batches = []

    def run(self, batch, number):
        self.batches.append(number)
        return super().run(batch, number)


class Engines:
    """Chooses engines for `run_evaluation`, and keeps those that were made.

    Args:
        operations: Of one generic engine each, which come after the fused one.
        fused: The class of the fused engine; None to leave it out.
        options: Of the fused engine.
    """

    def __init__(self, *operations, fused=None, **options):
        self.operations, self.fused, self.options, self.made = operations, fused, options, []

    def __call__(self, model, protocol, likelihood, sites, memory):
        self.memory, self.budget = memory, memory.budget
        fused = partial(self._fused, model, protocol, likelihood, memory)
        candidates = [] if self.fused is None else [EngineMaker(fused, kernels=True)]
        for operations in self.operations or (Operations(),):
            make = partial(self._generic, model, protocol, likelihood, sites, memory, operations)
            candidates.append(EngineMaker(make, operations.kernels))
        return Dispatcher(candidates, memory, "the evaluation of samples"), None

    def _fused(self, *args):
        self.made.append(self.fused(*args, **self.options))
        return self.made[-1]

    def _generic(self, model, protocol, likelihood, sites, memory, operations):
        if protocol.request.stream is None:
            passes = ModelPasses(model, sites, protocol.request.batch_dim, operations.draw)
        else:
            passes = TextPasses(model, protocol, sites, operations)
        engine = PlainEngine(model, protocol, likelihood, sites, passes, memory, operations)
        self.made.append(engine)
        return engine


def build(device, **options):
    torch.manual_seed(1)
    model = LanguageModel(LanguageModelConfig(vocabulary=V, **options)).eval().to(device)
    with torch.no_grad():
        for parameter in model.parameters():  # with initial weights masks hardly differ
            parameter.mul_(3)
        model.softmax_bias.normal_()
    return model


def evaluate_nine(
    model,
    engines,
    stream,
    *,
    windows=2,
    alphas=(0, 1),
    fused_states=False,
    resume=None,
    change=lambda batches: batches,
):
    """The scores of a text of 9 tokens; `change` is applied to its batches."""
    text = torch.randint(1, V, (9,), generator=torch.Generator().manual_seed(0))
    stripes = EvalStripes(text, 0, stream.stripes, stream.window, lines=False)
    passes = None
    if fused_states:
        copies = Copies(model, torch.float32)
        copies.pack()
        passes = DeterministicPass(copies, stream.stripes, stream.window)
    request = Request(ad.Grid(alphas, (0, 0.5, 1)), Plan(4), temperatures=(0.125, 8), stream=stream)
    batches = change(Windows(model, stripes, windows, passes))
    execution = Execution(resume=resume)
    return run_evaluation(model, batches, request, execution, len(text), engines)


def assert_same(found, wanted, tolerance=1e-5):
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        mine = found.tensors[name]
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape, name
        near = tolerance * (50 if name.endswith("partition") else 1)
        if name.endswith("half"):
            # Interpolated from every fourth power of the ladder, and large with two samples per
            # half. The last nodes lie beyond the lowest temperature.
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
    "Mogrifier": {
        "hidden_sizes": (6, 6),
        "embedding_size": 4,
        "mogrifier_rounds": 3,
        "mogrifier_rank": 2,
        "input_dropout": 0.4,
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
    "room for one bias": {"hidden_sizes": (31,), "state_dropout": 0.3, "output_dropout": 0.5},
    "embedding rows": {
        "hidden_sizes": (6,),
        "embedding_size": 4,
        "embedding_dropout": 0.4,
        "input_dropout": 0.3,
        "output_dropout": 0.2,
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
