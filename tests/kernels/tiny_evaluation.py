"""Evaluations small enough for the interpreter: language models on nine tokens."""

import dataclasses

import torch
from afterdrop.evaluation.passes import Reader

import afterdrop as ad
from afterdrop.data import EvalStripes
from afterdrop.evaluation.api import Settings, run_evaluation
from afterdrop.evaluation.engines.text_fused import FusedLanguageWorker
from afterdrop.evaluation.text_windows import Windows
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.models.fused import Copies, DeterministicPass

V = 13
HALF_NODES = 11  # coarse nodes; T = 1 follows them


class Float32Worker(FusedLanguageWorker):
    dtype = torch.float32
    chunks = plain = 0  # chunks by the kernels, batches by the plain form

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
        for parameter in model.parameters():  # with initial weights masks hardly differ
            parameter.mul_(3)
        model.softmax_bias.normal_()
    return model


def evaluated(model, kind, stream, *, fused_states=False, alphas=(0, 1), resume=None):
    """The scores of a text of 9 tokens, and the worker that computed them."""
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
