"""The published text sets: where their files are below the data folder, and what they contain.

Checksums are of the uncompressed text. Token counts include one end-of-sentence token per line,
blank lines included. Vocabularies have lamb's dead `<UNK>` (see `afterdrop.data.vocabulary`).
PTB is for research use (LDC); WikiText-2 is CC BY-SA.
"""

from dataclasses import dataclass
from pathlib import Path

from afterdrop.data.data_files import Expected, data_folder, read_content, require_file
from afterdrop.data.encoding import Level
from afterdrop.data.text_set import SPLITS, Split, TextSet, build_text_set
from afterdrop.data.vocabulary import LAMB_UNKNOWN
from afterdrop.errors import DataError


@dataclass(frozen=True)
class NamedText:
    """A published corpus.

    Attributes:
        name: Its name.
        folders: Subfolders of the data folder that may hold it; the data folder itself may too.
        files: Each file's name and expected content: one per split, or one for all three.
        tokens: Published token counts of train, valid and test, with one token per line end.
        level: How the files are split into tokens.
        unit: What a token is.
    """

    name: str
    folders: tuple[str, ...]
    files: tuple[tuple[str, Expected], ...]
    tokens: tuple[int, int, int]
    level: Level = "word"
    unit: Level = "word"

    def places(self, data: Path) -> list[Path]:
        """The folders to search below a data folder."""
        return [data / folder for folder in self.folders] + [data]


def _one_per_split(pattern: str, *contents: tuple[int, str]) -> tuple[tuple[str, Expected], ...]:
    return tuple(
        (pattern.format(split), Expected(size, f"sha256:{digest}"))
        for split, (size, digest) in zip(SPLITS, contents, strict=True)
    )


PTB = NamedText(
    "ptb",
    ("ptb",),
    _one_per_split(
        "ptb.{}.txt",
        (5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        (399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
        (449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    ),
    (929_589, 73_760, 82_430),
)
PTB_CHAR = NamedText(
    "ptb-char",
    ("ptb-char", "ptb"),
    _one_per_split(
        "ptb.char.{}.txt",
        (10_034_964, "e313d91425e06c4f0a8fb6e881dcce0c291f2a0e9f4dda54833069b122f91da9"),
        (786_084, "21661f63ec355085879458b6524644d4add5573541b4be14fb52ab2e2e995eb8"),
        (884_846, "1ef5607ac3c463b16e38bfe7900dd3bfc91de5a96e0f21e7eab5188b465b8ebe"),
    ),
    (5_017_482, 393_042, 442_423),
    unit="char",
)
WIKITEXT_2 = NamedText(
    "wikitext-2",
    ("wikitext-2",),
    _one_per_split(
        "wiki.{}.tokens",
        (10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
        (1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
        (1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
    ),
    (2_088_628, 217_646, 245_569),
)
# The published checksum of enwik8 is an MD5. A token is a byte, so the counts split the file.
ENWIK8 = NamedText(
    "enwik8",
    ("enwik8",),
    (("enwik8", Expected(100_000_000, "md5:a1fa5ffddb56f4953e226637dabbb36a")),),
    (90_000_000, 5_000_000, 5_000_000),
    level="byte",
    unit="byte",
)
NAMED_TEXTS = {text.name: text for text in (PTB, PTB_CHAR, WIKITEXT_2, ENWIK8)}


def load_named_text(text: NamedText, data: str | Path | None = None) -> TextSet:
    """Reads a published corpus from the data folder and checks it against everything published.

    Args:
        text: Which one, from `NAMED_TEXTS`.
        data: The data folder; None is the environment variable AFTERDROP_DATA.

    Raises:
        FileError: If a file is missing, truncated or not the published one.
        DataError: If the token counts differ from the published ones.

    Example:
        >>> load_named_text(PTB, "nowhere")
        Traceback (most recent call last):
        afterdrop.errors.FileError: no ptb.train.txt (or .gz, .xz) in nowhere/ptb or nowhere: put \
it there, or try afterdrop data fetch ptb
    """
    remedy = f"put it there, or try afterdrop data fetch {text.name}"
    places = text.places(data_folder(data))
    paths = [require_file(name, places, remedy) for name, _ in text.files]
    contents = [read_content(path, expected) for path, (_, expected) in zip(paths, text.files)]
    if len(contents) == 1:
        contents = _cut(contents[0], text.tokens)
        paths *= len(SPLITS)
    by_split: dict[Split, bytes] = dict(zip(SPLITS, contents))
    loaded = build_text_set(
        text.name,
        by_split,
        text.level,
        unit=text.unit,
        unknown=LAMB_UNKNOWN,
        sources={split: str(path) for split, path in zip(SPLITS, paths)},
    )
    for split, wanted in zip(SPLITS, text.tokens):
        found = len(loaded.split(split))
        if found != wanted:
            raise DataError(
                f"{text.name}: {found:,} tokens in {split}, {wanted:,} were published; "
                "results on it would not be comparable"
            )
    return loaded


def _cut(content: bytes, sizes: tuple[int, int, int]) -> list[bytes]:
    first, second = sizes[0], sizes[0] + sizes[1]
    return [content[:first], content[first:second], content[second:]]
