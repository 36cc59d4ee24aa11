"""Numbers for fixed seeds are those that were recorded, to the bit.

Sums of floating-point numbers depend on the processor and on torch's version, so digests are
compared on the kind of machine that recorded them. Record anew, after a change that is meant to
change numbers, with

    OMP_NUM_THREADS=1 PYTHONPATH=src:tests/digests python tests/digests/test_digests.py
"""

import json
from pathlib import Path

import pytest
import torch
from digest_cases import all_cases

RECORD = Path(__file__).with_name("recorded.json")
CASES = all_cases()


def machine() -> dict[str, str]:
    """What the bits of a sum depend on."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    names = {name.strip(): value.strip() for name, value in lines.items()}
    return {
        "processor": f"{names.get('vendor_id')} family {names.get('cpu family')}"
        f" model {names.get('model')}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__.partition("+")[0],
    }


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_recorded(name: str) -> None:
    record = json.loads(RECORD.read_text())
    if record["machine"] != machine():
        pytest.skip(f"recorded on {record['machine']}, this is {machine()}")
    assert CASES[name]() == record["digests"][name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: case() for name, case in CASES.items()}
    RECORD.write_text(json.dumps({"machine": machine(), "digests": found}, indent=2) + "\n")
