"""Types of optional command-line flags, shown in the help without tyro's "None"."""

from pathlib import Path
from typing import Annotated

import tyro

OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
OptionalText = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
OptionalRange = Annotated[
    tuple[float, float] | None, tyro.conf.arg(metavar="LOW HIGH", help_behavior_hint="")
]


def logits_place(text: str | None) -> int | str | None:
    """An index if the text is a number, otherwise a key."""
    return int(text) if text is not None and text.isdecimal() else text
