"""Blocks of a text: whole, of one stripe, and long enough for honest errors."""

import math

import pytest
import torch

from afterdrop.evaluation.error_clusters import TEXT_BLOCKS, clusters
from afterdrop.evaluation.request import StreamSettings
from afterdrop.family.estimates import clustered_error


def test_other_data_have_their_examples():
    examples = torch.tensor([7, 7, 9, 3])
    assert clusters(examples, None).tolist() == [1, 1, 2, 0]


RUNS = [(1, 1), (40, 40), (64, 64), (65, 33), (2108, 64)]


@pytest.mark.parametrize(("windows", "blocks"), RUNS)
def test_blocks_are_runs_of_windows(windows, blocks):
    examples = torch.arange(windows).repeat_interleave(3) + 5  # not the first part of a text
    found = clusters(examples, StreamSettings(stripes=1))
    assert (found.diff() >= 0).all() and int(found.max()) + 1 == blocks <= TEXT_BLOCKS
    sizes = found.bincount()
    assert (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]


@pytest.mark.parametrize("stripes", [2, 33, 100])
def test_no_block_has_windows_of_two_stripes(stripes):
    examples = torch.arange(50 * stripes)
    found = clusters(examples, StreamSettings(stripes=stripes))
    for block in range(int(found.max()) + 1):
        own = examples[found == block]
        assert len((own % stripes).unique()) == 1
        assert (own // stripes).diff().eq(1).all()
    assert int(found.max()) + 1 >= min(TEXT_BLOCKS // 2, 50 * stripes)


def test_errors_are_those_of_texts_whose_neighbours_are_alike():
    """1,000 texts of 1,000 windows with a memory of three: by windows the error is too small."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1000, 1000, generator=generator, dtype=torch.float64)
    texts = torch.zeros_like(noise)
    texts[:, 0] = noise[:, 0]
    for window in range(1, 1000):
        texts[:, window] = 0.7 * texts[:, window - 1] + math.sqrt(1 - 0.49) * noise[:, window]
    true = texts.mean(1).std().item()
    windows = torch.arange(1000)
    by_window = [clustered_error(text, windows) for text in texts[:200]]
    blocks = clusters(windows, StreamSettings(stripes=1))
    by_block = [clustered_error(text, blocks) for text in texts[:200]]
    assert sum(by_window) / 200 < 0.5 * true
    assert 0.85 * true < sum(by_block) / 200 < 1.05 * true
