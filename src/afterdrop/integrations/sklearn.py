"""Estimators of scikit-learn around a trained model: `fit` chooses a member on held-out data.

A model is an `nn.Module`, or a net of skorch, whose module and data loading are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from afterdrop.errors import DataError, ExtraError
from afterdrop.evaluation import evaluate
from afterdrop.evaluation.batches import call, to_device
from afterdrop.family.member import DET, Grid
from afterdrop.selection import Choice, Predictor, select

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as missing:
    raise ExtraError.of(missing, "these estimators need scikit-learn 1.6", "sklearn") from missing

_TINY = 1e-12  # added to the probabilities of a net, as skorch's own loss does


@dataclasses.dataclass(frozen=True)
class _Batches:
    """Batches of an array, each made when it is asked for."""

    count: int
    make: Callable[[int], tuple[Any, Any]]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return self.make(number)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self.make, range(self.count))


class _Chooser(BaseEstimator):  # type: ignore[misc, unused-ignore]
    """What the estimators share: evaluation and selection in `fit`, and batches of predictions."""

    model: Any
    grid: Grid | None
    num_samples: int | Literal["auto"]
    batch_size: int
    seed: int
    prefer: Literal["best", "cheapest"]
    dtype: str | None
    options: Mapping[str, Any] | None

    def _choose(self, X: Any, y: np.ndarray[Any, Any]) -> Self:
        scores = evaluate(
            self._module,
            self._batches(X, y),
            grid=self.grid,
            num_samples=self.num_samples,
            seed=self.seed,
            **self._all_options(),
        )
        return self._adopt(select(scores, prefer=self.prefer))

    def _adopt(self, choice: Choice) -> Self:
        """Predicts with a choice from now on."""
        options = self._all_options()
        made = choice.predictor(self._module, logits=options.get("logits"))
        if not isinstance(made, Predictor):
            raise DataError("choice is of a text or an ensemble; give one of a single module")
        self.choice_, self.predictor_ = choice, made
        return self

    def _all_options(self) -> dict[str, Any]:
        """Further arguments of `evaluate`, those that follow from a skorch net among them."""
        given = dict(self.options or {})
        criterion = getattr(self._net, "criterion_", None)
        if isinstance(criterion, nn.NLLLoss):
            given.setdefault("logits", _log_of_probabilities)
        elif isinstance(criterion, nn.BCEWithLogitsLoss):
            given.setdefault("likelihood", "binary")
        return given

    @property
    def _net(self) -> Any:
        """The skorch net; None if the model is a module itself."""
        if isinstance(self.model, nn.Module):
            return None
        if not isinstance(getattr(self.model, "module_", None), nn.Module):
            raise DataError(
                f"model is {type(self.model).__name__}; give a trained nn.Module or a fitted net "
                "of skorch (inside FrozenEstimator where scikit-learn clones it)"
            )
        return self.model

    @property
    def _module(self) -> nn.Module:
        return self.model if self._net is None else self._net.module_

    def _checked(self, X: Any) -> Any:
        """The inputs as an array; those of a skorch net as they are."""
        if self._net is not None:
            return X
        return validate_data(self, X, reset=False, allow_nd=True)

    def _batches(self, X: Any, y: np.ndarray[Any, Any] | None = None) -> Iterable[tuple[Any, Any]]:
        """Pairs of inputs, on the module's device, and targets."""
        device = next((p.device for p in self._module.parameters()), torch.device("cpu"))
        if self._net is not None:
            loader = self._net.get_iterator(self._net.get_dataset(X, y), training=False)
            return ((to_device(inputs, device), targets) for inputs, targets in loader)
        dtype = None if self.dtype is None else getattr(torch, self.dtype)

        def batch(number: int) -> tuple[Any, Any]:
            rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
            inputs = torch.tensor(X[rows], dtype=dtype, device=device)
            return inputs, None if y is None else torch.tensor(y[rows])

        return _Batches(-(-len(X) // self.batch_size), batch)

    def _predictions(self, X: Any) -> Iterator[Any]:
        for inputs, _ in self._batches(X):
            yield call(self.predictor_, inputs)


class AfterdropClassifier(ClassifierMixin, _Chooser):  # type: ignore[misc, unused-ignore]
    """A trained classifier with dropout as an estimator, whose `fit` chooses how it predicts.

    `fit(X, y)` does not train. It evaluates the family on X and y and takes the best member, so
    give it data that the model was not trained on. `from_choice` takes a choice made before.

    Args:
        model: A trained module that returns logits [B, V], or a fitted net of skorch.
        classes: The labels in the order of the logits. By default those of a skorch net, or the
            sorted labels in y, which must then be as many as the logits.
        grid: As for `evaluate`.
        num_samples: Number of mask samples K, even, or "auto", as for `evaluate`.
        batch_size: Examples per batch; a skorch net has its own.
        seed: Seed of the masks.
        prefer: As for `select`.
        dtype: Type of the inputs, such as "float32"; None keeps that of X, as for token numbers.
        options: Further arguments of `evaluate`, such as {"likelihood": "binary"} for a model with
            one logit per example.

    Attributes:
        classes_: The labels, sorted: the order of the columns of `predict_proba`.
        choice_: The choice.
        predictor_: Its predictor.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
        >>> X, y = np.random.default_rng(0).normal(size=(40, 4)), np.array(["no", "yes"] * 20)
        >>> estimator = AfterdropClassifier(net, num_samples=4).fit(X, y)
        >>> estimator.predict_proba(X[:3]).shape, estimator.classes_.tolist()
        ((3, 2), ['no', 'yes'])
    """

    def __init__(
        self,
        model: Any,
        classes: Any = None,
        *,
        grid: Grid | None = None,
        num_samples: int | Literal["auto"] = "auto",
        batch_size: int = 256,
        seed: int = 0,
        prefer: Literal["best", "cheapest"] = "best",
        dtype: str | None = "float32",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.classes, self.grid, self.num_samples = model, classes, grid, num_samples
        self.batch_size, self.seed, self.prefer = batch_size, seed, prefer
        self.dtype, self.options = dtype, options

    @classmethod
    def from_choice(cls, model: Any, choice: Choice, classes: Any, **settings: Any) -> Self:
        """A fitted estimator from a choice that was made before.

        Args:
            model: The model that was evaluated.
            choice: The choice.
            classes: The labels in the order of the logits.
            **settings: As for the class.

        Raises:
            DataError: If the weights are not those that the choice was made for.
        """
        found = cls(model, classes, **settings)._adopt(choice)
        found._name_classes(classes)
        return found

    def fit(self, X: Any, y: Any) -> Self:
        """Chooses a member of the family on data that the model was not trained on.

        Args:
            X: [B, ...] inputs.
            y: [B] labels.

        Raises:
            DataError: If the classes are not as many as the logits, or y has other labels.
        """
        if self._net is None:
            X, y = validate_data(self, X, y, allow_nd=True)
        y = np.asarray(y)
        check_classification_targets(y)
        known = self.classes if self.classes is not None else getattr(self._net, "classes_", None)
        self._name_classes(np.unique(y) if known is None else known)
        self._check_classes(X)
        found = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        other = self.classes_[found] != y
        if other.any():
            raise DataError(
                f"y has the label {y[other][0].item()!r}, which is not in classes="
                f"{self.classes_.tolist()!r:.80}"
            )
        return self._choose(X, self._logit_of_class[found])

    def _name_classes(self, classes: Any) -> None:
        """Sorts the labels, which scikit-learn's metrics expect, and notes the logit of each."""
        self.classes_, self._logit_of_class = np.unique(np.asarray(classes), return_index=True)

    def _check_classes(self, X: Any) -> None:
        """Compares with the number of logits: a label missing from y would shift the others."""
        options = self._all_options()
        reading = {k: options[k] for k in ("logits", "likelihood") if k in options}
        inputs, _ = next(iter(self._batches(X[:1])))
        columns = call(Predictor(self._module, DET, **reading), inputs).shape[-1]
        if columns != len(self.classes_):
            raise DataError(
                f"the model has {columns} classes and y or classes= has {len(self.classes_)}; give "
                "classes=, the labels in the order of the logits"
            )

    def predict_log_proba(self, X: Any) -> np.ndarray[Any, Any]:
        """Log-probabilities [B, V] of the chosen member, float64."""
        check_is_fitted(self, "predictor_")
        found = torch.cat([p.double().cpu() for p in self._predictions(self._checked(X))])
        # In float32 they sum to 1 within 1e-6 only.
        return found.log_softmax(-1).numpy()[:, self._logit_of_class]

    def predict_proba(self, X: Any) -> np.ndarray[Any, Any]:
        """Probabilities [B, V] of the chosen member, float64."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """The most probable label [B] of each example."""
        best = self.predict_log_proba(X).argmax(-1)  # refuses what is not fitted
        return self.classes_[best]


class AfterdropRegressor(RegressorMixin, _Chooser):  # type: ignore[misc, unused-ignore]
    """A trained regressor with dropout as an estimator, whose `fit` chooses how it predicts.

    `fit(X, y)` does not train: give it data that the model was not trained on. Other arguments are
    those of `AfterdropClassifier`.

    Args:
        model: A trained module or a fitted net of skorch. It returns means [B], or, for the
            likelihood "gaussian", means and variances.
        likelihood: "squared_error" or "gaussian".
        grid: As for `evaluate`.
        num_samples: Number of mask samples K, even, or "auto", as for `evaluate`.
        batch_size: Examples per batch.
        seed: Seed of the masks.
        prefer: As for `select`.
        dtype: Type of the inputs; None keeps that of X.
        options: Further arguments of `evaluate`.

    Attributes:
        choice_: The choice.
        predictor_: Its predictor, which returns distributions.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1), nn.Flatten(0))
        >>> X = np.random.default_rng(0).normal(size=(40, 4))
        >>> estimator = AfterdropRegressor(net, num_samples=4).fit(X, X.sum(1))
        >>> mean, deviation = estimator.predict(X[:3], return_std=True)
        >>> mean.shape, bool((deviation > 0).all())
        ((3,), True)
    """

    def __init__(
        self,
        model: Any,
        likelihood: str = "squared_error",
        *,
        grid: Grid | None = None,
        num_samples: int | Literal["auto"] = "auto",
        batch_size: int = 256,
        seed: int = 0,
        prefer: Literal["best", "cheapest"] = "best",
        dtype: str | None = "float32",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.likelihood, self.grid = model, likelihood, grid
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.prefer = prefer
        self.dtype, self.options = dtype, options

    @classmethod
    def from_choice(cls, model: Any, choice: Choice, **settings: Any) -> Self:
        """A fitted estimator from a choice that was made before.

        Args:
            model: The model that was evaluated.
            choice: The choice.
            **settings: As for the class.
        """
        return cls(model, choice.request.likelihood, **settings)._adopt(choice)

    def _all_options(self) -> dict[str, Any]:
        return {**super()._all_options(), "likelihood": self.likelihood}

    def fit(self, X: Any, y: Any) -> Self:
        """Chooses a member of the family on data that the model was not trained on.

        Args:
            X: [B, ...] inputs.
            y: [B] or [B, ...] numbers.
        """
        if self._net is None:
            X, y = validate_data(self, X, y, allow_nd=True, multi_output=True, y_numeric=True)
        return self._choose(X, np.asarray(y, dtype=np.float32))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means of the predictive distributions.

        Args:
            X: [B, ...] inputs.
            return_std: Whether to return standard deviations as well.

        Returns:
            [B] or [B, ...] float64; with `return_std` two such arrays.
        """
        check_is_fitted(self, "predictor_")
        found = list(self._predictions(self._checked(X)))
        mean = torch.cat([p.mean for p in found]).cpu().numpy()
        if not return_std:
            return mean
        return mean, torch.cat([p.variance for p in found]).sqrt().cpu().numpy()


def _log_of_probabilities(output: Any) -> Tensor:
    """Logits of a net that is trained with NLLLoss: skorch takes the logarithm outside."""
    first = output[0] if isinstance(output, tuple) else output
    return (first + _TINY).log()
