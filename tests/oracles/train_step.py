"""A training step in plain torch with given masks, in the dtype of the model.

The masks are those that a `FusedStep` has just drawn, so that both make the same step.
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from afterdrop.train.objective import add_prior_gradient, data_loss
from afterdrop.train.optimiser import build_optimiser
from afterdrop.train.penalties import text_penalties


def drawn_masks(steps):
    """The masks of a step in the order in which a model asks for them, pass by pass."""
    masks, objective = _masks_of_all_rows(steps), steps.config.objective
    if steps.rows.samples == objective.samples:  # one pass
        return masks
    rows = steps.rows.count // 2
    first, second = ([mask[..., part, :] for mask in masks] for part in _halves(rows))
    if objective.fraternal_penalty > 0:
        return first + second
    assert all((mask == 1).all() for mask in second)
    return first


def _halves(rows):
    return slice(0, rows), slice(rows, 2 * rows)


def _masks_of_all_rows(steps):
    """The masks in the order in which a model asks for them, without padding."""
    H, E = steps.model.config.hidden_sizes[0], steps.model.embedding.shape[1]
    (state, inter), sharing = steps.stack.masks, steps.stack.sharing
    units, table = steps.masks.units, steps.masks.table
    masks = [] if table is None else [table[: steps.model.config.vocabulary, None]]
    masks += [units["input"][..., :E]] if "input" in units else []
    for layer in range(steps.stack.shape.layers):
        if layer and sharing[1] != "none":
            masks.append(inter[layer - 1, ..., :H])
        if sharing[0] != "none":
            whole = state[layer, ..., :H]
            masks.append(whole if sharing[0] == "step" else whole[0])
    if "output" in units:
        masks.append(units["output"][..., :H])
    if "projection" in units:
        mask, components = units["projection"], steps.model.config.softmax_components
        masks.append(mask.unflatten(-1, (components, -1))[..., :E].flatten(-2))
    return masks


class Given(TorchFunctionMode):
    """Replaces F.dropout by multiplication with given masks, in their order."""

    def __init__(self, masks):
        super().__init__()
        self.queue = masks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.dropout:
            return args[0] * self.queue.pop(0) if kwargs["training"] else args[0]
        return func(*args, **(kwargs or {}))


class PlainSteps:
    """Steps of a model as `Trainer` makes them, in the dtype of the model."""

    def __init__(self, config, task, model):
        self.config, self.task, self.model, self.state = config, task, model, None
        self.parameters = list(model.parameters())
        self.optimiser = build_optimiser(self.parameters, config.optimiser)

    def step(self, number, masks, kept_B):
        """The data term of a step; `kept_B` says which rows keep their state."""
        queue = [mask.to(self.parameters[0]) for mask in masks]
        before = self.state
        objective = self.config.objective
        if before is not None:
            kept_B1 = kept_B.to(self.parameters[0]).repeat(objective.samples).unsqueeze(1)
            before = tuple((h * kept_B1, c * kept_B1) for h, c in before)
        inputs, targets = self.task.stripes[number]
        self.model.train()
        with Given(queue):
            passes = self.task._passes(self.model, inputs.repeat(objective.samples, 1), before)
        assert not queue
        self.state = tuple((h.detach(), c.detach()) for h, c in passes.first.state)
        logits = self.model.logits(passes.first)
        loss = data_loss(logits, targets, samples=objective.samples, alpha=objective.alpha)
        if passes.second is not None:
            loss = (loss + data_loss(self.model.logits(passes.second), targets)) / 2
        self.penalties = text_penalties(objective, self.model, passes, share=1.0)
        self.logits, self.targets = logits.detach(), targets
        self.optimiser.zero_grad()
        (loss if self.penalties is None else loss + self.penalties.sum()).backward()
        add_prior_gradient(self.parameters, objective.l2_penalty)
        if self.config.optimiser.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optimiser.max_norm)
        self.optimiser.step()
        return loss.detach()
