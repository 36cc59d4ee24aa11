"""The only module that uses Optuna: its storages, its Gaussian process, and its importance measure.

Storages keep the trials. The next point is proposed by a study in memory that is built from them,
so that a proposal depends only on the known values and a seed, and not on the worker that asks.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from afterdrop.errors import ExtraError
from afterdrop.file_locks import file_lock
from afterdrop.plain_text import first_line
from afterdrop.tune.checks import TuneError
from afterdrop.tune.journal_file import JournalFile
from afterdrop.tune.search_space import Point, Space
from afterdrop.tune.storage_address import StorageAddress
from afterdrop.tune.storage_retries import StorageAway, StorageNotOpened, retried
from afterdrop.tune.trials import State, Trial, read_trial

try:
    import optuna
    import scipy  # noqa: F401 (the Gaussian process needs it)
    import sqlalchemy
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.trial import FrozenTrial, TrialState, create_trial
    from sqlalchemy.pool import NullPool
except ImportError as missing:
    raise ExtraError.of(missing, "tuning needs optuna, scipy and greenlet", "tune") from missing

optuna.logging.set_verbosity(optuna.logging.ERROR)

_STATES: dict[TrialState, State] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_SETTINGS = "afterdrop"
JOURNAL = "journal.log"  # the default storage, in the folder of the study
# What Optuna raises while it replays a journal whose lines are not those that it wrote.
_REPLAY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Backend:
    """One study in a storage that several processes and hosts may share.

    Args:
        folder: The folder of the study, which contains the journal file of the default storage.
        storage: None, or a URL: `sqlite:///FILE` or `postgresql://...`.
        name: The name of the study in the storage.

    Attributes:
        away_at: When the storage could last not be reached, in seconds of `time.monotonic`.

    Raises:
        StorageNotOpened: If the storage cannot be reached.
        TuneError: If the storage cannot be opened or its URL is not supported.
        ExtraError: If a database driver is missing.
    """

    def __init__(self, folder: Path, storage: str | None, name: str) -> None:
        self.folder, self.url, self.name = folder, storage, name
        self.away_at = -math.inf
        folder.mkdir(parents=True, exist_ok=True)
        self._address = None if storage is None else StorageAddress(storage)
        if not re.fullmatch(r"[\w. -]+", name):
            raise TuneError(
                f"name={name!r} must consist of letters, digits, underscores, dots, dashes and "
                "spaces"
            )
        try:
            with self.exclusive():  # two workers must not create the tables at once
                self._storage = _open(folder, self._address)
                self._study = optuna.create_study(
                    storage=self._storage,
                    sampler=optuna.samplers.RandomSampler(),  # never used: points are enqueued
                    study_name=name,
                    load_if_exists=True,
                )
        except (sqlalchemy.exc.SQLAlchemyError, StorageAway, OSError) as error:
            kind = StorageNotOpened if isinstance(error, StorageAway) else TuneError
            # Without the error as its cause, which may show values of the URL's options.
            raise kind(
                f"storage={self._shown!r} cannot be opened: {self._reason(error)}; check that it "
                "exists and is writable"
            ) from None
        except _REPLAY_ERRORS as error:
            raise self._damaged(error) from None
        except ImportError as error:
            need = f"storage={self._shown!r} needs a database driver"
            raise ExtraError.of(error, need, "postgres") from error

    @property
    def _shown(self) -> str:
        """Where the study is kept, as messages show it."""
        return str(self.folder / JOURNAL) if self._address is None else self._address.shown

    def _reason(self, error: object) -> str:
        """The first line of an error, without passwords of the URL."""
        return first_line(error) if self._address is None else self._address.reason(error)

    @contextmanager
    def exclusive(self) -> Iterator[Callable[[], None]]:
        """A lock shared by all processes that use the storage; released when the process ends.

        Yields a function that raises `StorageAway` if the lock is gone, as it is after a restart of
        the server: call it before writing what another process must not write as well.

        Raises:
            StorageAway: If the storage cannot be reached, here or within.
        """
        with self._reachable(), self._locked() as confirm:
            yield confirm

    @contextmanager
    def _locked(self) -> Iterator[Callable[[], None]]:
        if self._address is None or not self._address.is_server:
            place = self.folder if self._address is None else self._address.folder
            with file_lock(place / f".{self.name}.ask"):
                yield lambda: None
            return
        key = int.from_bytes(hashlib.sha256(f"afterdrop {self.name}".encode()).digest()[:7], "big")
        engine = sqlalchemy.create_engine(self._address.url, poolclass=NullPool)
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": key})

            def confirm() -> None:
                connection.execute(sqlalchemy.text("SELECT 1"))

            yield confirm

    @retried
    def settings(self) -> dict[str, Any] | None:
        """The settings of the study, or None if they have not been written yet."""
        with self._reachable():
            return self._study.user_attrs.get(_SETTINGS)

    def write_settings(self, content: dict[str, Any]) -> None:
        """Stores the settings of the study."""
        self._study.set_user_attr(_SETTINGS, content)

    @retried
    def trials(self) -> list[Trial]:
        """All trials in the order of their numbers.

        Raises:
            TuneError: If the storage is damaged.
        """
        try:
            with self._reachable():
                return [_trial(frozen) for frozen in self._study.get_trials(deepcopy=False)]
        except _REPLAY_ERRORS as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> TuneError:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return TuneError(
            f"{self._shown} is damaged ({kind}{self._reason(error)}); restore it from a copy, or "
            "start a new study in another folder. The trained models are kept in "
            f"{self.folder / 'trials'}"
        )

    def enqueue(self, point: Point, notes: Mapping[str, Any]) -> None:
        """Adds a waiting trial."""
        self._study.enqueue_trial(dict(point), user_attrs=dict(notes))

    def start(self, space: Space) -> Trial:
        """Starts the trial that has been waiting longest; call it within `exclusive`."""
        asked = self._study.ask(_distributions(space))
        return next(trial for trial in self.trials() if trial.number == asked.number)

    @retried
    def note(self, number: int, name: str, value: Any) -> bool:
        """Stores a note on a running trial; False if the trial has ended."""
        try:
            with self._reachable():
                self._storage.set_trial_user_attr(self._id(number), name, value)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True

    @retried
    def report(self, number: int, interval: int, xe: float) -> bool:
        """Adds a value to the curve of a running trial; False if the trial has ended."""
        try:
            with self._reachable():
                self._storage.set_trial_intermediate_value(self._id(number), interval, xe)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True

    @retried
    def finish(self, number: int, state: State, value: float | None = None) -> bool:
        """Ends a running trial; False if another process has already ended it."""
        to = next(theirs for theirs, ours in _STATES.items() if ours == state)
        values = None if value is None else [value]
        try:
            with self._reachable():
                return self._storage.set_trial_state_values(self._id(number), to, values)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False

    def _id(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self.name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Raises `StorageAway`, with the reason in one line, for errors of the connection.

        Raises:
            TuneError: If the storage answers, but its rows contradict each other.
        """
        away = (
            sqlalchemy.exc.OperationalError,
            sqlalchemy.exc.InterfaceError,
            optuna.exceptions.StorageInternalError,
        )
        try:
            yield
        except away as error:
            reason = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error.__cause__
            if isinstance(reason, sqlalchemy.exc.InvalidRequestError):  # rows twice or not at all
                raise self._damaged(reason) from error
            self.away_at = time.monotonic()
            raise StorageAway(self._reason(reason or error)) from error


def gp_point(
    space: Space,
    known: Sequence[tuple[Point, float]],
    pending: Sequence[Point],
    seed: int,
) -> Point:
    """The point with the highest expected improvement, given known and pending points.

    A Gaussian process with noise is fitted to the known values. Pending points enter through the
    expected improvement of the batch, so that the next point differs from them.

    Args:
        space: The search space.
        known: At least two points with their values; lower is better.
        pending: Points without a value yet.
        seed: Seed of the search for the maximum.

    Example:
        >>> from afterdrop.tune.search_space import Axis
        >>> space = Space((Axis("model.input_dropout", 0, 0.9),))
        >>> known = [({"model.input_dropout": x / 10}, (x / 10 - 0.42) ** 2) for x in range(9)]
        >>> abs(gp_point(space, known, [], seed=1)["model.input_dropout"] - 0.42) < 0.05
        True
    """
    study = _in_memory(space, known, optuna.samplers.GPSampler(seed=seed, n_startup_trials=1))
    shapes = _distributions(space)
    for point in pending:
        running = create_trial(state=TrialState.RUNNING, params=point, distributions=shapes)
        study.add_trial(running)
    return dict(study.ask(shapes).params)


def importance(space: Space, known: Sequence[tuple[Point, float]]) -> dict[str, float]:
    """Share of each axis in what separates good trials from the rest (PED-ANOVA), descending.

    Example:
        >>> from afterdrop.tune.search_space import Axis
        >>> space = Space((Axis("model.input_dropout", 0, 1), Axis("model.state_dropout", 0, 1)))
        >>> known = [({"model.input_dropout": x / 40, "model.state_dropout": x * 7 % 40 / 40},
        ...           abs(x / 40 - 0.3)) for x in range(40)]
        >>> next(iter(importance(space, known)))
        'model.input_dropout'
    """
    study = _in_memory(space, known, None)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    with warnings.catch_warnings():  # Optuna warns about few trials; the page says so itself
        warnings.simplefilter("ignore")
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _in_memory(
    space: Space, known: Sequence[tuple[Point, float]], sampler: Any
) -> optuna.study.Study:
    study = optuna.create_study(sampler=sampler)
    shapes = _distributions(space)
    for point, value in known:
        study.add_trial(create_trial(params=point, distributions=shapes, value=value))
    return study


def _distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    return {
        axis.name: optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log)
        for axis in space
    }


def _trial(frozen: FrozenTrial) -> Trial:
    # A worker may die, or the storage go away, while parameters are written one by one. The fixed
    # values are there from the beginning.
    point = frozen.system_attrs.get("fixed_params", frozen.params)
    value = frozen.value if frozen.state in (TrialState.COMPLETE, TrialState.PRUNED) else None
    return read_trial(
        {
            "number": frozen.number,
            "state": _STATES[frozen.state],
            "point": point,
            "value": value,
            "notes": frozen.user_attrs,
            "curve": {str(interval): xe for interval, xe in frozen.intermediate_values.items()},
        }
    )


def _open(folder: Path, address: StorageAddress | None) -> RDBStorage | JournalStorage:
    if address is None:
        return JournalStorage(cast(Any, JournalFile(folder / JOURNAL)))
    arguments: dict[str, Any] = {}
    if not address.is_server:
        address.folder.mkdir(parents=True, exist_ok=True)
        # SQLite writers wait for each other, and the driver's default timeout of 5 s is short on a
        # busy disk.
        arguments["connect_args"] = {"timeout": 60}
    # Without a pool no connection stays open.
    return RDBStorage(address.url, engine_kwargs={"poolclass": NullPool, **arguments})
