"""Ranks and resumed evaluations give the Scores of one process, for every likelihood."""

from pathlib import Path

import pytest
import torch
from launch import torchrun
from likelihood_driver import KINDS, evaluated

import afterdrop as ad


def assert_equal(one: ad.Scores, other: ad.Scores) -> None:
    assert one.protocol == other.protocol
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_evaluation_ends_with_the_same_bits(kind, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        evaluated(kind, cut=2, resume=tmp_path / "parts")
    assert list((tmp_path / "parts").iterdir())
    assert_equal(evaluated(kind, resume=tmp_path / "parts"), evaluated(kind))


@pytest.mark.subprocess
def test_two_ranks_give_the_scores_of_one_process(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = {kind: evaluated(kind) for kind in KINDS}
        # One process is interrupted, two ranks take up its parts.
        with pytest.raises(KeyboardInterrupt):
            evaluated("gaussian", cut=2, resume=tmp_path / "gaussian.parts")
    finally:
        torch.set_num_threads(threads)
    done = torchrun(str(Path(__file__).with_name("likelihood_driver.py")), str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    for kind in KINDS:
        for rank in (0, 1):
            assert_equal(ad.Scores.load(tmp_path / f"{kind}-{rank}.safetensors"), alone[kind])
