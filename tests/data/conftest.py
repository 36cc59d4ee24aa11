from pathlib import Path

import pytest

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def real_data() -> Path:
    """The folder of published sets beside the repository; its tests skip where it is not."""
    if not REAL_DATA.is_dir():
        pytest.skip("the published data sets are not beside this repository (../shared/data)")
    return REAL_DATA


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A user's folder of text."""
    (tmp_path / "train.txt").write_text("to be or not to be\n\nthat is the question\n")
    (tmp_path / "valid.txt").write_text("to be\n")
    (tmp_path / "test.txt").write_text("not to be\n")
    return tmp_path
