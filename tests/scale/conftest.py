import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `launch` and `tiny`


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory) -> Path:
    """A tiny text with structure to learn."""
    folder = tmp_path_factory.mktemp("scale") / "text"
    folder.mkdir()
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and"]
    lines = [" ".join(words[(i * k) % 10] for k in range(1, 3 + i % 6)) for i in range(1, 200)]
    for split, part in (("train", lines[:150]), ("valid", lines[150:175]), ("test", lines[175:])):
        (folder / f"{split}.txt").write_text("\n".join(part) + "\n")
    return folder
