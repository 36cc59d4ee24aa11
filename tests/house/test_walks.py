"""The walk of an evaluation in docs/architecture.md names every file that runs, and few of them."""

import re
import sys

import torch
from package_source import PACKAGE, ROOT
from torch import nn

import afterdrop as ad

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def named_files(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", text))


def traced_files() -> set[str]:
    """Files of the package whose functions run during a plain evaluation on a CPU."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)]
    found = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.add(frame.f_code.co_filename[len(str(PACKAGE)) + 1 :])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        ad.evaluate(net, data, num_samples=4)
    finally:
        sys.setprofile(before)
    return found


def test_the_walk_of_a_classifier_names_every_file_that_runs():
    section = PAGE.split("## A classifier on a CPU")[1].split("\n## ")[0]
    assert traced_files() - named_files(section) == set()


def test_walks_are_short():
    classifier = PAGE.split("## A classifier on a CPU")[1].split("These are 20 files.")[0]
    assert len(named_files(classifier)) == 20
    text = PAGE.split("## A text on a GPU")[1].split("\n## ")[0]
    assert len(named_files(text)) <= 40
