"""Training masks: their values, their rate, and that they are a function of seed, step and site."""

import kernel_device
import pytest
import torch

from afterdrop.kernels.mask import draw_mask

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


def test_the_same_again_and_another_for_each_step_site_and_seed(device):
    one = drawn(device)
    assert torch.equal(one, drawn(device))
    others = [{"step": 1}, {"step": 2**31 + 5}, {"site": 1}, {"seed": 1}, {"seed": 2**40}]
    masks = [one, *(drawn(device, **other) for other in others)]
    for at, mask in enumerate(masks):
        for other in masks[:at]:
            # Independent masks agree in 0.7² + 0.3² = 58 % of 3,300 places; 5 standard errors.
            agree = float(((mask > 0) == (other > 0)).double().mean())
            assert abs(agree - 0.58) < 5 * (0.58 * 0.42 / mask.numel()) ** 0.5


def test_elements_do_not_depend_on_the_size_of_the_mask_or_its_type(device):
    long, short = drawn(device, shape=(3000,)), drawn(device, shape=(7,))
    assert torch.equal(long[:7], short)
    half = drawn(device, shape=(3000,), dtype=torch.float16)
    assert torch.equal(half, long.half())
