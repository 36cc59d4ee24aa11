import json

import pytest

from afterdrop.errors import AfterdropError
from afterdrop.train import ConfigError, ModelPlan, TrainConfig, differences


def test_json_and_back_is_the_same(text_config):
    content = json.loads(json.dumps(text_config.to_dict()))
    assert TrainConfig.from_dict(content) == text_config
    assert differences(TrainConfig.from_dict(content), text_config) == []


def test_override_changes_one_setting_and_names_it(text_config):
    other = text_config.override({"optimiser.learning_rate": 0.5, "model.input_dropout": 0.1})
    assert differences(text_config, other) == [
        "model.input_dropout: 0.3 → 0.1",
        "optimiser.learning_rate: 0.01 → 0.5",
    ]


def test_a_budget_replaces_sizes(text_config):
    other = text_config.override({"model.hidden_sizes": None, "model.budget": 5000})
    assert other.model.language_model(15).hidden_sizes[0] > 8


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("optimiser.learning_rates", "optimiser.learning_rate"),
        ("model.inputdropout", "model.input_dropout"),
        ("sede", "seed"),
        ("schedul.intervals", "schedule.intervals"),
    ],
)
def test_unknown_names_suggest_the_nearest(text_config, name, suggestion):
    with pytest.raises(ConfigError, match=f"did you mean '{suggestion}'"):
        text_config.override({name: 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objective.batch_size", 0),
        ("objective.window", None),
        ("objective.window", 1.5),
        ("objective.l2_penalty", -1.0),
        ("objective.alpha", 1.1),
        ("objective.state_reset", float("nan")),
        ("optimiser.learning_rate", "fast"),
        ("optimiser.beta1", 0.9),
        ("optimiser.beta2", 1.0),
        ("optimiser.name", "sgd"),
        ("optimiser.max_norm", 0),
        ("schedule.intervals", True),
        ("schedule.drop_factor", 0),
        ("schedule.stop_targets", 4.4),
        ("schedule.stop_targets", [4.4]),
        ("averaging.latest", -1),
        ("validation.criterion", "best"),
        ("data.level", "line"),
        ("data.name", ""),
        ("data.min_count", 0),
        ("model.input_dropout", 1.5),
        ("model.kind", "transformer"),
        ("seed", -1),
    ],
)
def test_a_bad_value_is_refused_by_name(text_config, name, value):
    with pytest.raises(AfterdropError, match=name.rpartition(".")[2]):
        text_config.override({name: value})


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("seed", 2**63, r"seed is 9223372036854775808"),
        ("objective.batch_size", -(2**63) - 1, r"objective\.batch_size is -9223372036854775809"),
        ("model.hidden_sizes", [4, 2**64], r"model\.hidden_sizes\[1\] is 18446744073709551616"),
        ("model.budget", 10**5000, r"model\.budget is an integer of 16610 bits"),
    ],
    ids=["seed", "batch", "sizes", "budget"],
)
def test_integers_beyond_64_bits_are_refused_by_name(text_config, name, value, where):
    with pytest.raises(ConfigError, match=f"{where}; it does not fit 64 bits"):
        text_config.override({name: value})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"budget": 1000, "hidden_sizes": [3]},
        {"hidden_sizes": [3], "layers": 2},
        {"budget": 1000, "embedding_size": 3},
        {"budget": "many"},
        {"vocabulary": 7, "hidden_sizes": [3]},
    ],
)
def test_a_plan_needs_one_way_to_its_sizes(settings):
    with pytest.raises(ConfigError, match="model"):
        ModelPlan("language_model", settings)


def test_missing_settings_and_wrong_tables_are_named():
    with pytest.raises(ConfigError, match=r"data\.name is missing"):
        TrainConfig.from_dict({})
    with pytest.raises(ConfigError, match=r"\[data\]"):
        TrainConfig.from_dict({"data": 3})


@pytest.mark.parametrize("name", ["objective.window", "objective.state_reset", "validation.window"])
def test_a_classifier_has_no_windows(name):
    content = {
        "data": {"name": "builtin:digits"},
        "model": {"kind": "classifier"},
        "objective": {"batch_size": 8},
        "optimiser": {"learning_rate": 0.1},
        "schedule": {"steps_per_interval": 1, "intervals": 1},
    }
    with pytest.raises(ConfigError, match=name):
        TrainConfig.from_dict(content).override({name: 1})
