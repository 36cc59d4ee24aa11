"""Uniform draws: their distribution, and what they depend on."""

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats

from afterdrop.errors import DataError
from afterdrop.masks import small_draws
from afterdrop.masks import uniforms as uniforms_file
from afterdrop.masks.uniforms import Plan, site_key, uniforms

SCHEMES = ("lhs", "iid", "antithetic")
KEY = site_key(0, "layer", 0, 0)
LEVEL = 1e-4  # significance level of every statistical test here; the seeds are fixed


def draw(plan, samples=None, examples=4, coords=(5, 6), key=KEY):
    samples = range(plan.num_samples) if samples is None else samples
    return uniforms(plan, key, samples, torch.arange(examples), coords)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("seed", [0, 1, -7, 2**63 - 1])
def test_marginal_distribution_is_uniform(scheme, seed):
    u = draw(
        Plan(2, seed, scheme) if scheme != "antithetic" else Plan(4, seed, scheme), examples=200
    )
    u = u[:: 2 if scheme == "antithetic" else 1]
    assert u.min() >= 0 and u.max() < 1 and u.dtype == torch.float32
    assert stats.kstest(u.flatten().double().numpy(), "uniform").pvalue > LEVEL
    counts = np.bincount((u.flatten().double().numpy() * 50).astype(int), minlength=50)
    assert stats.chisquare(counts).pvalue > LEVEL


@pytest.mark.parametrize("size", [2, 6, 100, 1000])
def test_every_sample_of_a_hypercube_is_uniform(size):
    u = draw(Plan(size), examples=100, coords=(40,))
    for k in (0, 1, size // 2, size - 1):
        assert stats.kstest(u[k].flatten().double().numpy(), "uniform").pvalue > LEVEL


def z_scores(a, b):
    """Correlations of paired uniforms (a, b: [pairs, n]) as standard normal variables."""
    a, b = a - 0.5, b - 0.5
    return (12 * (a * b).mean(-1) * a.shape[-1] ** 0.5).flatten()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_neighbours_in_every_direction_are_uncorrelated(scheme):
    plan = Plan(8, 5, scheme)
    u = draw(plan, examples=60, coords=(30, 40)).double()
    n = u[0].numel()
    pairs = {
        "coordinate": (u[:, :, :, :-1], u[:, :, :, 1:]),
        "outer coordinate": (u[:, :, :-1], u[:, :, 1:]),
        "example": (u[:, :-1], u[:, 1:]),
        "halves": (u[:4], u[4:]),
        "transposed": (u[:, :30, :, :30], u[:, :30, :, :30].transpose(2, 3)),
    }
    for name, (a, b) in pairs.items():
        if name == "transposed":
            off = ~torch.eye(30, dtype=torch.bool)
            a, b = a[:, :, off], b[:, :, off]
            half = torch.triu(torch.ones(30, 30, dtype=torch.bool), 1)[off]
            a, b = a[..., half], b[..., half]
        z = z_scores(a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1))
        assert z.abs().max() < 4.5, (name, n)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sites_calls_and_seeds_are_independent(scheme):
    plan = Plan(8, 5, scheme)
    base = draw(plan, examples=100).double().flatten(1)
    others = [
        draw(plan, examples=100, key=site_key(5, "layer", 1, 0)),
        draw(plan, examples=100, key=site_key(5, "layer", 0, 1)),
        draw(plan, examples=100, key=site_key(5, "layer2", 0, 0)),
        draw(Plan(8, 6, scheme), examples=100),
    ]
    for other in others:
        assert z_scores(base, other.double().flatten(1)).abs().max() < 4.5
        assert not torch.equal(base, other.double().flatten(1))


def test_pairs_of_units_are_independent_within_a_hypercube():
    u = draw(Plan(100, 3), examples=20, coords=(50,))[:50].double()
    a, b = u[:, :, :-1], u[:, :, 1:]
    cells = ((a * 5).long() * 5 + (b * 5).long()).flatten()
    counts = torch.bincount(cells, minlength=25).numpy()
    assert stats.chisquare(counts).pvalue > LEVEL
    # Both units of a pair are dropped at rate 0.3 in 9 % of the samples: standard error 0.002.
    both = ((a < 0.3) & (b < 0.3)).double().mean()
    assert both.item() == pytest.approx(0.09, abs=0.006)


@pytest.mark.parametrize(
    ("size", "parts"),
    [(2, 1), (4, 1), (10, 1), (100, 1), (256, 1), (300, 2), (520, 4), (1024, 4), (1500, 6)],
)
def test_latin_hypercubes_have_one_draw_in_each_stratum(size, parts):
    u = draw(Plan(size, 1), examples=2, coords=(7,)).double()
    for half in u.split(size // 2):
        for block in half.split(len(half) // parts):
            strata = (block * len(block)).long().sort(0).values
            assert torch.equal(strata, torch.arange(len(block)).view(-1, 1, 1).expand_as(strata))


@pytest.mark.parametrize("size", [100, 256, 1024])
def test_pairs_of_units_average_out_as_independent_ones_do(size):
    """With few permutations they would not: many units would share one up to a rotation."""
    u = draw(Plan(size, 1), examples=1, coords=(8000,))[: size // 2, 0]
    signs = (u < 0.5).double() * 2 - 1
    products = (signs[:, ::2] * signs[:, 1::2]).mean(0)
    # Three standard errors of the variance over 4,000 independent pairs are 7 %; a hypercube of
    # 128 samples adds a sixth (`masks.uniforms`).
    assert products.square().mean().item() * (size // 2) == pytest.approx(1.1, abs=0.2)


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_each_block_is_a_hypercube_of_its_own(blocks):
    plan = Plan(80, 1, blocks=blocks)
    u = draw(plan, coords=(3,)).double()
    for span in plan.spans:
        block = u[span.start : span.stop]
        strata = (block * len(span)).long().sort(0).values
        assert (strata[:, 0, 0] == torch.arange(len(span))).all()


def test_antithetic_samples_come_in_mirrored_pairs():
    u = draw(Plan(8, 1, "antithetic")).double()
    torch.testing.assert_close(u[::2] + u[1::2], torch.full_like(u[::2], 1 - 2**-24))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_subset_of_samples_examples_and_coordinates_has_the_same_numbers(scheme):
    plan = Plan(24, 9, scheme)
    whole = draw(plan, examples=6, coords=(4, 5))
    for samples in (range(3), range(10, 14), range(11, 24), range(23, 24)):
        assert torch.equal(draw(plan, samples, 6, (4, 5)), whole[samples.start : samples.stop])
    some = torch.tensor([5, 0, 3])
    assert torch.equal(uniforms(plan, KEY, range(24), some, (4, 5)), whole[:, some])
    assert torch.equal(draw(plan, examples=6, coords=(2, 3)), whole[:, :, :2, :3])  # padding


def test_shared_draws_are_those_of_example_0():
    plan = Plan(4)
    shared = uniforms(plan, KEY, range(4), None, (3,))
    assert torch.equal(shared, uniforms(plan, KEY, range(4), torch.tensor([0]), (3,)))


GOLDEN = {
    "lhs": [
        0.616040050983429,
        0.4532793164253235,
        0.11604003608226776,
        0.2032793164253235,
        0.891377329826355,
        0.03767281770706177,
        0.14137735962867737,
        0.28767281770706177,
    ],
    "iid": [
        0.757127046585083,
        0.017922937870025635,
        0.6077799201011658,
        0.5176328420639038,
        0.6129197478294373,
        0.8095734715461731,
        0.25403261184692383,
        0.9463868737220764,
    ],
    "antithetic": [
        0.5400065779685974,
        0.5138277411460876,
        0.4575795531272888,
        0.3216959834098816,
        0.7096309661865234,
        0.3452693223953247,
        0.08405548334121704,
        0.8955034613609314,
    ],
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_golden_values(scheme):
    u = uniforms(
        Plan(8, 3, scheme), site_key(3, "layer.drop", 0, 0), range(8), torch.tensor([0, 5]), (2, 2)
    )
    assert u[[0, 3, 4, 7]][:, 1, 1].flatten().tolist() == GOLDEN[scheme]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 3}, "num_samples=3"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"num_samples": -2}, "num_samples=-2"),
        ({"num_samples": 6, "scheme": "antithetic"}, "num_samples=6"),
        ({"num_samples": 4, "scheme": "sobol"}, "sobol"),
        ({"num_samples": 4, "seed": 0.5}, "seed=0.5"),
        ({"num_samples": 4, "seed": True}, "seed=True"),
        ({"num_samples": 12, "blocks": 3}, "blocks=3"),
        ({"num_samples": 12, "blocks": 1}, "blocks=1"),
        ({"num_samples": 10, "blocks": 4}, "num_samples=10"),
        ({"num_samples": 2.0}, "num_samples=2.0"),
        ({"num_samples": "8"}, "num_samples='8'"),
    ],
)
def test_invalid_plans_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        Plan(**options)


def test_suggested_number_of_samples_is_valid():
    with pytest.raises(DataError, match="try 8"):
        Plan(7)
    assert Plan(8).num_samples == 8


@pytest.mark.parametrize("size", [1, 2, 10, 100, 256, 1000])
@pytest.mark.parametrize(("examples", "coords"), [(None, (3, 4)), (3, ()), (5, (7,)), (2, (3, 5))])
def test_few_units_are_drawn_as_many_are(monkeypatch, size, examples, coords):
    """NumPy draws few units; torch must agree to the bit, for any part of the samples."""
    numbers = None if examples is None else torch.arange(2**40, 2**40 + examples)
    for samples in (range(size), range(size // 3, size // 2 + 1)):
        drawn = []
        for limit in (0, small_draws.LIMIT):
            monkeypatch.setattr(small_draws, "LIMIT", limit)
            drawn.append(uniforms(Plan(size, 3), KEY, samples, numbers, coords))
        assert torch.equal(*drawn) and drawn[1].shape[0] == len(samples)


@pytest.mark.parametrize("examples", [torch.arange(2), None], ids=["examples", "shared"])
@pytest.mark.parametrize("coords", [(5,), (5000,)])
def test_draws_on_a_cpu_ignore_the_default_device(coords, examples):
    request = Plan(4), KEY, range(4), examples, coords
    with torch.device("meta"):
        drawn = uniforms(*request, device="cpu")
    assert torch.equal(drawn, uniforms(*request))


def test_draws_are_those_recorded():
    """Scores of earlier versions can be repeated: draws never change."""
    found = hashlib.sha256()
    for scheme in SCHEMES:
        for size in (4, 8, 256, 1024):
            found.update(draw(Plan(size, 5, scheme)).numpy().tobytes())
    assert found.hexdigest()[:16] == "6034b1620ebc4862"


def test_tables_of_hypercubes_take_a_bounded_memory():
    """Samples of any number share 32 MiB; each evaluation is told what its own take."""
    for size in (64, 256, 4096):
        plan = Plan(size)
        draw(plan, examples=1, coords=(2,))
        kept = sum(table.nbytes for table in uniforms_file._tables._kept.values())
        assert kept <= uniforms_file._tables.limit == 2**25
        assert uniforms_file.table_bytes(plan) == min(2**25, size * 32768 * 4)
    assert uniforms_file.table_bytes(Plan(64, scheme="iid")) == 0
