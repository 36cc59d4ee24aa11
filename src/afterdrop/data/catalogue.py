"""Data sets by name: a named set, a built-in one, or a folder of text."""

from __future__ import annotations

from pathlib import Path

from afterdrop.data.builtin import DIGITS, PYDOC, load_digits, load_pydoc
from afterdrop.data.encoding import check_level
from afterdrop.data.images import ImageSet, load_mnist
from afterdrop.data.named import NAMED_TEXTS, load_named_text
from afterdrop.data.text_set import TextSet, load_text_folder
from afterdrop.errors import DataError

MNIST = "mnist"


def names() -> tuple[str, ...]:
    """The sets that `load` knows by name.

    Example:
        >>> names()
        ('ptb', 'ptb-char', 'wikitext-2', 'enwik8', 'mnist', 'builtin:pydoc', 'builtin:digits')
    """
    return (*NAMED_TEXTS, MNIST, PYDOC, DIGITS)


def load(
    name: str | Path,
    data: str | Path | None = None,
    *,
    level: str | None = None,
    min_count: int | None = None,
) -> TextSet | ImageSet:
    """A set by name, or a user's folder of text by its path.

    Args:
        name: One of `names()`, or the path of a folder with train.txt, valid.txt and test.txt.
        data: The folder that holds the named sets; None is the environment variable
            AFTERDROP_DATA.
        level: `word` (the default), `char` or `byte`, for `builtin:pydoc` and folders.
        min_count: Tokens rarer than this in training become `<unk>`; by default 2 for
            `builtin:pydoc`, and 1 for folders, which keeps all.

    Returns:
        A `TextSet` or an `ImageSet`.

    Raises:
        DataError: If there is no such set, or it has no choice of level or minimum count.
        FileError: If its files are missing, damaged or not the published ones.
        ExtraError: If scikit-learn is missing for `builtin:digits`.

    Example:
        >>> load("builtin:pydoc", level="char").unit
        'char'
    """
    if name in (MNIST, DIGITS):
        _refuse_options(name, level, min_count)
        return load_mnist(data) if name == MNIST else load_digits()
    return load_text(name, data, level=level, min_count=min_count)


def load_text(
    name: str | Path,
    data: str | Path | None = None,
    *,
    level: str | None = None,
    min_count: int | None = None,
) -> TextSet:
    """As `load`, for a set that must be a text.

    Raises:
        DataError: As `load`, and if the set is one of images.

    Example:
        >>> load_text("builtin:digits")
        Traceback (most recent call last):
        afterdrop.errors.DataError: 'builtin:digits' is a set of images, a text is needed
    """
    if name in (MNIST, DIGITS):
        raise DataError(f"{str(name)!r} is a set of images, a text is needed")
    if isinstance(name, str) and name in NAMED_TEXTS:
        _refuse_options(name, level, min_count)
        return load_named_text(NAMED_TEXTS[name], data)
    chosen = check_level(level or "word")
    if str(name).startswith(PYDOC):
        return load_pydoc(str(name), chosen, min_count)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"{str(name)!r} is neither a folder nor one of the sets {', '.join(names())}"
        )
    return load_text_folder(folder, chosen, 1 if min_count is None else min_count)


def is_own_text(name: str | Path) -> bool:
    """Whether a name is the path of a folder of text, and not one of `names()`.

    Example:
        >>> is_own_text("ptb"), is_own_text("texts/mine")
        (False, True)
    """
    return name not in (MNIST, DIGITS, *NAMED_TEXTS) and not str(name).startswith(PYDOC)


def load_images(name: str, data: str | Path | None = None) -> ImageSet:
    """As `load`, for a set that must be one of images.

    Raises:
        DataError: As `load`, and if the set is a text.

    Example:
        >>> load_images("ptb")
        Traceback (most recent call last):
        afterdrop.errors.DataError: 'ptb' is not a set of images; those are mnist, builtin:digits
    """
    loaded = load(name, data) if name in (MNIST, DIGITS) else None
    if not isinstance(loaded, ImageSet):
        raise DataError(f"{name!r} is not a set of images; those are {MNIST}, {DIGITS}")
    return loaded


def _refuse_options(name: str | Path, level: str | None, min_count: int | None) -> None:
    for option, value in (("level", level), ("min_count", min_count)):
        if value is not None:
            raise DataError(
                f"{name} is fixed, {option}={value!r} does not apply: leave it out, or put your "
                "own text files in a folder"
            )
