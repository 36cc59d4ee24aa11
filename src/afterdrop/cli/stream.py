"""The chosen member of a trained language model, opened on a stream of text."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from afterdrop.data import TextSet
from afterdrop.errors import DataError
from afterdrop.runs import Run
from afterdrop.selection import StreamPredictor
from afterdrop.train.device import choose_device


@dataclasses.dataclass(frozen=True)
class Stream:
    """A predictor, its text set and the window in which it was evaluated."""

    predictor: StreamPredictor
    text: TextSet
    window: int

    def score(self, tokens: Tensor) -> Tensor:
        """[N] log-probability of each token, the first after the end of a sentence."""
        inputs = torch.cat([torch.tensor([self.text.vocabulary.eos_id]), tokens[:-1]])
        parts = []
        for x, y in zip(inputs.split(self.window), tokens.split(self.window)):
            log_probs = self.predictor(x.unsqueeze(0))[0].cpu()
            parts.append(log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1).double())
        return torch.cat(parts)


def open_stream(
    path: Path, num_samples: int | None, data: Path | None, device: str | None
) -> Stream:
    """Opens the chosen member of a run as it was evaluated."""
    run = Run.open(path)
    stream = run.choice.request.stream
    loaded = run.load(device=choose_device(device))
    text = loaded.load_data(data)
    if stream is None or not isinstance(text, TextSet):
        raise DataError(f"{path} holds a classifier; this verb is for language models")
    predictor = run.choice.predictor(loaded.model, num_samples=num_samples)
    assert isinstance(predictor, StreamPredictor)
    return Stream(predictor, text, stream.window)
