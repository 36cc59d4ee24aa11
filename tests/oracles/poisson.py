"""The example of docs/tasks.md: a likelihood of counts that a user writes."""

import torch

import afterdrop as ad


class Poisson(ad.ParametricLikelihood):
    """Counts; the model returns log-rates."""

    name = "poisson"
    discrete = True

    def log_prob(self, parameters, y):
        log_rate = parameters[..., 0]
        inside = y * log_rate - log_rate.exp() - torch.lgamma(y.clamp_min(0) + 1)
        return inside.masked_fill(y < 0, float("-inf"))

    def why_invalid_targets(self, y):
        """Counts are not negative."""
        return "negative counts" if bool((y < 0).any()) else None

    def support(self, parameters, temperatures):
        rate = parameters[..., 0].exp().amax(0) * max(1.0, temperatures[1])
        high = rate + 10 * rate.sqrt() + 30
        return torch.zeros_like(high), high, torch.ones_like(high)

    def geometric(self, parameters):
        return parameters.mean(0)
