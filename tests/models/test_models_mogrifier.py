"""Mogrifier rounds: sizes, initialisation, gradients, and what they must leave alone.

Values are compared with the oracle in `test_models_language_model`, with every site and option.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import afterdrop as ad
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import Request, StreamSettings
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.masks.uniforms import Plan
from afterdrop.models import (
    LanguageModel,
    LanguageModelConfig,
    LSTMLayer,
    ModelError,
    count_parameters,
    sizes_within,
)
from afterdrop.models.cell import INPUT_GATES, gate_count
from afterdrop.models.mogrified_recurrence import mogrified_recurrence
from afterdrop.models.mogrifier import mogrify, round_sizes
from afterdrop.models.unrolled import unrolled_recurrence
from oracles import lstm as oracle

SMALL = LanguageModelConfig(
    7, (6, 6), 5, mogrifier_rounds=5, mogrifier_rank=2,
    input_dropout=0.3, state_dropout=0.3, output_dropout=0.3,
)  # fmt: skip


@pytest.mark.parametrize(
    "budget, vocabulary, layers, ratio, tied, rounds, rank, wanted",
    [
        (24_000_000, 10_001, 2, 1.0, True, 5, 84, (912, 912, 23_987_393)),
        (24_000_000, 10_001, 2, 1.0, True, 4, 84, (919, 919, 23_963_736)),
        (24_000_000, 10_001, 2, 1.0, True, 4, 64, (927, 927, 23_994_272)),
        (24_000_000, 10_001, 2, 1.0, True, 2, 84, (935, 935, 23_988_076)),
        (24_000_000, 10_001, 2, 1.0, True, 6, 90, (901, 901, 23_973_898)),
        (35_000_000, 33_279, 2, 0.1993194960596213, True, 6, 48, (1374, 274, 34_978_845)),
        (35_000_000, 33_279, 2, 0.3530770457779424, True, 0, 0, (1222, 431, 34_939_122)),
        (48_000_000, 206, 4, 1.0, False, 6, 79, (1160, 1160, 47_982_446)),
        (96_000_000, 206, 4, 1.0, False, 5, 61, (1687, 1687, 95_943_270)),
    ],
)
def test_budget_gives_the_published_sizes(
    budget, vocabulary, layers, ratio, tied, rounds, rank, wanted
):
    sizes = sizes_within(
        budget, vocabulary, layers, embedding_ratio=ratio, tied=tied,
        mogrifier_rounds=rounds, mogrifier_rank=rank,
    )  # fmt: skip
    assert sizes == wanted


@pytest.mark.parametrize(
    "ratio, rounds, rank, wanted",
    [
        (0.1993194960596213, 6, 48, (1366, 272, 34_991_825)),
        (0.3530770457779424, 0, 0, (1211, 428, 34_997_757)),
    ],
)
def test_budget_gives_the_published_sizes_of_mixtures(ratio, rounds, rank, wanted):
    sizes = sizes_within(
        35_000_000, 33_279, 2, embedding_ratio=ratio, softmax_components=2,
        mogrifier_rounds=rounds, mogrifier_rank=rank,
    )  # fmt: skip
    assert sizes == wanted


def test_the_gates_of_ptb_have_the_published_number_of_parameters():
    config = LanguageModelConfig(10_001, (912, 912), mogrifier_rounds=5, mogrifier_rank=84)
    without = dataclasses.replace(config, mogrifier_rounds=0)
    assert count_parameters(config) - count_parameters(without) == 1_541_280


def make_layer(shape, gate, rounds, rank):
    """x, h, c, W_x, W_h, b and the tensors of the rounds of a layer, as leaves."""
    time, batch, inputs, hidden = shape
    rows = gate_count(gate) * hidden
    shapes = [(time, batch, inputs), (batch, hidden), (batch, hidden)]
    shapes += [(rows, inputs), (rows, hidden), (rows,)]
    for read, gated in round_sizes(rounds, inputs, hidden):
        shapes += [(rank, read), (gated, rank), (gated,)] if rank else [(gated, read), (gated,)]
    return [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]


def as_rounds(tensors, rank):
    size = 3 if rank else 2
    parts = [tensors[at : at + size] for at in range(0, len(tensors), size)]
    return [(tuple(part[:-1]), part[-1]) for part in parts]


def fast(gate, masks, rank, x, h, c, w_x, w_h, b, *tensors):
    rounds = as_rounds(tensors, rank)
    return mogrified_recurrence(x, (h, c), (w_x, w_h, b), rounds, gate, masks)


def plain(gate, masks, rank, x, h, c, w_x, w_h, b, *tensors):
    rounds = as_rounds(tensors, rank)

    def gates(x, h):
        x, h = mogrify(x, h, rounds)
        return x @ w_x.t() + h @ w_h.t() + b

    return unrolled_recurrence(x, (h, c), gates, gate, masks)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(INPUT_GATES),
    st.tuples(*[st.integers(1, 4)] * 4),
    st.integers(1, 6),
    st.integers(0, 2),
    st.sampled_from([None, "sequence", "step"]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_the_hand_written_gradient_is_that_of_autograd(
    gate, shape, rounds, rank, sharing, update, seed
):
    torch.manual_seed(seed)
    arrays, (time, batch, _, hidden) = make_layer(shape, gate, rounds, rank), shape
    size = (batch, hidden) if sharing == "sequence" else (time, batch, hidden)
    drawn = (torch.rand(2, *size, dtype=torch.float64) > 0.4) / 0.6
    masks = (None if sharing is None else drawn[0], drawn[1] if update else None)
    dy, dc = (torch.randn(s, dtype=torch.float64) for s in ((time, batch, hidden), (batch, hidden)))
    found = []
    for form in (fast, plain):
        y, c = form(gate, masks, rank, *arrays)
        found.append([y, c, *torch.autograd.grad((y * dy).sum() + (c * dc).sum(), arrays)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)
    with torch.no_grad():
        torch.testing.assert_close(fast(gate, masks, rank, *arrays), tuple(found[1][:2]))


@pytest.mark.parametrize("rank", [0, 2])
def test_gradients_are_the_slopes_of_the_oracle(rank):
    """In a random direction of the input, the state and each parameter."""
    torch.manual_seed(3)
    layer = LSTMLayer(3, 4, mogrifier_rounds=3, mogrifier_rank=rank).double()
    for bias in layer.mogrifier.bias:
        torch.nn.init.normal_(bias)
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((3, 2, 3), (2, 4), (2, 4))]
    leaves = [part.requires_grad_() for part in (*inputs, *layer.parameters())]
    x, h, c = inputs
    gradients = torch.autograd.grad(layer(x, (h, c))[0].sum(), leaves)
    names = [name for name, _ in layer.named_parameters()]
    for at, (leaf, gradient) in enumerate(zip(leaves, gradients)):
        direction = torch.randn_like(leaf)
        sums = []
        for step in (1e-6, -1e-6):
            moved = [part.detach() for part in leaves]
            moved[at] = moved[at] + step * direction
            parameters = {name: p.numpy() for name, p in zip(names, moved[3:])}
            sums.append(oracle.layer(*(p.numpy() for p in moved[:3]), parameters)[0].sum())
        slope = (sums[0] - sums[1]) / 2e-6
        assert (gradient * direction).sum().item() == pytest.approx(slope, abs=1e-7), at


def test_second_derivatives_are_refused_not_wrong():
    arrays = make_layer((2, 1, 2, 2), "capped", 2, 1)
    y, _ = fast("capped", (None, None), 1, *arrays)
    with pytest.raises(ModelError, match="create_graph"):
        torch.autograd.grad(y.sum(), arrays[0], create_graph=True)


def test_low_rank_is_the_full_matrix_that_is_its_product():
    torch.manual_seed(0)
    x, h = torch.randn(3, 5), torch.randn(3, 4)
    rounds = [
        ((torch.randn(2, 4), torch.randn(5, 2)), torch.randn(5)),
        ((torch.randn(2, 5), torch.randn(4, 2)), torch.randn(4)),
    ]
    full = [((up @ down,), bias) for (down, up), bias in rounds]
    torch.testing.assert_close(mogrify(x, h, rounds), mogrify(x, h, full))


def test_without_rounds_nothing_changes_and_zero_weights_are_the_identity():
    plain = LanguageModel(dataclasses.replace(SMALL, mogrifier_rounds=0)).eval()
    model = LanguageModel(SMALL).eval()
    assert not [name for name, _ in plain.named_parameters() if "mogrifier" in name]
    missing = model.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing and all("mogrifier" in name for name in missing)
    for layer in model.stack.layers:
        for parameter in layer.mogrifier.parameters():
            torch.nn.init.zeros_(parameter)  # every gate is 2σ(0) = 1
    tokens = torch.randint(7, (2, 6))
    torch.testing.assert_close(model(tokens), plain(tokens))


def test_dropped_units_stay_zero_through_all_rounds():
    x, h = torch.ones(1, 4), torch.tensor([[1.0, 0.0, 2.0]])
    layer = LSTMLayer(4, 3, mogrifier_rounds=5, mogrifier_rank=2)
    x, h = mogrify(x, h, layer.mogrifier.rounds)
    assert h[0, 1] == 0 and bool((h[0, ::2] > 0).all())
    assert bool((x < 8).all()) and bool((h < 8).all())


def test_initialisation_statistics():
    low = LSTMLayer(300, 200, mogrifier_rounds=2, mogrifier_rank=50).mogrifier
    for (down, up), bias in low.rounds:
        fan_in = down.shape[1]
        for factor in (down, up):
            assert factor.abs().max() <= 2 * (fan_in * 50) ** -0.25 + 1e-6
        # 60,000 correlated entries; over seeds the standard deviation of this is below 1 percent.
        assert abs((up @ down).std().item() * fan_in**0.5 / 0.774 - 1) < 0.04
        assert not bias.any()
    full = LSTMLayer(300, 200, mogrifier_rounds=2).mogrifier
    for (weight,), bias in full.rounds:
        assert abs(weight.std().item() * weight.shape[1] ** 0.5 - 1.003) < 0.015
        assert not bias.any()


def test_rounds_add_no_dropout_site():
    tokens = torch.randint(7, (2, 4))
    plain = LanguageModel(dataclasses.replace(SMALL, mogrifier_rounds=0))
    sites = [
        [(site.name, site.rate) for site in ad.find_sites(model, tokens)]
        for model in (LanguageModel(SMALL), plain)
    ]
    assert sites[0] == sites[1] and len(sites[0]) >= 5


@pytest.mark.parametrize("carry", ["deterministic", "sampled"])
def test_the_family_on_a_text_is_that_of_the_model_and_the_stream_predictor(carry):
    torch.manual_seed(1)
    model = LanguageModel(SMALL).eval()
    text = torch.randint(7, (33,))
    stream, member = StreamSettings(window=8, carry=carry), ad.Member(0.5, 1.0)
    request = Request(ad.Grid((0.5,), (0, 1)), Plan(4), stream=stream)
    scores = run_text(model, text, 0, request, Execution(), lines=False)
    inputs = torch.cat([torch.tensor([0]), text[:-1]])
    with torch.no_grad():
        exact = F.cross_entropy(model(inputs[None])[0][0], text, reduction="none").double()
    torch.testing.assert_close(scores.values(ad.DET).whole, exact, rtol=1e-4, atol=1e-5)
    predict = ad.StreamPredictor(model, member, num_samples=4, stream=stream)
    rows = torch.cat([predict(part.unsqueeze(0))[0] for part in inputs.split(8)])
    expected = F.nll_loss(rows, text, reduction="none").double()
    torch.testing.assert_close(scores.values(member).whole, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, exact, atol=1e-3)
