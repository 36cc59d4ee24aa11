"""Evaluation masks inside kernels equal those of `masks.uniforms` to the bit."""

import kernel_device
import pytest
import torch

from afterdrop.kernels.family_masks import drop_rows, mask_levels
from afterdrop.kernels.uniform import cuts, draws, why_not_drawn, words
from afterdrop.masks.uniforms import Plan, site_key, uniforms, unit_words

pytestmark = kernel_device.quiet
device = kernel_device.device
EXAMPLES = torch.tensor([5, 9, 10**9])
RATES = [0.0, 0.3, 0.65]


def dropped(plan, places, hashes, device):
    """Ones [M, W, K, H] through `drop_rows`."""
    windows, units = len(places), len(hashes)
    rows = len(RATES) * windows * plan.num_samples
    found = torch.full((rows, units + 3), -1.0, device=device)
    site = places, hashes, cuts(torch.tensor(RATES), draws(plan, device).size).to(device)
    room = torch.zeros(windows * plan.num_samples, units, dtype=torch.uint8, device=device)
    mask = mask_levels(site, draws(plan, device), units, room), site[2]
    drop_rows(
        torch.ones(rows, units, device=device), found, mask, plan.num_samples, len(RATES), units
    )
    assert (found[:, units:] == -1).all()
    return found[:, :units].view(len(RATES), windows, plan.num_samples, units)


def expected(u):
    """What `drop_rows` should give for uniforms [K, W, H] at each rate."""
    kept = [(u >= torch.tensor(r)).float() / (1 - torch.tensor(r)) for r in RATES]
    return torch.stack(kept).transpose(1, 2)


@pytest.mark.parametrize("samples", [2, 6, 100, 520])
@pytest.mark.parametrize("seed", [0, -3])
def test_masks_are_equal_to_the_bit(samples, seed, device):
    plan, key, units = Plan(samples, seed), site_key(seed, "site", 0, 0), 70
    places, hashes = words(unit_words(key, EXAMPLES).to(device), None, units)
    u = uniforms(plan, key, range(samples), EXAMPLES, (units,))
    found = dropped(plan, places[0], hashes, device)
    assert torch.equal(found.cpu() > 0, expected(u) > 0)
    torch.testing.assert_close(found.cpu(), expected(u), rtol=1e-6, atol=0)


def test_levels_count_the_rates_at_which_a_unit_is_kept(device):
    plan, key, units = Plan(6, 3), site_key(3, "site", 0, 0), 70
    places, hashes = words(unit_words(key, EXAMPLES).to(device), None, units)
    site = places[0], hashes, cuts(torch.tensor(RATES), 3).to(device)
    room = torch.full((len(EXAMPLES) * 6 + 2, units), 99, dtype=torch.uint8, device=device)
    levels = mask_levels(site, draws(plan, device), units, room)
    u = uniforms(plan, key, range(6), EXAMPLES, (units,)).transpose(0, 1).flatten(0, 1)
    assert torch.equal(levels.cpu(), sum((u >= torch.tensor(r)).to(torch.uint8) for r in RATES))
    assert (room[len(levels) :] == 99).all()


@pytest.mark.parametrize("samples", [2, 6, 100])
def test_a_unit_whose_uniform_equals_the_rate_is_kept(samples, device):
    """And a rate of 1 keeps none; inside a divided stratum the decision is that of a CPU."""
    plan, key, units = Plan(samples), site_key(0, "site", 0, 0), 40
    places, hashes = words(unit_words(key, EXAMPLES).to(device), None, units)
    u = uniforms(plan, key, range(samples), EXAMPLES, (units,)).transpose(0, 1).flatten(0, 1)
    rates = torch.cat([u[0].sort().values, torch.ones(1)])
    site = places[0], hashes, cuts(rates, samples // 2).to(device)
    room = torch.zeros(len(u), units, dtype=torch.uint8, device=device)
    levels = mask_levels(site, draws(plan, device), units, room)
    wanted = (u.unsqueeze(-1) >= rates).sum(-1)
    assert torch.equal(levels.cpu(), wanted.to(torch.uint8))


def test_every_time_step_has_its_own_mask(device):
    plan, key, units = Plan(6, 3), site_key(3, "site", 0, 0), 10
    places, hashes = words(unit_words(key, EXAMPLES).to(device), 4, units)
    u = uniforms(plan, key, range(6), EXAMPLES, (4, units))
    for step, place in enumerate(places):
        found = dropped(plan, place.contiguous(), hashes, device)
        assert torch.equal(found.cpu() > 0, expected(u[:, :, step]) > 0)


def test_rows_are_copied_without_a_mask_and_gathered_with_tokens(device):
    table = torch.randn(7, 5, device=device)
    tokens = torch.tensor([3, 6], device=device)
    found = torch.zeros(2 * 2 * 4, 5, device=device)
    drop_rows(table, found, None, 4, 2, 5, tokens)
    assert torch.equal(found.view(2, 2, 4, 5), table[tokens].view(1, 2, 1, 5).expand(2, 2, 4, 5))


def test_plans_that_kernels_do_not_draw():
    assert why_not_drawn(Plan(100)) is None
    assert why_not_drawn(Plan(4, scheme="antithetic")) == "masks are 'antithetic'"
    assert why_not_drawn(Plan(8, blocks=4)) == "samples are in 4 blocks"
    assert why_not_drawn(Plan(520)) is None  # eight blocks of 65
    assert why_not_drawn(Plan(2 * 257)) == "samples are in 6 blocks"  # not all of equal size
