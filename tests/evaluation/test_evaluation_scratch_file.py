"""What is read twice goes to a file that needs no name, few open files, and a disk with room."""

import errno
import os
import sys
import tempfile

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import afterdrop as ad
from afterdrop.errors import DataError, FileError
from afterdrop.evaluation.scratch_file import ScratchFile

posix = pytest.mark.skipif(sys.platform == "win32", reason="an open file has a name on Windows")


def models():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 4)) for _ in range(3)]


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(6, 5, generator=generator), torch.randint(4, (6,), generator=generator)


class Endless(IterableDataset):
    """Examples without a length."""

    def __iter__(self):
        for inputs, targets in batches(4):
            yield from zip(inputs, targets)


def samples(count):
    generator = np.random.default_rng(0)
    return (generator.normal(size=(3, 6, 4)) for _ in range(count))


@posix
def test_the_number_of_open_files_does_not_grow_with_models_and_batches():
    import resource

    used = max(
        int(name) for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc") else "/dev/fd")
    )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
    try:
        scores = ad.evaluate(models(), list(batches(60)))
        stored = ad.evaluate_samples(samples(60), np.arange(360) % 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert scores.num_targets == stored.num_targets == 360


@posix
def test_the_file_has_no_name_and_is_emptied(tmp_path, monkeypatch):
    """A killed process leaves nothing; workers of a loader that inherited it hold no space."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ScratchFile() as scratch:
        stored = scratch.store(np.arange(6.0))
        handle = os.dup(scratch._file.fileno())
        found = os.fstat(handle)
        assert stored[2:4].tolist() == [2.0, 3.0]
        assert found.st_dev == os.stat(tmp_path).st_dev
        assert (found.st_nlink, found.st_size) == (0, 48)
        assert not list(tmp_path.iterdir())
    assert os.fstat(handle).st_size == 0
    os.close(handle)


def test_arrays_in_memory_need_no_file(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    assert ad.evaluate_samples(next(samples(1)), np.arange(6) % 4).num_targets == 6


def test_without_a_folder_for_temporary_files_the_remedy_is_named(monkeypatch):
    def missing():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", missing)
    with pytest.raises(FileError, match="set TMPDIR to a folder"):
        ad.evaluate_samples(samples(2), np.arange(12) % 4)


@pytest.mark.parametrize(
    "batch",
    [
        np.empty((3, 6, 4), object),
        np.full((3, 6, 4), "a"),
        np.ones((3, 6, 4), np.longdouble),
        torch.ones(3, 6, 4).to_sparse(),
        torch.ones(3, 6, 4, device="meta"),
        [[1.0], [1.0, 2.0]],
    ],
)
@pytest.mark.parametrize("given", [lambda batch: batch, lambda batch: iter([batch])])
def test_samples_that_are_not_numbers_are_refused(batch, given):
    with pytest.raises(DataError, match="samples"):
        ad.evaluate_samples(given(batch), np.arange(6) % 4)


def test_a_loader_without_a_length_is_read_by_every_model():
    loader = DataLoader(Endless(), batch_size=6)
    found, wanted = (ad.evaluate(models(), data) for data in (loader, list(batches(4))))
    assert all(torch.equal(found.tensors[name], wanted.tensors[name]) for name in wanted.tensors)


@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk_is_refused_before_it_is_written_to(monkeypatch, reserves):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if reserves:
        monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    else:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
        monkeypatch.setattr(ScratchFile, "free", 10)
    for evaluate in (
        lambda: ad.evaluate(models(), DataLoader(Endless(), batch_size=6)),
        lambda: ad.evaluate_samples(samples(2), np.arange(12) % 4),
    ):
        with pytest.raises(FileError, match=r"cannot keep samples in .*No space left.*set TMPDIR"):
            evaluate()


def test_a_file_system_that_cannot_reserve_space_is_used(monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    assert ad.evaluate(models(), list(batches(2))).num_targets == 12


@pytest.mark.parametrize(("factor", "enough"), [(1.1, True), (0.9, False)])
def test_the_room_that_is_needed_counts_batches_and_not_examples(monkeypatch, factor, enough):
    """The first batch of 6 examples has logits of 96 bytes; there are 4 batches and 3 models."""
    data = TensorDataset(*map(torch.cat, zip(*batches(4))))
    monkeypatch.setattr(ScratchFile, "free", int(factor * 96 * 12) - 96)
    if enough:
        assert ad.evaluate(models(), data, batch_size=6).num_targets == 24
    else:
        with pytest.raises(FileError, match="the samples of all models take about"):
            ad.evaluate(models(), data, batch_size=6)
