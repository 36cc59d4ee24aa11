"""Two-tailed averaging with two lists of weights, from which each mean is computed anew.

Restated from the description in arXiv 2209.12581, without imports from `afterdrop`.
"""

import numpy as np


class NaiveTails:
    def __init__(self, patience=None):
        self.short, self.long = [], []
        self.short_losses, self.long_losses = [], []
        self.patience = patience

    def update(self, weights):
        self.short.append(np.asarray(weights, dtype=np.float64))
        self.long.append(np.asarray(weights, dtype=np.float64))

    def means(self):
        return {"short": np.mean(self.short, 0), "long": np.mean(self.long, 0)}

    @property
    def one(self):
        """Whether both means are over the same steps."""
        return len(self.short) == len(self.long)

    def stale(self, losses):
        """Evaluations since the lowest loss; a later one that equals it is no improvement."""
        return len(losses) - 1 - losses.index(min(losses))

    def impatient(self, losses):
        return self.patience is not None and self.stale(losses) >= self.patience

    def evaluate(self, raw, short, long, steps):
        """The loss of the model, and whether it is the raw weights."""
        if not self.long:
            return raw, True
        self.short_losses.append(short)
        self.long_losses.append(long)
        if short <= long or self.impatient(self.long_losses):
            self.long, self.long_losses = list(self.short), [short]
            self.short, self.short_losses = [], []
            long = short
        elif self.impatient(self.short_losses):
            self.short, self.short_losses = [], []
        if raw < long:
            if len(self.long) <= steps:
                self.short, self.long, self.short_losses, self.long_losses = [], [], [], []
            return raw, True
        return long, False
