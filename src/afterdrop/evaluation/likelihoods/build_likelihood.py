"""The likelihood that a request names."""

from __future__ import annotations

from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods.binary import Binary
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.likelihoods.density_reading import DensityReading
from afterdrop.evaluation.likelihoods.parametric import (
    Gaussian,
    ParametricLikelihood,
    SquaredError,
)
from afterdrop.evaluation.request import LIKELIHOODS, LOGITS_FUNCTION, Request
from afterdrop.masks.model_call import LogitsPlace

_BUILT_IN = {kind.name: kind for kind in (Gaussian, SquaredError)}


def likelihood_name(likelihood: str | ParametricLikelihood) -> str:
    """What a request records of a likelihood.

    Raises:
        DataError: If it is neither a name nor a likelihood, or has the name of a built-in one.
    """
    if isinstance(likelihood, ParametricLikelihood):
        if not isinstance(getattr(likelihood, "name", None), str):
            raise DataError(
                f"likelihood={type(likelihood).__name__} has no name, by which requests and files "
                "call it; give the class an attribute such as name = 'poisson'"
            )
        if likelihood.name in LIKELIHOODS:
            raise DataError(
                f"likelihood={type(likelihood).__name__} is called {likelihood.name!r}, as one "
                "that is built in; give it another name"
            )
        return likelihood.name
    if likelihood not in LIKELIHOODS:
        raise DataError(
            f"likelihood={likelihood!r} is not built in; give one of {', '.join(LIKELIHOODS)}, or "
            "a ParametricLikelihood of your own, which files do not hold"
        )
    return likelihood


def build_likelihood(
    request: Request,
    logits: LogitsPlace | None = None,
    own: str | ParametricLikelihood | None = None,
) -> Categorical | DensityReading:
    """The likelihood that a request names.

    Args:
        request: The request.
        logits: The function that finds the logits, where the request names one.
        own: The likelihood, where the request names a user's own.

    Raises:
        DataError: If that function or that likelihood is missing.
    """
    name, place = request.likelihood, request.logits if logits is None else logits
    if place == LOGITS_FUNCTION:
        raise DataError(
            "the logits were found by a function of the model's output, which cannot be "
            "stored; give it again: logits=function"
        )
    class_dim = request.class_dim
    if class_dim is None and request.stream is not None:
        class_dim = -1  # of a LanguageModel
    options = request.batch_dim, class_dim, request.ignore_index, place
    if name == "categorical":
        return Categorical(*options)
    if name in ("binary", "multilabel"):
        return Binary(*options, several=name == "multilabel")
    if name in _BUILT_IN:
        own = _BUILT_IN[name]()
    if not isinstance(own, ParametricLikelihood) or own.name != name:
        raise DataError(
            f"likelihood={name!r} is not built in, and a likelihood cannot be stored; give it "
            "again: likelihood=object"
        )
    return DensityReading(
        own, request.batch_dim, request.ignore_index, place, request.noise_variance
    )
