import builtins
import gzip
import lzma
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from afterdrop.data import batches, load, load_images, load_mnist
from afterdrop.data.images import parse_idx
from afterdrop.errors import DataError, ExtraError, FileError


def idx(array: Tensor) -> bytes:
    header = bytes([0, 0, 8, array.dim()]) + struct.pack(f">{array.dim()}I", *array.shape)
    return header + bytes(array.flatten().tolist())


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """Ten training and four test images of 3x2, under MNIST's names; plain, gz and xz."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    images, labels = torch.arange(60).reshape(10, 3, 2), torch.arange(10)
    (folder / "train-images-idx3-ubyte").write_bytes(idx(images))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    (folder / "t10k-images-idx3-ubyte.xz").write_bytes(lzma.compress(idx(images[:4] + 100)))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(labels[:4]))
    return tmp_path


def test_idx_files_become_three_splits(idx_folder: Path):
    loaded = load_mnist(idx_folder, validation=3, expected=None)
    assert loaded.train.images.shape == (7, 3, 2) and loaded.train.images.dtype == torch.float32
    assert loaded.valid.labels.tolist() == [7, 8, 9] and loaded.valid.labels.dtype == torch.int64
    assert torch.equal(loaded.valid.images[0, 0] * 255, torch.tensor([42.0, 43.0]))
    assert loaded.test.images.max() <= 1
    assert loaded.classes == 7


def test_wrong_checksums_sizes_and_pairs_are_refused(idx_folder: Path):
    with pytest.raises(FileError, match=r"idx3-ubyte has 76 bytes uncompressed, expected 47,040"):
        load("mnist", idx_folder)
    with pytest.raises(DataError, match="validation=10 must leave some of the 10"):
        load_mnist(idx_folder, validation=10, expected=None)
    (idx_folder / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.arange(3)))
    with pytest.raises(DataError, match=r"shape \[4, 3, 2\] and labels of shape \[3\] do not"):
        load_mnist(idx_folder, validation=1, expected=None)
    (idx_folder / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileError, match=r"no t10k-labels.*afterdrop data fetch mnist"):
        load_mnist(idx_folder, validation=1, expected=None)


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "is not an idx file"),
        (b"\x89PNG", "is not an idx file of bytes: it starts with 89 50 4e 47"),
        (b"\0\0\x0d\x01", "is not an idx file of bytes"),
        (b"\0\0\x08\0", "is not an idx file"),
        (b"\0\0\x08\x03\0\0\0\x01", "ends within its idx header"),
        (b"\0\0\x08\x01\0\0\0\x03ab", "has 2 elements, its header says 3"),
    ],
)
def test_foreign_idx_headers_are_refused(content: bytes, why: str):
    with pytest.raises(FileError, match=rf"^a-file {why}"):
        parse_idx(content, "a-file")


def test_batches_are_iterable_again_and_shuffle_by_seed():
    images, labels = torch.rand(10, 2, 2), torch.arange(10)
    plain = batches(images, labels, 4)
    assert [part.tolist() for _, part in plain] == [part.tolist() for _, part in plain]
    assert torch.equal(torch.cat([part for part, _ in plain]), images)
    shuffled = batches(images, labels, 4, seed=1)
    order = torch.cat([part for _, part in shuffled])
    assert order.tolist() != labels.tolist() and order.sort().values.tolist() == labels.tolist()
    assert torch.equal(torch.cat([part for part, _ in shuffled]), images[order])
    with pytest.raises(DataError, match="batch_size=0"):
        batches(images, labels, 0)
    with pytest.raises(DataError, match="10 images and 9 labels"):
        batches(images, labels[:-1], 4)


def test_digits_are_dealt_out_evenly_and_once():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (afterdrop[demo])")
    digits = load_images("builtin:digits")
    parts = (digits.train, digits.valid, digits.test)
    assert [len(part.labels) for part in parts] == [1_000, 400, 397]
    assert all(part.images.min() >= 0 and part.images.max() <= 1 for part in parts)
    assert min(part.labels.bincount().min() for part in parts) > 30
    everything = torch.cat([part.images for part in parts]).flatten(1)
    assert len(everything.unique(dim=0)) == 1_797


def test_a_missing_scikit_learn_says_the_line(monkeypatch: pytest.MonkeyPatch):
    original = builtins.__import__

    def without_sklearn(name, *arguments, **options):
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_sklearn)
    with pytest.raises(ExtraError, match=r"pip install 'afterdrop\[demo\]'"):
        load("builtin:digits")


def test_mnist_itself(real_data: Path):
    mnist = load_images("mnist", real_data)
    assert [tuple(p.images.shape) for p in (mnist.train, mnist.valid, mnist.test)] == [
        (50_000, 28, 28),
        (10_000, 28, 28),
        (10_000, 28, 28),
    ]
    assert mnist.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert abs(mnist.train.images.mean() - 0.1307) < 1e-3
