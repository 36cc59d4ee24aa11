"""Draws family_map.svg, the picture of the README, from the run of the demo.

python examples/digits.py --out runs/digits
python docs/figures/family_map.py runs/digits
"""

import sys
from pathlib import Path

import afterdrop as ad
from afterdrop.report import figures
from afterdrop.report.figure_style import styled

run = ad.Run.open(sys.argv[1])
ax = figures.family_map(run.scores("valid"), tuned=True, chosen=run.choice.member)
ax.set_title("validation cross entropy in nats, and the best T, of each member", fontsize=9)
with styled(salt="family_map"):
    path = Path(__file__).with_name("family_map.svg")
    ax.figure.savefig(path, facecolor="white", metadata={"Date": None})
