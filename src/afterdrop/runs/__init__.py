"""Run folders: `Run` is the one door to what a training, an evaluation and a choice wrote."""

from afterdrop.runs.contents import RunContents as RunContents
from afterdrop.runs.contents import read_contents as read_contents
from afterdrop.runs.run import Run as Run
