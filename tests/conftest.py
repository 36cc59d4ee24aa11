import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Not to be searched for doctests: as modules they all have one name, and pytest refuses the second.
collect_ignore_glob = ["*/conftest.py"]

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `oracles`

# Folders and files whose tests are all of one kind that `make check` leaves out. Single tests of
# such a kind carry the marker themselves; pyproject.toml says what the markers mean.
KINDS = {
    "chaos": "subprocess",
    "e2e/test_e2e_train.py": "subprocess",
    "digests": "slow",
    "evaluation/test_evaluation_enumeration.py": "slow",
    "kernels": "interpreter",
    "report/test_report_browser.py": "browser",
    "report/test_report_page.py": "slow",
    "scale": "subprocess",
    "tune/test_tune_elsewhere.py": "subprocess",
    "tune/test_tune_workers.py": "subprocess",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of the folders and files above."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue  # doctests of the package
        place = item.path.relative_to(HERE)
        for name in (place.as_posix(), place.parts[0]):
            if name in KINDS:
                item.add_marker(KINDS[name])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Signals with their default effect, also where nohup or a script makes the suite ignore them.

    Processes that a test starts inherit what is ignored.
    """
    ignored = [n for n in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if interrupt else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
