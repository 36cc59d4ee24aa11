from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from afterdrop.data import IGNORE, EvalStripes, TrainStripes, load
from afterdrop.errors import DataError

EOS = 0


@st.composite
def texts(draw: st.DrawFn) -> Tensor:
    """Lines of distinct words, so that a token tells its place; the last may lack its end."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    tokens: list[int] = []
    for length in lengths:
        tokens += [len(tokens) + i + 1 for i in range(length)] + [EOS]
    if len(tokens) > 1 and draw(st.booleans()):
        tokens = tokens[:-1]
    return torch.tensor(tokens, dtype=torch.int32)


@given(texts(), st.integers(1, 15), st.integers(1, 8), st.booleans())
def test_evaluation_predicts_every_token_once(
    tokens: Tensor, stripes: int, window: int, lines: bool
):
    windows = EvalStripes(tokens, EOS, stripes, window, lines=lines)
    assert len(list(windows)) == len(windows)
    inputs = torch.cat([i for i, _ in windows], dim=1)
    targets = torch.cat([t for _, t in windows], dim=1)
    positions = torch.cat([windows.positions(n) for n in range(len(windows))], dim=1)
    real = targets != IGNORE
    # Row by row the targets are the text in order: contiguous shares, each token once.
    assert torch.equal(targets[real], tokens.long())
    assert torch.equal(positions[real], torch.arange(len(tokens)))
    assert torch.equal(real, positions >= 0)
    # A row starts with the end of a sentence, then each input is the target before it.
    assert (inputs[:, 0] == EOS).all()
    assert torch.equal(inputs[:, 1:][real[:, 1:]], targets[:, :-1][real[:, 1:]])
    assert (inputs[~real] == EOS).all()
    # Padding is at the end of a row only.
    assert (real.long().diff(dim=1) <= 0).all()


@given(texts(), st.integers(1, 5), st.integers(1, 7), st.integers(0, 9), st.booleans())
def test_training_follows_the_text(
    tokens: Tensor, batch_size: int, window: int, seed: int, lines: bool
):
    window = min(window, len(tokens))
    stripes = TrainStripes(tokens, EOS, batch_size, window, seed=seed, jitter=3, lines=lines)
    steps = 3 * len(tokens) // window + 1
    windows = [stripes[number] for number in range(steps)]
    inputs = torch.cat([i for i, _ in windows], dim=1)
    targets = torch.cat([t for _, t in windows], dim=1)
    assert targets.shape == (batch_size, steps * window)
    assert (inputs[:, 0] == EOS).all()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    # Each pass of each stripe is the whole text, rotated to a start of a line.
    rotations = {tuple(tokens.roll(-start).tolist()) for start in range(len(tokens))}
    at_lines = {
        tuple(tokens.roll(-start).tolist())
        for start in range(len(tokens))
        if start == 0 or tokens[start - 1] == EOS
    }
    for row in targets[:, : 3 * len(tokens)].reshape(-1, len(tokens)).tolist():
        assert tuple(row) in (at_lines if lines else rotations)


@given(texts(), st.integers(1, 4), st.integers(1, 7), st.integers(0, 40))
def test_a_window_depends_on_its_number_only(tokens: Tensor, batch: int, window: int, number: int):
    window = min(window, len(tokens))
    read, fresh = (TrainStripes(tokens, EOS, batch, window, seed=5) for _ in range(2))
    for earlier in range(number):
        read[earlier]
    for after in range(number, number + 2 * len(tokens) // window + 2):
        for a, b in zip(read[after], fresh[after]):
            assert torch.equal(a, b)


def test_starts_are_equidistant_lines_moved_by_the_jitter():
    # 1,000 lines of one word each: word k + 1 is that of line k.
    tokens = torch.tensor([[k + 1, EOS] for k in range(1_000)]).flatten()
    exact = TrainStripes(tokens, EOS, 10, 2, seed=3, jitter=0)
    start = exact[0][1][:, 0]
    assert (start.diff() % 1_000 == 100).all()
    moved = TrainStripes(tokens, EOS, 10, 2, seed=3, jitter=7)
    draws = []
    for one_pass in range(20):
        first = moved[one_pass * 1_000][1][:, 0]
        draws.append((first - start + 7) % 1_000)
    jitter = torch.stack(draws)
    assert jitter.min() == 0 and jitter.max() == 14
    # Drawn anew for each pass and stripe, uniformly: mean 7 with a standard error of 0.31.
    assert abs(jitter.float().mean() - 7) < 1
    assert (jitter.float().std(dim=0) > 0).all() and (jitter.float().std(dim=1) > 0).all()


def test_the_seed_is_all_the_randomness():
    tokens = torch.arange(2_000) % 7
    windows = [TrainStripes(tokens, EOS, 4, 9, seed=seed)[5][0] for seed in (1, 1, 2)]
    assert torch.equal(windows[0], windows[1])
    assert not torch.equal(windows[0], windows[2])


def test_texts_that_cannot_be_cut_are_refused():
    tokens = torch.arange(5)
    with pytest.raises(DataError, match="5 tokens, fewer than window=6: use a shorter"):
        TrainStripes(tokens, EOS, 2, 6)
    assert len(EvalStripes(tokens, EOS, 2, 6)) == 1
    with pytest.raises(DataError, match="batch_size=0 must be at least 1"):
        TrainStripes(tokens, EOS, 0, 2)
    with pytest.raises(DataError, match="jitter=-1"):
        TrainStripes(tokens, EOS, 2, 2, jitter=-1)
    with pytest.raises(DataError, match=r"shape \[0\]"):
        EvalStripes(tokens[:0], EOS, 1, 2)
    with pytest.raises(DataError, match="must be a non-empty vector"):
        EvalStripes(tokens.float(), EOS, 1, 2)
    with pytest.raises(IndexError, match=r"window 3 is not in 0\.\.2"):
        EvalStripes(tokens, EOS, 1, 2)[3]


@pytest.mark.parametrize("stripes, windows", [(1, 2_108), (33, 73), (64, 42)])
def test_published_window_counts(real_data: Path, stripes: int, windows: int):
    text = load("ptb", real_data)
    cut = EvalStripes(text.valid, text.vocabulary.eos_id, stripes, 35)
    assert len(cut) == windows
    assert sum(int((targets != IGNORE).sum()) for _, targets in cut) == 73_760


def test_one_epoch_of_ptb_is_415_steps(real_data: Path):
    text = load("ptb", real_data)
    stripes = TrainStripes(text.train, text.vocabulary.eos_id, 64, 35, jitter=0)
    seen = torch.cat([stripes[step][1].flatten() for step in range(415)])
    # The stripes' shares differ in length by line, so a share is overrun or missed here and there.
    share = torch.bincount(seen, minlength=len(text.vocabulary)) / len(seen)
    truth = torch.tensor(text.vocabulary.counts) / len(text.train)
    assert len(seen) == 929_600
    assert (share - truth).abs().sum() < 0.1
