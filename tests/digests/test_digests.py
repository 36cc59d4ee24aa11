"""Numbers for fixed seeds are those that were recorded, to the bit.

Sums of floating-point numbers depend on the processor and on torch's version, so digests are
compared on the kind of machine that recorded them, and means of estimates on every machine. Record
anew, after a change that is meant to change numbers, with

    OMP_NUM_THREADS=1 PYTHONPATH=src:tests/digests python tests/digests/test_digests.py
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from digest_cases import Found, all_cases

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


@functools.cache
def found(name: str) -> Found:
    """What a case gives with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return CASES[name]()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_recorded(name: str) -> None:
    record = json.loads(RECORD.read_text())
    if record["machine"] != machine():
        pytest.skip(f"recorded on {record['machine']}, this is {machine()}")
    assert found(name)[0] == record["digests"][name]


@pytest.mark.parametrize("name", json.loads(RECORD.read_text()).get("means", {}))
def test_means_of_estimates_are_those_recorded_on_every_machine(name: str) -> None:
    record = json.loads(RECORD.read_text())["means"][name]
    assert found(name)[1] == pytest.approx(record, rel=1e-3, abs=1e-6, nan_ok=True)


if __name__ == "__main__":
    given = {name: found(name) for name in CASES}
    content = {
        "machine": machine(),
        "digests": {name: digest for name, (digest, _) in given.items()},
        "means": {name: means for name, (_, means) in given.items() if means},
    }
    RECORD.write_text(json.dumps(content, indent=2) + "\n")
