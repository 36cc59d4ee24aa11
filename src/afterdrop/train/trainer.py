"""The state of a run in memory: training steps, validations, and checkpoints of all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from afterdrop import kernels
from afterdrop.models import LanguageModel
from afterdrop.ranks import SINGLE_PROCESS, Ranks
from afterdrop.train.averaging import WeightAverage
from afterdrop.train.checkpoint import Checkpoint, grouped
from afterdrop.train.checks import DivergedError
from afterdrop.train.config import TrainConfig
from afterdrop.train.objective import add_prior_gradient, prior_loss
from afterdrop.train.optimiser import AdamTF, build_optimiser
from afterdrop.train.replicas import sum_gradients
from afterdrop.train.schedule import ScheduleState, advance, learning_rate
from afterdrop.train.task import Task
from afterdrop.train.text_task import TextTask
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
        self.average: WeightAverage | None = None
        self.step = 0
        self.seconds = 0.0
        # Over the steps of the interval; on the device, so that a step does not wait for it.
        self.loss_total = torch.zeros((), dtype=torch.float64, device=self.device)
        reason = self._why_not_fused()
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
            self.loss_total += self._first_step()
        else:
            fused = self._kernels()
            self.loss_total += self._plain_step() if fused is None else fused.step(self.step)
        if self.average is not None:
            self.average.update()
        self.step += 1

    def _first_step(self) -> Tensor:
        """The step that compiles the kernels; if they fail, it is repeated without them."""
        before = self.capture().copy()
        fused = self._kernels()
        try:
            if fused is not None:
                loss = fused.step(self.step)
                self._stepped = True
                return loss
        except Exception as error:
            self._give_up_kernels(error)
        self.restore(before)
        return self._plain_step()

    def _give_up_kernels(self, error: Exception) -> None:
        """Trains without kernels from here on if the error means that they cannot run."""
        self.plain = kernels.reason_to_fall_back(error, "training")
        self._fusible, self._fused = False, None

    def _plain_step(self) -> Tensor:
        if not self.model.training:
            self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.task.loss(self.model, self.step)
        loss.backward()
        loss = sum_gradients(self.parameters, loss.detach(), self.ranks)
        add_prior_gradient(self.parameters, self.config.objective.l2_penalty)
        if self.config.optimiser.max_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.optimiser.max_norm)
        self.optimiser.step()
        return loss

    def _why_not_fused(self) -> str | None:
        """Why the kernels cannot train this run; None if they can."""
        if reason := kernels.why_not(self.device):
            return reason
        if self.ranks.count > 1:  # their masks would differ from those of one process
            return f"{self.ranks.count} ranks train it"
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
                self._fused = FusedText(task, model, optimiser, self.step)
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

    @torch.no_grad()
    def validate(self, stop: Callable[[], bool]) -> Validation | None:
        """Validates the model, or its averaged weights; None if interrupted."""
        self.model.eval()
        fused = (
            self._kernels()
        )  # copies the weights, so it comes before the averaged ones are in place
        with nullcontext() if self.average is None else self.average.in_place():
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
            "averaged": 0 if self.average is None else self.average.count,
            **asdict(found),
        }
        xe = found.xe_optimal if config.validation.criterion == "optimal" else found.xe
        self.schedule = advance(self.schedule, xe, config.schedule, config.averaging)
        if self.schedule.averaging and self.average is None:
            self.average = WeightAverage(self.model)
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate()
        self.loss_total.zero_()
        return {**line, "best_interval": self.schedule.best_interval, "best_xe": self.schedule.best}

    def capture(self) -> Checkpoint:
        """A checkpoint with everything that the rest of the run depends on."""
        state = self.optimiser.state_dict()
        tensors = {
            **grouped("model", dict(self.model.named_parameters())),
            **grouped("carried", self.task.carried()),
            **_random_states(self.device),
            "loss_total": self.loss_total,
        }
        for index, values in state["state"].items():
            tensors |= grouped(f"optimiser.{index}", values)
        if self.average is not None:
            tensors |= grouped("average", self.average.tensors())
        facts = {
            "step": self.step,
            "schedule": asdict(self.schedule),
            "optimiser": state["param_groups"],
            "averaged": None if self.average is None else self.average.count,
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
        self.average = None
        if saved.facts["averaged"] is not None:
            self.average = WeightAverage(self.model)
            self.average.restore(saved.group("average"), saved.facts["averaged"])
        self.task.restore({n: t.to(self.device) for n, t in saved.group("carried").items()})
        self.step, self.seconds = saved.facts["step"], saved.facts["seconds"]
        self.loss_total.copy_(saved.tensors["loss_total"])
        _restore_random_states(saved, self.device)

    def best_checkpoint(self, found: dict[str, Any]) -> Checkpoint:
        """The weights that were validated last, and their line of metrics."""
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        if self.average is not None and found["averaged"] > 0:
            weights = self.average.tensors()
        return Checkpoint(grouped("model", weights), found)

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


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_states(saved: Checkpoint, device: torch.device) -> None:
    states = saved.group("random")
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
