"""Data sets by name: texts in stripes and images in batches, from files with checksums.

`load` reads a set; only `fetch` downloads. A set is named (`ptb`, `ptb-char`, `wikitext-2`,
`enwik8`, `mnist`), built in (`builtin:pydoc`, `builtin:digits`), or the path of a folder with
`train.txt`, `valid.txt` and `test.txt`.
"""

from afterdrop.data.catalogue import is_own_text, load, load_images, load_text, names
from afterdrop.data.data_files import data_folder, read_content, require_file
from afterdrop.data.download import Patience
from afterdrop.data.encoding import Level, decode_text, encode_text
from afterdrop.data.fetch_sets import fetch
from afterdrop.data.images import MNIST_FILES, Batches, ImageSet, Labelled, batches, load_mnist
from afterdrop.data.named import NAMED_TEXTS
from afterdrop.data.stripes import IGNORE, EvalStripes, TrainStripes
from afterdrop.data.text_set import TextSet, build_text_set
from afterdrop.data.vocabulary import Vocabulary

__all__ = [
    "IGNORE",
    "MNIST_FILES",
    "NAMED_TEXTS",
    "Batches",
    "EvalStripes",
    "ImageSet",
    "Labelled",
    "Level",
    "Patience",
    "TextSet",
    "TrainStripes",
    "Vocabulary",
    "batches",
    "build_text_set",
    "data_folder",
    "decode_text",
    "encode_text",
    "fetch",
    "is_own_text",
    "load",
    "load_images",
    "load_mnist",
    "load_text",
    "names",
    "read_content",
    "require_file",
]
