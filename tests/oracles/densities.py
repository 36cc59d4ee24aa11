"""Members of Gaussian and Poisson samples restated in float64 with SciPy, independent of afterdrop.

Legend: K samples of one target. A sample is a frozen SciPy distribution.
"""

import itertools

import numpy as np
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm, poisson


def gaussians(means, variances):
    return [norm(m, np.sqrt(v)) for m, v in zip(means, variances)]


def poissons(rates):
    return [poisson(rate) for rate in rates]


class Density:
    """A member of the family: power mean alpha of samples, to the power 1/T, normalised."""

    def __init__(self, samples, alpha, temperature=1.0, temper="mean"):
        self.samples, self.alpha = samples, alpha
        if temper == "sample":  # of Gaussians
            self.samples = [norm(s.mean(), s.std() * np.sqrt(temperature)) for s in samples]
            temperature = 1.0
        self.temperature = temperature
        reach = 9 * max(s.std() for s in self.samples) * max(1, np.sqrt(temperature))
        means = [s.mean() for s in self.samples]
        self.low, self.high = min(means) - reach, max(means) + reach
        self.breaks = sorted(means)
        self.z = self.integral(lambda y: np.exp(self.log_mean(y) / self.temperature))

    def log_mean(self, y):
        lp = np.array([s.logpdf(y) for s in self.samples])
        if self.alpha == 0:
            return lp.mean(0)
        peak = lp.max(0)
        return peak + np.log(np.exp(self.alpha * (lp - peak)).mean(0)) / self.alpha

    def integral(self, f, low=None, high=None):
        low, high = self.low if low is None else low, self.high if high is None else high
        inside = [b for b in self.breaks if low < b < high]
        edges = [low, *inside, high]
        return sum(
            quad(f, a, b, limit=200, epsabs=1e-12, epsrel=1e-11)[0]
            for a, b in itertools.pairwise(edges)
        )

    def pdf(self, y):
        return np.exp(self.log_mean(y) / self.temperature) / self.z

    def nll(self, y):
        return -np.log(self.pdf(y))

    def cdf(self, y):
        return self.integral(self.pdf, high=y)

    @property
    def mean(self):
        return self.integral(lambda y: y * self.pdf(y))

    @property
    def variance(self):
        mean = self.mean
        return self.integral(lambda y: (y - mean) ** 2 * self.pdf(y))

    @property
    def entropy(self):
        return self.integral(lambda y: -self.pdf(y) * np.log(self.pdf(y) + 1e-300))

    def quantile(self, share):
        return brentq(lambda y: self.cdf(y) - share, self.low, self.high, xtol=1e-9)

    def crps(self, y):
        """E|Y − y| − ½ E|Y − Y′|, the second as the integral of F (1 − F)."""
        distance = self.integral(lambda x: (y - x) * self.pdf(x), high=y)
        distance += self.integral(lambda x: (x - y) * self.pdf(x), low=y)
        points = np.linspace(self.low, self.high, 20001)
        pdf, step = self.pdf(points), points[1] - points[0]
        below = np.concatenate([[0.0], np.cumsum((pdf[1:] + pdf[:-1]) / 2 * step)])
        return distance - np.trapezoid(below * (1 - below), points)


class Counts:
    """The same for counts: sums instead of integrals."""

    def __init__(self, samples, alpha, temperature=1.0, most=400):
        self.points = np.arange(most)
        lp = np.array([s.logpmf(self.points) for s in samples])
        if alpha == 0:
            log_mean = lp.mean(0)
        else:
            peak = lp.max(0)
            log_mean = peak + np.log(np.exp(alpha * (lp - peak)).mean(0)) / alpha
        weights = np.exp(log_mean / temperature)
        self.z = weights.sum()
        self.p = weights / self.z

    def nll(self, y):
        return -np.log(self.p[int(y)])

    @property
    def mean(self):
        return (self.points * self.p).sum()

    @property
    def variance(self):
        return ((self.points - self.mean) ** 2 * self.p).sum()

    def cdf(self, y):
        return self.p[: int(y) + 1].sum()

    def crps(self, y):
        return ((self.p.cumsum() - (self.points >= y)) ** 2).sum()
