import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `mutations`, `sample_files` and `file_kinds`
from sample_files import write_samples


@pytest.fixture(scope="session")
def samples(tmp_path_factory) -> Path:
    """A folder with an intact file of every kind."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_samples(folder)
    return folder
