"""Image sets, among them MNIST from its idx files, and batches of images.

Legend: N images.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from afterdrop.data.data_files import Expected, data_folder, read_content, require_file
from afterdrop.errors import DataError, FileError

MNIST_FILES = {
    "train-images-idx3-ubyte": Expected(
        47_040_016, "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
    ),
    "train-labels-idx1-ubyte": Expected(
        60_008, "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
    ),
    "t10k-images-idx3-ubyte": Expected(
        7_840_016, "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
    ),
    "t10k-labels-idx1-ubyte": Expected(
        10_008, "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
    ),
}


class Labelled(NamedTuple):
    """Images, float32 [N, height, width] in [0, 1], and their labels, int64 [N]."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images in three splits.

    Example:
        >>> part = Labelled(torch.rand(4, 8, 8), torch.tensor([0, 1, 2, 1]))
        >>> ImageSet("toy", part, part, part).classes
        3
    """

    name: str
    train: Labelled
    valid: Labelled
    test: Labelled

    @property
    def classes(self) -> int:
        """Number of classes: the largest training label plus one."""
        return int(self.train.labels.max()) + 1


def parse_idx(content: bytes, source: str = "the file") -> Tensor:
    """The array of an idx file of unsigned bytes, the format of MNIST.

    Args:
        content: The file's uncompressed content.
        source: Its name, for error messages.

    Returns:
        A uint8 tensor of the shape in the header.

    Raises:
        FileError: If the header is not that of an idx file, or the length does not match it.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
        tensor([7, 8, 9], dtype=torch.uint8)
    """
    # Two zero bytes, the element type (8 is unsigned byte), the number of dimensions, the sizes.
    if len(content) < 4 or content[:3] != b"\0\0\x08" or content[3] == 0:
        raise FileError(
            f"{source} is not an idx file of bytes: it starts with {content[:4].hex(' ')}, "
            "expected 00 00 08 and the number of dimensions; is it another file with this name?"
        )
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise FileError(f"{source} ends within its idx header; get it again")
    shape = struct.unpack(f">{content[3]}I", content[4:header])
    if len(content) - header != prod(shape):
        raise FileError(
            f"{source} has {len(content) - header:,} elements, its header says "
            f"{' x '.join(map(str, shape))}; get it again"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy())


def load_mnist(
    data: str | Path | None = None,
    validation: int = 10_000,
    *,
    name: str = "mnist",
    expected: Mapping[str, Expected] | None = MNIST_FILES,
) -> ImageSet:
    """MNIST, or another set in the same four idx files (plain, gz or xz).

    Args:
        data: The data folder, which holds the files itself or in `mnist` (`MNIST/raw`, as
            torchvision leaves them, is found too); None is the environment variable AFTERDROP_DATA.
        validation: Number of training images, taken from the end, for validation.
        name: The set's name and subfolder.
        expected: Checksums; None reads any files with these names.

    Raises:
        FileError: If a file is missing, truncated, not an idx file or not the published one.
        DataError: If images and labels do not match, or `validation` leaves nothing to train on.

    Example:
        >>> load_mnist("nowhere")
        Traceback (most recent call last):
        afterdrop.errors.FileError: no train-images-idx3-ubyte (or .gz, .xz) in nowhere/mnist or \
nowhere/MNIST/raw or nowhere: put it there, or try afterdrop data fetch mnist
    """
    folder = data_folder(data)
    places = [folder / name, folder / name.upper() / "raw", folder]
    remedy = f"put it there, or try afterdrop data fetch {name}"
    paths = [require_file(file, places, remedy) for file in MNIST_FILES]
    arrays = []
    for file, path in zip(MNIST_FILES, paths):
        content = read_content(path, expected[file] if expected else None)
        arrays.append(parse_idx(content, str(path)))
    train, test = _labelled(paths[0], *arrays[:2]), _labelled(paths[2], *arrays[2:])
    cut = len(train.labels) - validation
    if not 0 < cut < len(train.labels):
        raise DataError(
            f"validation={validation} must leave some of the {len(train.labels)} training images "
            "for training and be at least 1"
        )
    return ImageSet(
        name,
        Labelled(train.images[:cut], train.labels[:cut]),
        Labelled(train.images[cut:], train.labels[cut:]),
        test,
    )


class Batches:
    """Batches of images and labels that can be iterated over repeatedly.

    Args:
        images: Any tensor [N, ...].
        labels: A tensor [N].
        batch_size: Size of each batch; the last may be smaller.
        seed: None keeps the order; a number shuffles, in the same way for each iteration.

    Example:
        >>> parts = Batches(torch.rand(5, 2, 2), torch.arange(5), 2)
        >>> len(parts), [labels.tolist() for _, labels in parts]
        (3, [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self, images: Tensor, labels: Tensor, batch_size: int, seed: int | None = None
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size} must be at least 1")
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images and {len(labels)} labels must be equally many")
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self._order = None
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self._order = torch.randperm(len(labels), generator=generator).to(labels.device)

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(self.labels), self.batch_size):
            part: slice | Tensor = slice(first, first + self.batch_size)
            if self._order is not None:
                part = self._order[part]
            yield self.images[part], self.labels[part]


def batches(images: Tensor, labels: Tensor, batch_size: int, seed: int | None = None) -> Batches:
    """The `Batches` of images and labels, for use in a loop.

    Example:
        >>> for images, labels in batches(torch.rand(3, 8, 8), torch.arange(3), batch_size=2):
        ...     print(tuple(images.shape), labels.tolist())
        (2, 8, 8) [0, 1]
        (1, 8, 8) [2]
    """
    return Batches(images, labels, batch_size, seed)


def _labelled(path: Path, images: Tensor, labels: Tensor) -> Labelled:
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise DataError(
            f"{path}: images of shape {list(images.shape)} and labels of shape "
            f"{list(labels.shape)} do not belong together; get both again"
        )
    return Labelled(images.float() / 255, labels.long())
