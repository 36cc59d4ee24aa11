import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterdrop import recipes
from afterdrop.models.budget import count_parameters
from afterdrop.tune.checks import TuneError
from afterdrop.tune.search_space import Axis, Space, apply_point, own_point, published_space
from afterdrop.tune.study_settings import TuneSettings, plan_study

# The ranges of Melis et al., Mogrifier LSTM, appendix, with a wider learning rate.
PUBLISHED = {
    "optimiser.learning_rate": (0.001, 0.01, True),
    "objective.l2_penalty": (5e-6, 1e-3, True),
    "model.input_dropout": (0.0, 0.9, False),
    "model.inter_layer_dropout": (0.0, 0.95, False),
    "model.state_dropout": (0.0, 0.8, False),
    "model.output_dropout": (0.0, 0.95, False),
    "model.embedding_ratio": (0.0, 2.0, False),
}


def ranges(recipe: str) -> dict:
    space = published_space(recipes.load(recipe).config)
    return {axis.name: (axis.low, axis.high, axis.log) for axis in space}


@given(st.floats(0, 1), st.floats(1e-6, 1), st.floats(1.01, 1e4), st.booleans())
def test_an_axis_maps_the_unit_interval_onto_its_range(unit, low, factor, log):
    axis = Axis("model.input_dropout", low, low * factor, log)
    assert axis.low <= axis.at(unit) <= axis.high
    assert axis.unit(axis.at(unit)) == pytest.approx(unit, abs=1e-9)


def test_the_default_spaces_are_the_published_ones():
    assert ranges("ptb-24m") == PUBLISHED
    one_layer = {n: r for n, r in PUBLISHED.items() if n != "model.inter_layer_dropout"}
    assert ranges("ptb-10m") == one_layer
    latent = {"model.projection_dropout": PUBLISHED["model.output_dropout"]}
    assert ranges("ptb-24m-mos2-fast") == PUBLISHED | latent
    enwik8 = ranges("enwik8-27m")
    assert enwik8["model.input_dropout"] == (0.0, 0.2, False)
    assert enwik8["model.state_dropout"] == enwik8["model.output_dropout"] == (0.0, 0.25, False)
    assert "model.embedding_ratio" not in enwik8
    assert "model.embedding_ratio" not in ranges(
        "pydoc-small"
    )  # without a budget the sizes are fixed
    assert set(ranges("mnist-mlp")) == {
        "optimiser.learning_rate",
        "objective.l2_penalty",
        "model.input_dropout",
        "model.hidden_dropout",
    }


def test_mogrifiers_also_search_rounds_and_rank_and_keep_their_budget():
    rounds = {"model.mogrifier_rounds": (0, 6, False), "model.mogrifier_rank": (-20, 100, False)}
    assert ranges("ptb-24m-mogrifier") == PUBLISHED | rounds
    config = recipes.load("ptb-24m-mogrifier").config
    for values, wanted in (((5.4, 83.6), (5, 84)), ((0.2, -20.0), (0, 0)), ((2.6, -3.0), (3, 0))):
        point = dict(zip(rounds, values))
        model = apply_point(config, point).model.language_model(10_001)
        assert (model.mogrifier_rounds, model.mogrifier_rank) == wanted
        assert 23_900_000 < count_parameters(model) <= 24_000_000


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_has_a_space_and_lies_in_it(name):
    settings = plan_study(name)
    # The larger enwik8 model of 2017 has no L2 penalty, and more output dropout than the range.
    inside = own_point(settings.config, settings.space) is not None
    assert inside == (name != "enwik8-46m")


def test_every_point_has_the_budget_of_the_recipe():
    config = recipes.load("ptb-10m").config
    counts = []
    for ratio in (0.0, 0.1, 0.5, 1.0, 1.5, 2.0):
        point = {"model.embedding_ratio": ratio}
        counts.append(count_parameters(apply_point(config, point).model.language_model(10_001)))
    assert all(9_800_000 < count <= 10_000_000 for count in counts)


def test_a_budget_determines_the_sizes_of_a_small_recipe():
    settings = plan_study("pydoc-small", budget=600_000)
    assert "model.embedding_ratio" in {axis.name for axis in settings.space}
    for ratio in (0.2, 2.0):
        config = apply_point(settings.config, {"model.embedding_ratio": ratio})
        sizes = config.model.language_model(3000)
        assert len(sizes.hidden_sizes) == 2
        assert 590_000 < count_parameters(sizes) <= 600_000


def test_ranges_can_be_changed_added_and_fixed():
    axis = Axis.parse("optimiser.learning_rate=0.0001:0.1:log")
    settings = plan_study("digits-mlp", ranges=[axis], fixed=["model.input_dropout"])
    names = [a.name for a in settings.space]
    assert settings.space.axes[0] == axis
    assert names == ["optimiser.learning_rate", "objective.l2_penalty", "model.hidden_dropout"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axis("x", 1, 1), "lower"),
        (lambda: Axis("x", 0, 1, log=True), "log scale"),
        (lambda: Axis.parse("model.input_dropout"), "LOW:HIGH"),
        (lambda: Axis.parse("x=0:1:sqrt"), "LOW:HIGH"),
        (lambda: Axis.parse("x=3:1"), "lower"),
        (lambda: Space(()), "empty"),
        (lambda: plan_study("digits-mlp", fixed=["model.tied"]), "not searched"),
        (lambda: plan_study("digits-mlp", ranges=[Axis("model.hiden", 0, 1)]), "did you mean"),
        (lambda: plan_study("digits-mlp", ranges=[Axis("model.input_dropout", 0, 2)]), "input"),
        (lambda: plan_study("digits-mlp", intervals=0), "intervals"),
        (lambda: plan_study("digits-mlp", minutes=0), "minutes"),
        (lambda: plan_study("digits-mlp", sampler="tpe"), "sampler"),
    ],
)
def test_bad_spaces_are_refused_before_any_trial(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_settings_of_another_schema_version_are_refused():
    content = plan_study("digits-mlp", intervals=4).to_dict()
    with pytest.raises(TuneError, match="schema version 1, this afterdrop reads 2"):
        TuneSettings.from_dict({**content, "version": 1})
