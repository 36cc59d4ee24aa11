"""afterdrop sample: text drawn from the chosen member."""

from pathlib import Path

from tyro.conf import Positional

from afterdrop.cli.stream import open_stream
from afterdrop.data import decode_text


def sample(
    run: Positional[Path],
    /,
    length: int = 100,
    seed: int = 0,
    num_samples: int | None = None,
    data_folder: Path | None = None,
    device: str = "cpu",
) -> None:
    """Draw a text from the chosen member of a trained language model.

    Args:
        run: A run folder of afterdrop train with a chosen member.
        length: Tokens to draw.
        seed: Of the drawing.
        num_samples: Mask samples; by default those that the choice was made for.
        data_folder: The folder of the named data sets, if not the one of training.
        device: Where the model runs, such as cuda.
    """
    stream = open_stream(run, num_samples, data_folder, device)
    vocabulary = stream.text.vocabulary
    drawn = stream.predictor.sample(vocabulary.eos_id, length, seed)
    print(decode_text(drawn, vocabulary, stream.text.level))
