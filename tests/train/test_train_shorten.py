from dataclasses import replace

import pytest

from afterdrop import recipes
from afterdrop.train import ConfigError
from afterdrop.train.schedule import ScheduleState, advance
from afterdrop.train.schedule_length import shorten


def test_a_shortened_schedule_keeps_its_shape():
    config = recipes.load("ptb-24m").config
    half = shorten(config, config.schedule.intervals // 2)
    for name in ("intervals", "drop_latest", "drop_patience", "stop_patience", "stop_rampup"):
        assert getattr(half.schedule, name) * 2 == getattr(config.schedule, name)
    assert half.schedule.steps_per_interval == config.schedule.steps_per_interval
    assert half.schedule.stop_targets == ()
    assert replace(half, schedule=config.schedule) == config  # nothing else changes


def test_averaging_is_scaled_too():
    config = recipes.load("wikitext2-24m-averaged").config
    short = shorten(config, 100, 7)
    assert (short.averaging.latest, short.averaging.patience) == (80, 5)
    assert (short.schedule.steps_per_interval, short.schedule.drop_latest) == (7, None)


def test_a_patience_stays_above_the_noise_of_single_validations():
    short = shorten(recipes.load("ptb-10m").config, 10).schedule
    assert (short.drop_patience, short.stop_patience, short.drop_latest) == (3, 3, 9)
    assert shorten(recipes.load("pydoc-small").config, 2).schedule.drop_patience == 3
    impatient = recipes.load("pydoc-small").config.override({"schedule.drop_patience": 1})
    assert shorten(impatient, 2).schedule.drop_patience == 1  # never longer than the original


TAILED = [n for n in recipes.names() if recipes.load(n).config.averaging.kind == "tail"]


@pytest.mark.parametrize("name", TAILED)
@pytest.mark.parametrize("intervals", [1, 2, 10])
def test_every_recipe_drops_or_averages_before_a_short_training_ends(name, intervals):
    config = shorten(recipes.load(name).config, intervals, 5)
    state, changed = ScheduleState(), []
    while state.stopped is None:
        state = advance(state, 9.0 - 0.1 * state.interval, config.schedule, config.averaging)
        changed.append(state.drops == 1 or state.averaging)
    assert state.interval == intervals
    assert changed[max(1, intervals - 1)] and not changed[0]


def test_the_same_length_is_the_same_configuration():
    config = recipes.load("ptb-24m").config
    assert shorten(config, config.schedule.intervals) is config
    longer = shorten(config, 2 * config.schedule.intervals).schedule
    assert longer.drop_latest == 2 * config.schedule.drop_latest
    for bad in ((0, None), (5, 0), (1.5, None)):
        with pytest.raises(ConfigError, match="interval"):
            shorten(config, *bad)
