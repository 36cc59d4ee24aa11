"""The chosen member of a trained language model, opened on a stream of text."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from afterdrop.data import TextSet
from afterdrop.errors import DataError
from afterdrop.evaluation.engines.text import StreamSettings
from afterdrop.models import LanguageModel
from afterdrop.runs.chosen import load_chosen
from afterdrop.runs.folder import load_choice
from afterdrop.selection.stream_predictor import StreamPredictor
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
    run: Path, num_samples: int | None, data: Path | None, device: str | None
) -> Stream:
    """Opens the chosen member of a run as it was evaluated."""
    member, notes = load_choice(run)
    loaded = load_chosen(run, notes, choose_device(device))
    text = loaded.load_data(data)
    if not isinstance(loaded.model, LanguageModel) or not isinstance(text, TextSet):
        raise DataError(f"{run} holds a classifier; this verb is for language models")
    stream = StreamSettings(**notes["stream"])
    samples = num_samples or notes["num_samples"]
    predictor = StreamPredictor(
        loaded.model, member, samples, notes["seed"], stream, notes["masks"]
    )
    return Stream(predictor, text, stream.time)
