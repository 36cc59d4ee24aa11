"""afterdrop sample: text drawn from the chosen member."""

import re
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt, OptionalPath, OptionalText
from afterdrop.cli.stream import open_stream
from afterdrop.data import decode_text
from afterdrop.errors import DataError
from afterdrop.plain_text import one_line


def sample(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    length: int = 100,
    seed: int = 0,
    num_samples: OptionalInt = None,
    data: OptionalPath = None,
    device: OptionalText = None,
) -> None:
    """Draw a text from the chosen member of a trained language model.

    For example:
      afterdrop sample runs/ptb --length 200 --seed 1

    Args:
        run: A run folder of afterdrop train with a chosen member.
        length: Tokens to draw.
        seed: Of the drawing.
        num_samples: Mask samples; by default those that the choice was made for.
        data: The folder of the data, if they have moved since training.
        device: Where the model runs; a GPU if there is one.
    """
    if length < 1:
        raise DataError(f"length={length} must be at least 1 token")
    stream = open_stream(run, num_samples, data, device)
    vocabulary = stream.text.vocabulary
    drawn = stream.predictor.sample(vocabulary.eos_id, length, seed)
    text = decode_text(drawn, vocabulary, stream.text.level)
    parts = re.split(r"([\n\t])", text)  # the text's own; other control characters are escaped
    print("".join(part if part in "\n\t" else one_line(part) for part in parts))
