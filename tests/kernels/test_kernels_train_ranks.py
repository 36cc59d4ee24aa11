"""Training steps of `FusedText` on shares of a batch against one process with the whole batch.

Ranks are simulated in one process: `sum` waits until both have given their tensors.
`tests/scale` starts real ranks, and `tests/gpu` real ranks with kernels on a GPU.
"""

import threading

import kernel_device
import pytest
import tiny_run
import torch
from kernel_device import relative, within

from afterdrop.ranks import Ranks
from afterdrop.train.fused_text import FusedText
from afterdrop.train.validation import validate

pytestmark = kernel_device.quiet
device = kernel_device.device


class Meeting:
    """Where two simulated ranks, one per thread, leave values for each other.

    Only one thread runs at a time, because the interpreter is not made for threads.
    """

    def __init__(self):
        self.turn, self.running, self.ended = threading.Condition(), 0, False
        self.left = [], []

    def exchange(self, rank, value):
        """The values that both ranks give in this exchange."""
        self.left[rank].append(value)
        at = len(self.left[rank]) - 1
        if len(self.left[1 - rank]) <= at:
            self.let_run(1 - rank)
            self.wait(rank)
        return self.left[0][at], self.left[1][at]

    def let_run(self, rank, *, ended=False):
        with self.turn:
            self.running, self.ended = rank, self.ended or ended
            self.turn.notify_all()

    def wait(self, rank):
        with self.turn:
            self.turn.wait_for(lambda: self.running == rank or self.ended, timeout=60)


class ThreadRanks(Ranks):
    """A simulated rank."""

    def __init__(self, rank, meeting):
        super().__init__(rank, 2)
        object.__setattr__(self, "meeting", meeting)

    def max(self, number):
        return max(self.meeting.exchange(self.rank, int(number)))

    def gather(self, value):
        return list(self.meeting.exchange(self.rank, value))

    def sum(self, tensor):
        one, other = self.meeting.exchange(self.rank, tensor.clone())
        return tensor.copy_(one + other)


def in_two_threads(call):
    """Runs `call(ranks)` for both ranks; returns both results."""
    meeting, results = Meeting(), [None, None]

    def work(rank):
        meeting.wait(rank)
        try:
            results[rank] = call(ThreadRanks(rank, meeting))
        except Exception as error:
            results[rank] = error
        meeting.let_run(1 - rank, ended=True)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def trained(config, device, ranks, steps=2):
    """A run after some steps, its losses and its validation."""
    run = tiny_run.trainer(config, device, ranks)
    fused = FusedText(run.task, run.model, run.optimiser, 0, torch.float32)
    losses = [fused.step(number).item() for number in range(steps)]
    return run, fused, losses, validate(fused.validation_batches(), ranks)


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        ({"hidden_sizes": [5, 5], "state_dropout": 0.2, "embedding_dropout": 0.2}, {"samples": 2}),
        (
            {"embedding_size": 3, "tied": False, "output_sharing": "sequence"},
            {"fraternal_penalty": 1.0, "temporal_activation_penalty": 10.0},
        ),
    ],
    ids=["two samples", "untied with projection, penalties"],
)
def test_two_ranks_make_the_steps_of_one_process(model, objective, tmp_path, device):
    """Losses within 1e-6, updates within 1e-5, equal weights on both ranks."""
    folder = tiny_run.write_text(tmp_path / "text")
    objective = {"batch_size": 4, "state_reset": 0.4} | objective
    config = tiny_run.config(folder, model, objective=objective, validation={"stripes": 3})
    one, alone, losses, found = trained(config, device, Ranks())
    start = tiny_run.trainer(config, device)
    runs = in_two_threads(lambda ranks: trained(config, device, ranks))
    near, nearly = within(device, 1e-6), within(device, 1e-5)
    for run, _, shared, validation in runs:
        assert shared == pytest.approx(losses, rel=near)
        assert validation.targets == found.targets
        assert validation.xe == pytest.approx(found.xe, rel=nearly)
        for first, mine, whole in zip(start.parameters, run.parameters, one.parameters):
            assert relative(mine - first, whole - first) < nearly
    for a, b in zip(runs[0][0].parameters, runs[1][0].parameters):
        assert torch.equal(a, b)
    numbers = [part.steps.numbers for _, part, *_ in runs]
    assert torch.equal(*numbers) and relative(numbers[0], alone.steps.numbers) < near
    samples = alone.steps.rows.samples
    mask = alone.steps.masks.units["input"].unflatten(1, (samples, 4))
    for rank, (_, part, *_) in enumerate(runs):
        mine = part.steps.masks.units["input"].unflatten(1, (samples, 2))
        assert torch.equal(mine, mask[:, :, 2 * rank : 2 * rank + 2])
