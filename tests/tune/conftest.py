import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from afterdrop.tune.study_settings import TuneSettings, plan_study

sys.path.insert(0, str(Path(__file__).parent))  # for `postgres`
import postgres

WORDS = ["a", "bb", "ccc", "dddd"]
RECIPE = """
[data]
name = {text!r}
[model]
hidden_sizes = [8]
input_dropout = 0.3
output_dropout = 0.3
[objective]
batch_size = 4
window = 8
[optimiser]
learning_rate = 0.005
max_norm = 1.0
[schedule]
steps_per_interval = 4
intervals = 4
[validation]
stripes = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe on a tiny text: a trial takes a tenth of a second."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [" ".join(WORDS[(i * k) % 4] for k in range(1, 4 + i % 5)) for i in range(1, 160)]
    for split, part in (("train", lines[:110]), ("valid", lines[110:140]), ("test", lines[140:])):
        (folder / f"{split}.txt").write_text("\n".join(part) + "\n")
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(text=str(folder)))
    return path


@pytest.fixture
def settings(recipe: Path) -> TuneSettings:
    return plan_study(str(recipe), prune=False)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    reason = postgres.why_not()
    if reason:
        pytest.skip(reason)
    with postgres.server() as server:
        yield server


POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.database)


@pytest.fixture(params=["journal", "sqlite", POSTGRESQL])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Each kind of storage."""
    if request.param == "journal":
        return None
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'study.db'}"
    return request.getfixturevalue("postgres_server").url


@pytest.fixture
def name() -> str:
    """A study name that is unique in the database server."""
    return f"study-{uuid.uuid4().hex[:8]}"
