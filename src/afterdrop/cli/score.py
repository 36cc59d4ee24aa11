"""afterdrop score: log-probabilities of a text under the chosen member."""

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt, OptionalPath, OptionalText
from afterdrop.cli.stream import open_stream
from afterdrop.data import encode_text, read_content
from afterdrop.errors import DataError
from afterdrop.family.presentation import presentation
from afterdrop.plain_text import one_line


def score(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    file: Annotated[Positional[Path], tyro.conf.arg(metavar="FILE")],
    /,
    tokens: bool = False,
    num_samples: OptionalInt = None,
    data: OptionalPath = None,
    device: OptionalText = None,
) -> None:
    """Score a text file with the chosen member of a trained language model.

    Prints the number of tokens, the log-probability and the perplexity (bits for characters and
    bytes); with --tokens a line per token: log-probability and token.

    For example:
      afterdrop score runs/ptb letter.txt
      afterdrop score runs/ptb letter.txt --tokens

    Args:
        run: A run folder of afterdrop train with a chosen member.
        file: The text, plain, gz or xz.
        tokens: Print every token.
        num_samples: Mask samples; by default those that the choice was made for.
        data: The folder of the data, if they have moved since training.
        device: Where the model runs; a GPU if there is one.
    """
    stream = open_stream(run, num_samples, data, device)
    text = stream.text
    ids = encode_text(read_content(file), text.vocabulary, text.level, str(file)).long()
    if not len(ids):
        raise DataError(f"{file} holds no tokens")
    log_probs = stream.score(ids)
    if tokens:
        for token, value in zip(text.vocabulary.decode(ids), log_probs.tolist()):
            word = one_line(token) if text.level == "word" else repr(token)
            print(f"{value:10.4f}  {word}")
    xe = -log_probs.mean().item()
    shown = presentation(text.unit)
    print(
        f"{len(ids)} tokens, log-probability {log_probs.sum().item():.2f} nats, "
        f"{shown.name} {shown.show(xe):.{shown.digits}f}"
    )
