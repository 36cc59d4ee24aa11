"""Work that is killed or crashes inside its writes, and ends with the very same bits.

Nothing that was kept is done again, and no file is left over. The suite takes a few kills and
crashes of each kind; `make chaos` takes many more and prints how many. Killed ranks are in
tests/scale, which `make chaos` repeats. With AFTERDROP_CHAOS_DEVICE=cuda, training and evaluation
run on a GPU, where the weights of two trainings are equal up to rounding only.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = float(os.environ.get("AFTERDROP_CHAOS", "1"))
# Kills; or runs that crash, of which a fifth or more crash three times.
COUNTS = {
    "training kills": 12,
    "training crashes": 15,
    "evaluation kills": 7,
    "evaluation signals": 10,
    "evaluation crashes": 15,
    "tuning kills": 2,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the driver forks")
@pytest.mark.parametrize("mode", COUNTS)
def test_interrupted_work_ends_as_if_it_had_been_left_alone(mode, tmp_path):
    count = round(FULL * COUNTS[mode])
    driver = Path(__file__).with_name("chaos_driver.py")
    done = subprocess.run(
        [sys.executable, str(driver), mode, str(tmp_path), str(count)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600 + 60 * FULL * 20,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    happened = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{mode}: {happened}")
    assert happened["resumed"] > 0
    if mode.endswith(("kills", "signals")):
        assert happened["kills"] >= count
    else:
        assert happened["crashes"] >= count + 2 * (count // 5)
