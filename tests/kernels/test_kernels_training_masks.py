"""Training masks: values, rate, and dependence on nothing but seed, step, site and element."""

import kernel_device
import pytest
import torch

from afterdrop.kernels.training_masks import apply_mask, draw_mask, scatter_masked

pytestmark = kernel_device.quiet
device = kernel_device.device


def drawn(device, *, shape=(3, 1100), step=0, seed=0, site=0, rate=0.3, dtype=torch.float32):
    mask = torch.full(shape, -1.0, dtype=dtype, device=device)
    draw_mask(mask, torch.tensor(step, device=device), seed, site, rate)
    return mask


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.9])
def test_values_and_rate(rate, device):
    """Zeros within 4 standard errors of the rate: one seed in 16,000 would fail."""
    mask = drawn(device, shape=(20_000,), rate=rate)
    kept = mask > 0
    torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / (1 - rate)))
    assert not mask[~kept].any()
    error = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(float((~kept).double().mean()) - rate) < 4 * error


def test_masks_repeat_and_differ_between_steps_sites_and_seeds(device):
    one = drawn(device)
    assert torch.equal(one, drawn(device))
    others = [{"step": 1}, {"step": 2**31 + 5}, {"site": 1}, {"seed": 1}, {"seed": 2**40}]
    masks = [one, *(drawn(device, **other) for other in others)]
    for at, mask in enumerate(masks):
        for other in masks[:at]:
            # Independent masks agree in 0.7² + 0.3² = 58 % of 3,300 elements; 5 standard errors.
            agree = float(((mask > 0) == (other > 0)).double().mean())
            assert abs(agree - 0.58) < 5 * (0.58 * 0.42 / mask.numel()) ** 0.5


def test_elements_do_not_depend_on_the_size_or_dtype_of_the_mask(device):
    long, short = drawn(device, shape=(3000,)), drawn(device, shape=(7,))
    assert torch.equal(long[:7], short)
    half = drawn(device, shape=(3000,), dtype=torch.float16)
    assert torch.equal(half, long.half())


@pytest.mark.parametrize("samples", [1, 2])
def test_parts_of_a_batch_have_the_masks_of_the_whole_one(samples, device):
    """Masks [time, samples · rows, units] of five rows, of which two parts hold two and three."""
    steps, rows, units = 3, 5, 300
    whole = drawn(device, shape=(steps, samples, rows, units), site=2, step=9)
    for first, count in ((0, 2), (2, 3)):
        mask = torch.full((steps, samples, count, units), -1.0, device=device)
        part = count * units, rows * units, first * units
        draw_mask(mask, torch.tensor(9, device=device), 0, 2, 0.3, part)
        assert torch.equal(mask, whole[:, :, first : first + count])


@pytest.mark.parametrize("rows", [2, 6], ids=["shared over time", "per step"])
@pytest.mark.parametrize("gather", [False, True])
def test_rows_times_their_mask_are_rounded_into_the_first_columns(rows, gather, device):
    """Three steps of two rows, 1,100 columns in blocks of 1,024; padding is not written."""
    table, mask = torch.randn(9, 1104, device=device), torch.randn(rows, 1104, device=device)
    index = torch.tensor([8, 0, 3, 3, 1, 5], device=device) if gather else None
    target = torch.full((6, 1120), 7.0, dtype=torch.float16, device=device)
    source = table if gather else table[:6]
    apply_mask(source, mask, target, 1100, index)
    wanted = (table[index] if gather else source) * mask.repeat(6 // rows, 1)
    torch.testing.assert_close(target[:, :1100], wanted[:, :1100].half(), rtol=1e-3, atol=1e-3)
    assert (target[:, 1100:] == 7).all()


def test_without_a_mask_rows_are_copied(device):
    rows, target = torch.randn(3, 5, device=device), torch.zeros(3, 5, device=device)
    apply_mask(rows, None, target, 4)
    assert torch.equal(target[:, :4], rows[:, :4]) and not target[:, 4].any()


@pytest.mark.parametrize("rows", [None, 2, 6], ids=["no mask", "shared over time", "per step"])
def test_masked_rows_are_added_to_rows_of_a_table(rows, device):
    """Two of them to the same row; 1,100 columns in blocks of 1,024; padding is not written."""
    source = torch.randn(6, 1104, device=device)
    mask = None if rows is None else torch.randn(rows, 1104, device=device)
    index = torch.tensor([8, 0, 3, 3, 1, 5], device=device)
    table = torch.randn(9, 1120, device=device)
    scaled = source if mask is None else source * mask.repeat(6 // rows, 1)
    wanted = table.clone()
    wanted[:, :1100].index_add_(0, index, scaled[:, :1100])
    scatter_masked(source, mask, table, 1100, index)
    torch.testing.assert_close(table, wanted)


def test_rows_of_a_table_have_factors(device):
    table, mask = torch.randn(9, 32, device=device), torch.randn(2, 32, device=device)
    index = torch.tensor([8, 0, 3, 3, 1, 5], device=device)
    factors = torch.rand(9, device=device)
    found, total = torch.zeros(6, 32, device=device), torch.zeros(9, 32, device=device)
    apply_mask(table, mask, found, 32, index, factors)
    wanted = table[index] * mask.repeat(3, 1) * factors[index, None]
    torch.testing.assert_close(found, wanted)
    scatter_masked(found, mask, total, 32, index, factors)
    again = wanted * mask.repeat(3, 1) * factors[index, None]
    torch.testing.assert_close(total, torch.zeros_like(total).index_add_(0, index, again))
