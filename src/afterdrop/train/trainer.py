"""The state of a run in memory: training steps, validations, and checkpoints of all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from afterdrop import kernels
from afterdrop.models import LanguageModel
from afterdrop.ranks import SINGLE_PROCESS, Ranks
from afterdrop.train.average_kinds import (
    Average,
    average_facts,
    average_tensors,
    first_average,
    restored_average,
)
from afterdrop.train.averaging import WeightAverage
from afterdrop.train.checkpoint import Checkpoint, grouped
from afterdrop.train.checks import DivergedError
from afterdrop.train.config import TrainConfig
from afterdrop.train.objective import add_prior_gradient, prior_loss
from afterdrop.train.optimiser import AdamTF, build_optimiser
from afterdrop.train.penalties import active_penalties
from afterdrop.train.random_states import random_states, restore_random_states
from afterdrop.train.replicas import FailedElsewhere, sum_gradients, together
from afterdrop.train.schedule import ScheduleState, advance, learning_rate
from afterdrop.train.task import Task
from afterdrop.train.text_task import TextTask
from afterdrop.train.two_tailed import TwoTailedAverage, Weights
from afterdrop.train.validation import Validation, validate

if TYPE_CHECKING:
    from afterdrop.train.fused_text import FusedText

_Item = TypeVar("_Item")


class Trainer:
    """A model being trained.

    Args:
        config: The run's configuration.
        task: The data and the loss.
        model: The model, on the device.
        ranks: The processes that train it together, each with a replica and a share of every batch.

    Attributes:
        plain: Why a GPU trains this run without kernels; None if it uses them, or on a CPU.
    """

    def __init__(
        self, config: TrainConfig, task: Task, model: nn.Module, ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        self.config, self.task, self.model, self.ranks = config, task, model, ranks
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.optimiser = build_optimiser(self.parameters, config.optimiser)
        self.schedule = ScheduleState()
        self.average: Average | None = first_average(model, config.averaging)
        self._compared: dict[Weights, float] = {}  # XE of all that the last validation compared
        self._raw = False  # whether it settled on the weights themselves in spite of averaging
        self.step = 0
        self.seconds = 0.0
        # Loss, effective samples and penalties, summed over the steps of the interval; on the
        # device, so that a step does not wait for them.
        self.penalties = tuple(active_penalties(config.objective))
        count = 2 + len(self.penalties)
        self.totals = torch.zeros(count, dtype=torch.float64, device=self.device)
        self.loss_total, self.effective_total, *_ = self.totals
        self.penalty_totals = self.totals[2:]
        reason = self._why_not_fused()
        if ranks.count > 1 and self.device.type == "cuda":  # all ranks use the kernels, or none
            reason = next(filter(None, ranks.gather(reason)), None)
        self.plain = reason if self.device.type == "cuda" else None
        self._fusible = reason is None
        self._fused: FusedText | None = None  # made once the state to continue from is known
        self._stepped = False  # whether the kernels have completed a step

    @property
    def interval_done(self) -> bool:
        """Whether a validation is due."""
        return (
            self.interval_steps == self.config.schedule.steps_per_interval
            or self.schedule.interval < 0
        )

    @property
    def interval_steps(self) -> int:
        """Steps done since the last validation."""
        return self.step - max(self.schedule.interval, 0) * self.config.schedule.steps_per_interval

    def train_step(self) -> None:
        """One step: loss, prior, clipping, update, averaging."""
        if self._fusible and not self._stepped:
            found = self._first_step()
        else:
            fused = self._kernels()
            found = self._plain_step() if fused is None else self._fused_step(fused)
        self.totals[: len(found)] += found
        if self.average is not None:
            self.average.update()
        self.step += 1

    def _fused_step(self, fused: FusedText) -> Tensor:
        fused.step(self.step)
        return fused.steps.numbers

    def _first_step(self) -> Tensor:
        """The step that compiles the kernels; if they fail, it is repeated without them."""
        before = self.capture().copy()
        fused = self._kernels()
        try:
            if fused is not None:
                found = self._fused_step(fused)
                self._stepped = True
                return found
        except Exception as error:
            self._give_up_kernels(error)
        self.restore(before)
        return self._plain_step()

    def _give_up_kernels(self, error: Exception) -> None:
        """Trains without kernels from here on if the error means that they cannot run."""
        if isinstance(error, FailedElsewhere):
            self.plain = "a kernel cannot run on another rank"
        else:
            self.plain = kernels.reason_to_fall_back(error, "training")
        self._fusible, self._fused = False, None

    def _plain_step(self) -> Tensor:
        """Returns the numbers of the step, as far as there are any (see `StepLoss.numbers`)."""
        if not self.model.training:
            self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.task.loss(self.model, self.step)
        loss.total.backward()
        numbers = sum_gradients(self.parameters, loss.numbers(), self.ranks)
        add_prior_gradient(self.parameters, self.config.objective.l2_penalty)
        if self.config.optimiser.max_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.optimiser.max_norm)
        self.optimiser.step()
        return numbers

    def _why_not_fused(self) -> str | None:
        """Why the kernels cannot train this run; None if they can."""
        if reason := kernels.why_not(self.device):
            return reason
        from afterdrop.train.fused_text import why_not

        return why_not(self.config, self.task, self.model, self.device)

    def _kernels(self) -> FusedText | None:
        """The kernels that train this run, or None."""
        if self._fused is None and self._fusible:
            from afterdrop.train.fused_text import FusedText

            task, model, optimiser = self.task, self.model, self.optimiser
            assert isinstance(task, TextTask) and isinstance(model, LanguageModel)
            assert isinstance(optimiser, AdamTF)
            try:
                self._fused = together(
                    lambda: FusedText(task, model, optimiser, self.step), self.ranks
                )
            except Exception as error:
                self._give_up_kernels(error)
        return self._fused

    def mean_loss(self) -> float | None:
        """Nats per target over the interval so far; None before its first step.

        Raises:
            DivergedError: If it is not finite.
        """
        if self.interval_steps == 0:
            return None
        loss = float(self.loss_total) / self.interval_steps / self.task.window
        self._require_finite("training loss", loss)
        return loss

    def effective_samples(self) -> float | None:
        """The mean effective number of mask samples over the interval; None before a step."""
        steps = self.interval_steps
        return float(self.effective_total) / steps if steps else None

    def mean_penalties(self) -> dict[str, float | None]:
        """What each penalty added to the loss per target over the interval; None before a step."""
        places = self.interval_steps * self.task.window
        found = self.penalty_totals.tolist()
        return {n: total / places if places else None for n, total in zip(self.penalties, found)}

    def validate(self, stop: Callable[[], bool]) -> Validation | None:
        """Validates the model, or its averaged weights; None if interrupted.

        With two-tailed averaging, it validates all of them and settles on one.
        """
        average = self.average
        if not isinstance(average, TwoTailedAverage):
            return self._validate(stop, nullcontext() if average is None else average.in_place())
        results: dict[Weights, Validation] = {}
        for which in average.candidates():
            one = self._validate(stop, average.in_place(which))
            if one is None:
                return None
            results[which] = one
        self._compared = {which: self._criterion(one) for which, one in results.items()}
        chosen = average.settle(self._compared, self.config.schedule.steps_per_interval)
        self._raw = chosen == "raw"
        return results[chosen]

    @torch.no_grad()
    def _validate(
        self, stop: Callable[[], bool], weights: AbstractContextManager[None]
    ) -> Validation | None:
        self.model.eval()
        fused = self._kernels()  # copies the weights, so it comes before others are in place
        with weights:
            try:
                batches = (
                    self.task.validation_batches(self.model)
                    if fused is None
                    else fused.validation_batches()
                )
                found = validate(_until(stop, batches), self.ranks)
            except Exception as error:
                if not self._fusible:
                    raise
                self._give_up_kernels(
                    error
                )  # a validation has no side effects, so it can be repeated
                found = validate(_until(stop, self.task.validation_batches(self.model)), self.ranks)
        if self.ranks.max(stop()):
            return None
        self._require_finite("validation XE", found.xe)
        return found

    def finish_interval(self, found: Validation) -> dict[str, Any]:
        """Advances the schedule; returns the line of metrics of this validation."""
        config = self.config
        line = {
            "interval": self.schedule.interval + 1,
            "step": self.step,
            "loss": self.mean_loss(),
            "prior": prior_loss(self.parameters, config.objective.l2_penalty),
            "learning_rate": self._learning_rate(),
            "averaged": 0 if self.average is None or self._raw else self.average.count,
            **asdict(found),
        }
        line |= {f"xe_{which}": xe for which, xe in self._compared.items()}
        if config.objective.samples > 1:
            line["effective_samples"] = self.effective_samples()
        line |= {f"{name}_penalty": value for name, value in self.mean_penalties().items()}
        xe = self._criterion(found)
        self.schedule = advance(self.schedule, xe, config.schedule, config.averaging)
        if self.schedule.averaging and self.average is None:
            self.average = WeightAverage(self.model)
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate()
        self.totals.zero_()
        return {**line, "best_interval": self.schedule.best_interval, "best_xe": self.schedule.best}

    def capture(self) -> Checkpoint:
        """A checkpoint with everything that the rest of the run depends on."""
        state = self.optimiser.state_dict()
        tensors = {
            **grouped("model", dict(self.model.named_parameters())),
            **grouped("carried", self.task.carried()),
            **random_states(self.device),
            **average_tensors(self.average),
            "loss_total": self.loss_total,
            "effective_total": self.effective_total,
        }
        if self.penalties:
            tensors["penalty_totals"] = self.penalty_totals
        for index, values in state["state"].items():
            tensors |= grouped(f"optimiser.{index}", values)
        facts = {
            "step": self.step,
            "schedule": asdict(self.schedule),
            "optimiser": state["param_groups"],
            **average_facts(self.average),
            "seconds": self.seconds,
        }
        return Checkpoint(tensors, facts)

    @torch.no_grad()
    def restore(self, saved: Checkpoint) -> None:
        """Continues from a checkpoint; on a CPU, bit for bit."""
        self._fused = None  # it holds the previous state
        self.model.load_state_dict(saved.group("model"))
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in saved.group("optimiser").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        groups = saved.facts["optimiser"]
        self.optimiser.load_state_dict({"state": state, "param_groups": groups})
        schedule = dict(saved.facts["schedule"])
        self.schedule = ScheduleState(**schedule | {"bests": tuple(schedule["bests"])})
        self.average = restored_average(self.model, self.config.averaging, saved)
        self.task.restore({n: t.to(self.device) for n, t in saved.group("carried").items()})
        self.step, self.seconds = saved.facts["step"], saved.facts["seconds"]
        self.loss_total.copy_(saved.tensors["loss_total"])
        self.effective_total.copy_(saved.tensors["effective_total"])
        if self.penalties:
            self.penalty_totals.copy_(saved.tensors["penalty_totals"])
        restore_random_states(saved, self.device)

    def best_checkpoint(self, found: dict[str, Any]) -> Checkpoint:
        """The weights that were validated last, and their line of metrics."""
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        if self.average is not None and found["averaged"] > 0:
            weights = self.average.tensors()
        return Checkpoint(grouped("model", weights), found)

    def _criterion(self, found: Validation) -> float:
        optimal = self.config.validation.criterion == "optimal"
        return found.xe_optimal if optimal else found.xe

    def _learning_rate(self) -> float:
        base = self.config.optimiser.learning_rate
        return learning_rate(base, self.schedule, self.config.schedule)

    def _require_finite(self, what: str, value: float) -> None:
        if not abs(value) < float("inf"):
            raise DivergedError(
                f"the {what} is {value} at step {self.step}: training has diverged. The same "
                "configuration would diverge again: lower optimiser.learning_rate or "
                "optimiser.max_norm and train in a new folder"
            )


def _until(stop: Callable[[], bool], items: Iterable[_Item]) -> Iterator[_Item]:
    for item in items:
        yield item
        if stop():
            return
