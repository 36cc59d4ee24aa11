"""The log-probabilities of every mask sample of an evaluation, for oracles to average."""

import numpy as np
import torch

import afterdrop as ad
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import Plan
from oracles.family import log_softmax


def sampled_log_probs(model, x, plan: Plan, multiplier=1.0):
    """Log-probabilities [K, B, ..., V] in float64, one pass per sample."""
    outputs = sampled_outputs(model, x, plan, multiplier)
    return log_softmax(np.stack([output.double().numpy() for output in outputs]))


def sampled_outputs(model, x, plan: Plan, multiplier=1.0, logits=None):
    """What the model returns, one pass per sample."""
    sites = ad.find_sites(model, x, logits=logits)
    control, out = sites.control(model), []
    modes = [(m, m.training) for m in model.modules()]
    with torch.no_grad(), control.prepared(multiplier):
        for k in range(plan.num_samples):
            rows = Rows(plan, (multiplier,), range(k, k + 1), torch.arange(len(x)))
            out.append(control.forward(rows, x))
    for module, mode in modes:
        module.training = mode
    return out


def layers(model):
    """(weight, bias) of the two linear layers of `zoo.mlp` in float64."""
    return [
        (model[i].weight.detach().double().numpy(), model[i].bias.detach().double().numpy())
        for i in (0, 3)
    ]
