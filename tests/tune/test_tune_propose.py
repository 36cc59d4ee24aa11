import itertools
import math

import pytest

from afterdrop.tune.next_point import propose
from afterdrop.tune.observed_points import Seen, known_values
from afterdrop.tune.pruning import should_prune
from afterdrop.tune.search_space import Axis
from afterdrop.tune.study_settings import plan_study

AXES = [Axis("model.input_dropout", 0, 0.9), Axis("model.hidden_dropout", 0, 0.9)]


def two_axes(**others):
    fixed = ["optimiser.learning_rate", "objective.l2_penalty"]
    return plan_study("digits-mlp", ranges=AXES, fixed=fixed, **others)


def bowl(point) -> float:
    return (point["model.input_dropout"] - 0.2) ** 2 + (point["model.hidden_dropout"] - 0.7) ** 2


def distance(one, other) -> float:
    return math.dist([one[a.name] / 0.9 for a in AXES], [other[a.name] / 0.9 for a in AXES])


def test_the_first_point_is_the_unmodified_recipe_unless_disabled():
    own = {"model.input_dropout": 0.2, "model.hidden_dropout": 0.5}
    assert propose(two_axes(), []) == own
    assert propose(two_axes(own_first=False), []) != own


@pytest.mark.parametrize("sampler", ["gp", "random"])
def test_points_are_a_function_of_the_seed_and_of_what_was_seen(sampler):
    def points(seed, count=6):
        seen = []
        for _ in range(count):
            point = propose(two_axes(sampler=sampler, seed=seed, own_first=False), seen)
            seen.append(Seen(point, "known", bowl(point)))
        return [tuple(s.point.values()) for s in seen]

    assert points(1) == points(1)
    assert not set(points(1)) & set(points(2))


def test_the_next_point_differs_from_pending_ones():
    settings = two_axes(own_first=False)
    seen = []
    for _ in range(10):
        point = propose(settings, seen)
        seen.append(Seen(point, "known", bowl(point)))
    batch = []
    for _ in range(4):  # without any result in between
        batch.append(propose(settings, [*seen, *(Seen(p, "pending") for p in batch)]))
    apart = [distance(a, b) for a, b in itertools.combinations(batch, 2)]
    assert min(apart) > 0.01
    # The control: without the pending point, the same point is proposed again.
    blind = propose(settings, seen)
    assert distance(blind, batch[0]) < 1e-3


def test_the_bandit_finds_the_bottom_of_a_bowl():
    settings = two_axes(own_first=False, seed=3)
    seen = []
    for _ in range(14):
        point = propose(settings, seen)
        seen.append(Seen(point, "known", bowl(point)))
    assert min(s.value for s in seen) < 0.001


def test_points_that_failed_are_not_tried_again():
    settings = two_axes(own_first=False)
    seen = []
    for _ in range(16):
        point = propose(settings, seen)
        bad = (
            point["model.hidden_dropout"] > 0.45
        )  # half of the space diverges, the half with the optimum
        seen.append(Seen(point, "bad") if bad else Seen(point, "known", bowl(point)))
    assert sum(s.standing == "bad" for s in seen[8:]) <= 5


def test_outliers_do_not_flatten_the_rest():
    rows = [Seen({}, "known", v) for v in (4.1, 4.2, 4.3, 1e6)]
    assert [v for _, v in known_values(rows)][:3] == [4.1, 4.2, 4.3]
    assert max(v for _, v in known_values(rows)) < 5
    assert known_values([Seen({}, "bad")]) == []


def test_the_worst_quarter_is_pruned_after_a_third_of_the_intervals():
    others = [{t: 5 - 0.1 * t + 0.01 * i for t in range(11)} for i in range(8)]
    assert should_prune({4: 4.9}, others, 10)
    assert not should_prune({2: 4.9}, others, 10)  # too early
    assert not should_prune({10: 4.9}, others, 10)  # about to end
    assert not should_prune({4: 4.9}, others[:5], 10)  # too few trials to compare with
    assert not should_prune(
        {3: 4.55, 4: 4.9}, others, 10
    )  # was good, and its learning rate may drop
    stopped = [dict.fromkeys(range(3), 9.0)] * 20  # stopped before this interval, so not comparable
    assert not should_prune({4: 4.9}, [*others[:5], *stopped], 10)
