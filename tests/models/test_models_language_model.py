"""The whole language model against the oracle, its initialisation, configuration and budget."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from watcher import Watcher

from afterdrop.models import (
    Classifier,
    ClassifierConfig,
    LanguageModel,
    LanguageModelConfig,
    ModelError,
    count_parameters,
    sizes_within,
)
from oracles import lstm as oracle

RATES = ("input", "inter_layer", "state", "update", "output", "projection")
SHARINGS = st.sampled_from(["sequence", "step"])


@st.composite
def configurations(draw):
    hidden, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tied = draw(st.booleans())
    sites = {f"{site}_dropout": draw(st.sampled_from([0.0, 0.4])) for site in RATES}
    sites |= {f"{site}_sharing": draw(SHARINGS) for site in RATES}
    return LanguageModelConfig(
        draw(st.integers(2, 5)),
        (hidden,) * layers,
        draw(st.sampled_from([None, 2])),
        tied=tied,
        input_gate=draw(st.sampled_from(["capped", "tied", "plain"])),
        stacking=draw(st.sampled_from(["skip", "residual", "plain"])),
        layer_norm=hidden > 1 and draw(st.booleans()),
        mogrifier_rounds=draw(st.integers(0, 5)),
        mogrifier_rank=draw(st.integers(0, 2)),
        embedding_dropout=draw(st.sampled_from([0.0, 0.4])),
        softmax_components=draw(st.sampled_from([1, 1, 3])),
        embedding_rows=draw(st.sampled_from(["input", "input_and_softmax"])) if tied else "input",
        **sites,
    )


def oracle_masks(watcher, time):
    """The watcher's masks under the oracle's names and in full shape."""
    names = {
        "stack.input_dropout": "input",
        "output_dropout": "output",
        "projection_dropout": "projection",
        "mixture.projection_dropout": "projection",
        "embedding_dropout": "embedding",
    }
    masks = {}
    for name, mask in watcher.masks.items():
        parts = name.split(".")
        if parts[:2] == ["stack", "inter_layer_dropout"]:
            key = ("inter", int(parts[2]) + 1)
        elif parts[:2] == ["stack", "layers"]:
            key = (parts[3].removesuffix("_dropout"), int(parts[2]))
            mask = mask.expand(time, *mask.shape[-2:])
        else:
            key = names[name]
        masks[key] = mask.numpy()
    return masks


@settings(max_examples=60, deadline=None)
@given(configurations(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**20))
def test_whole_model_with_every_site_equals_the_oracle(config, batch, time, seed):
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(config, generator).double()
    for layer in model.stack.layers:
        for bias in layer.mogrifier.bias:  # they start at 0, which would hide a missing one
            torch.nn.init.normal_(bias, generator=generator)
    tokens = torch.randint(config.vocabulary, (batch, time), generator=generator)
    state = tuple(
        tuple(torch.randn(2, *h.shape, generator=generator, dtype=torch.float64))
        for h, _ in model.initial_state(batch)
    )
    with Watcher(model, seed) as watcher:
        logits, after = model(tokens, state)
    assert not watcher.stray
    parameters = model.named_parameters()
    own = {n: p.detach().numpy() for n, p in parameters if not n.startswith("stack.")}
    layers = [
        {n: p.detach().numpy() for n, p in layer.named_parameters()} for layer in model.stack.layers
    ]
    wanted, wanted_state = oracle.language_model(
        tokens.numpy(), [[s.numpy() for s in pair] for pair in state], own, layers,
        config.input_gate, config.stacking, oracle_masks(watcher, time), config.embedding_rows,
    )  # fmt: skip
    np.testing.assert_allclose(logits.detach().numpy(), wanted, atol=1e-9)
    for pair, wanted_pair in zip(after, wanted_state):
        for got, want in zip(pair, wanted_pair):
            np.testing.assert_allclose(got.detach().numpy(), want, atol=1e-9)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())


FULL = LanguageModelConfig(
    7, (4, 4), 3, embedding_dropout=0.3, **{f"{site}_dropout": 0.5 for site in RATES}
)


def test_every_site_has_a_telling_name():
    model = LanguageModel(FULL)
    with Watcher(model) as watcher:
        model(torch.zeros(2, 3, dtype=torch.int64))
    assert list(watcher.masks) == [
        "embedding_dropout", "stack.input_dropout",
        "stack.layers.0.state_dropout", "stack.layers.0.update_dropout",
        "stack.inter_layer_dropout.0",
        "stack.layers.1.state_dropout", "stack.layers.1.update_dropout",
        "output_dropout", "projection_dropout",
    ]  # fmt: skip
    assert watcher.masks["embedding_dropout"].shape == (7, 1)


def test_features_then_output_is_the_model_and_output_is_linear():
    model = LanguageModel(FULL).eval()
    tokens = torch.randint(7, (2, 5))
    features, _ = model.features(tokens)
    assert features.shape == (2, 5, 3)
    torch.testing.assert_close(model.output(features), model(tokens)[0])
    torch.testing.assert_close(
        model.output(features.mean(0)), model.output(features).mean(0), atol=1e-6, rtol=1e-5
    )


def test_features_are_refused_where_the_softmax_is_masked_too():
    model = LanguageModel(dataclasses.replace(FULL, embedding_rows="input_and_softmax"))
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ModelError, match="embedding_rows"):
        model.features(tokens)
    model.eval().features(tokens)


@pytest.mark.parametrize("stacking", ["skip", "residual", "plain"])
def test_carried_state_makes_two_windows_one(stacking):
    model = LanguageModel(LanguageModelConfig(7, (4, 4), stacking=stacking))
    tokens = torch.randint(7, (3, 8))
    whole, after = model(tokens)
    first, state = model(tokens[:, :4])
    second, state = model(tokens[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(state, after)


def test_initialisation_statistics_and_reproducibility():
    config = LanguageModelConfig(2_000, (64, 64), 32, tied=False)
    model = LanguageModel(config, torch.Generator().manual_seed(1))
    for table in (model.embedding, model.softmax):
        # 64 000 draws: the standard error of the standard deviation is 0.3 percent.
        assert abs(table.std().item() * 32**0.5 - 1) < 0.012
        assert table.abs().max() <= 2 * 32**-0.5 / 0.8796256 + 1e-6
    assert not model.softmax_bias.any()
    torch.testing.assert_close(
        model.projection @ model.projection.t(), torch.eye(32), atol=1e-5, rtol=0
    )
    again = LanguageModel(config, torch.Generator().manual_seed(1))
    other = LanguageModel(config, torch.Generator().manual_seed(2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert not torch.equal(model.embedding, other.embedding)
    other.reset_parameters(torch.Generator().manual_seed(3))
    assert not torch.equal(model.embedding, other.embedding)


@pytest.mark.parametrize(
    "budget, vocabulary, layers, ratio, tied, wanted",
    [
        (24_000_000, 10_001, 4, 1.0, True, (723, 723, 23_979_620)),
        (10_000_000, 10_001, 1, 0.224374398589, True, (1194, 268, 9_997_549)),
        (10_000_000, 10_001, 1, 0.22973, True, (1186, 272, 9_974_361)),
        (24_000_000, 10_001, 2, 1.0, True, (951, 951, 23_998_976)),
        (27_000_000, 206, 4, 1.0, False, (911, 911, 26_947_586)),
        (46_000_000, 206, 4, 1.0, False, (1192, 1192, 45_978_030)),
    ],
)
def test_budget_gives_the_published_sizes(budget, vocabulary, layers, ratio, tied, wanted):
    sizes = sizes_within(budget, vocabulary, layers, embedding_ratio=ratio, tied=tied)
    assert sizes == wanted


def test_budget_of_wikitext2_has_the_published_count():
    config = LanguageModelConfig(33_279, (1227, 1227), 149)
    assert count_parameters(config) == 23_982_129
    assert sizes_within(24_000_000, 33_279, 2, embedding_ratio=149 / 1227)[:2] == (1227, 149)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("tied_gates", [False, True])
@pytest.mark.parametrize("rounds, rank", [(0, 0), (3, 0), (3, 7)])
def test_budget_is_kept_and_used(layer_norm, tied_gates, rounds, rank):
    options = {"layer_norm": layer_norm, "mogrifier_rounds": rounds, "mogrifier_rank": rank}
    sizes = sizes_within(50_000, 100, 2, tied_gates=tied_gates, embedding_ratio=0.5, **options)
    gate = "tied" if tied_gates else "capped"
    config = LanguageModelConfig(
        100, (sizes.hidden,) * 2, sizes.embedding, input_gate=gate, **options
    )
    assert sum(p.numel() for p in LanguageModel(config).parameters()) == sizes.parameters <= 50_000
    larger = dataclasses.replace(
        config, hidden_sizes=(sizes.hidden + 1,) * 2, embedding_size=round(0.5 * sizes.hidden + 0.5)
    )
    assert count_parameters(larger) > 50_000


def test_configuration_survives_json():
    written = json.dumps(dataclasses.asdict(FULL))
    assert LanguageModelConfig(**json.loads(written)) == FULL
    assert FULL.resolved() == FULL.resolved().resolved()
    assert None not in dataclasses.asdict(FULL.resolved()).values()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"vocabulary": 0}, "vocabulary is 0"),
        ({"vocabulary": True}, "vocabulary"),
        ({"hidden_sizes": ()}, "hidden_sizes"),
        ({"hidden_sizes": "44"}, "hidden_sizes"),
        ({"hidden_sizes": (4, -1)}, r"hidden_sizes\[1\]"),
        ({"hidden_sizes": (4, 5)}, "stacking='plain'"),
        ({"embedding_size": 1.5}, "embedding_size"),
        ({"tied": "false"}, "tied"),
        ({"stacking": "dense"}, "'skip'"),
        ({"input_gate": "open"}, "'capped'"),
        ({"forget_bias": float("nan")}, "forget_bias"),
        ({"mogrifier_rounds": -1}, "mogrifier_rounds is -1"),
        ({"mogrifier_rounds": 2.0}, "mogrifier_rounds"),
        ({"mogrifier_rank": True}, "mogrifier_rank"),
        ({"state_dropout": 1.0}, "state_dropout is 1.0"),
        ({"state_dropout": None}, "state_dropout"),
        ({"input_dropout": -0.1}, "input_dropout"),
        ({"input_sharing": None}, "input_sharing"),
        ({"state_sharing": "window"}, "'sequence'"),
        ({"embedding_dropout": "0.1"}, "embedding_dropout"),
        ({"tied": False, "embedding_rows": "input_and_softmax"}, "embedding_rows"),
    ],
)
def test_bad_configurations_say_what_is_wrong(change, words):
    with pytest.raises(ModelError, match=words):
        dataclasses.replace(FULL, **change)


@pytest.mark.parametrize(
    "tokens", [torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(1, 0).long()]
)
def test_bad_tokens_are_refused(tokens):
    with pytest.raises(ModelError, match="tokens is"):
        LanguageModel(FULL)(tokens)


@pytest.mark.parametrize("budget, ratio", [(10, 1.0), (1000, 0.0), (1000, 1.5), (0, 1.0)])
def test_impossible_budgets_are_refused(budget, ratio):
    with pytest.raises(ModelError, match=r"embedding_ratio|budget"):
        sizes_within(budget, 100, 1, embedding_ratio=ratio)


def test_classifier_is_a_chain_of_linear_relu_dropout():
    config = ClassifierConfig(12, 3, [5, 4], input_dropout=0.2, hidden_dropout=0.5)
    model = Classifier(config)
    with Watcher(model) as watcher:
        images = torch.randn(6, 1, 3, 4)
        logits = model(images)
    assert list(watcher.masks) == ["input_dropout", "hidden.0.2", "hidden.1.2"]
    x = images.flatten(1) * watcher.masks["input_dropout"]
    for k in range(2):
        linear = model.hidden[k][0]
        x = (x @ linear.weight.t() + linear.bias).clamp(min=0) * watcher.masks[f"hidden.{k}.2"]
    torch.testing.assert_close(logits, x @ model.output.weight.t() + model.output.bias)
    assert Classifier(ClassifierConfig(12, 3, ()))(images).shape == (6, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClassifierConfig(0, 3),
        lambda: ClassifierConfig(4, 3, (0,)),
        lambda: ClassifierConfig(4, 3, input_dropout=1),
        lambda: Classifier(ClassifierConfig(4, 3))(torch.zeros(2, 5)),
        lambda: Classifier(ClassifierConfig(4, 3))(torch.zeros(4)),
        lambda: Classifier(ClassifierConfig(4, 3))(torch.zeros(2, 4, dtype=torch.uint8)),
    ],
)
def test_classifier_errors(make):
    with pytest.raises(ModelError):
        make()
