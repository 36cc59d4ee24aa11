import math

import pytest

from afterdrop.train.schedule import ScheduleState, advance, learning_rate, patience_at
from afterdrop.train.sections import AveragingSection, ScheduleSection


def play(xes, schedule, averaging=AveragingSection()):  # noqa: B008 (frozen)
    """All states, from interval 0 on, until the schedule stops."""
    states = []
    state = ScheduleState()
    for xe in xes:
        state = advance(state, xe, schedule, averaging)
        states.append(state)
        if state.stopped:
            break
    return states


def test_patience_ramps_up_as_in_lamb():
    intervals = (0, 1, 5, 10, 20, 30, 60, 1000)
    assert [patience_at(t, 30, 60) for t in intervals] == [1, 1, 3, 5, 10, 15, 30, 30]
    assert patience_at(3, 30, 0) == 30


def test_a_drop_comes_27_intervals_after_the_best_with_a_patience_of_26():
    schedule = ScheduleSection(steps_per_interval=100, intervals=1000, drop_patience=26)
    xes = [5 - 0.01 * min(interval, 100) for interval in range(200)]
    states = play(xes, schedule)
    assert [s.interval for s in states if s.last_drop == s.interval] == [127, 154, 181]
    assert learning_rate(0.004, states[130], schedule) == pytest.approx(0.0004)


def test_the_latest_drop_happens_once_and_only_without_one_before():
    always_better = [10 - 0.001 * interval for interval in range(1000)]
    schedule = ScheduleSection(100, 1000, drop_patience=26, drop_latest=900)
    assert [s.interval for s in play(always_better, schedule) if s.last_drop == s.interval] == [900]
    stuck = [5 - 0.01 * min(interval, 880) for interval in range(905)]
    states = play(stuck, ScheduleSection(100, 1000, drop_patience=10, drop_latest=900))
    assert [s.interval for s in states if s.last_drop == s.interval] == [891, 902]


def test_two_validations_without_progress_at_the_start_stop_a_run():
    schedule = ScheduleSection(100, 1000, stop_patience=30, stop_rampup=60)
    states = play([5.0, 5.0, 5.0, 5.0], schedule)
    assert states[-1].interval == 2
    assert "no better" in states[-1].stopped


def test_early_stopping_is_strict():
    schedule = ScheduleSection(100, 1000, stop_patience=30, stop_rampup=60)
    xes = [5 - 0.01 * min(interval, 100) for interval in range(200)]
    assert play(xes, schedule)[-1].interval == 131


def test_training_ends_with_the_validation_of_the_last_interval():
    assert play([3.0, 2.0, 1.0, 0.5], ScheduleSection(100, 2))[-1].interval == 2


def test_a_target_out_of_reach_stops_and_a_drop_moves_the_target():
    # 0.01 per interval from 6: at interval 100 of 200 the best to expect is 5 - 100 * 0.01 = 4.
    xes = [6 - 0.01 * interval for interval in range(300)]
    section = {"steps_per_interval": 100, "intervals": 200, "stop_patience": 30}
    assert play(xes, ScheduleSection(**section, stop_targets=(4.01,)))[-1].interval == 200
    stopped = play(xes, ScheduleSection(**section, stop_targets=(3.99,)))[-1]
    assert stopped.interval == 30  # as soon as there are thirty intervals to look back on
    assert "worse than the target 3.99" in stopped.stopped
    moved = ScheduleSection(**section, stop_targets=(4.4, 3.9), drop_latest=50)
    assert play(xes, moved)[-1].interval == 51


def test_slow_improvement_stops():
    xes = [6 - 0.01 * interval for interval in range(300)]
    schedule = ScheduleSection(100, 200, stop_patience=30, stop_slowest=0.02)
    assert "below 0.02" in play(xes, schedule)[-1].stopped


def test_averaging_is_triggered_by_stagnation_or_at_the_latest_and_stays():
    schedule = ScheduleSection(100, 1000)
    xes = [5.0, 4.0, 4.5, 4.5, 3.0, 3.0]
    states = play(xes, schedule, AveragingSection(patience=2))
    assert [s.averaging for s in states] == [False, False, False, True, True, True]
    states = play(xes, schedule, AveragingSection(patience=50, latest=2))
    assert [s.averaging for s in states] == [False, False, True, True, True, True]
    assert not any(s.averaging for s in play(xes, schedule))
    # lamb starts at interval 0 with patience 0 only from interval 1 on
    states = play(xes, schedule, AveragingSection(patience=0))
    assert [s.averaging for s in states][:2] == [False, True]


def test_only_a_strictly_lower_xe_is_a_new_best():
    states = play([4.0, 4.0, math.nan, 3.0], ScheduleSection(100, 1000))
    assert [s.best_interval for s in states] == [0, 0, 0, 3]
    assert [s.is_best for s in states] == [True, False, False, True]
