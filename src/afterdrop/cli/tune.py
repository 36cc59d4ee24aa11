"""afterdrop tune: search the hyperparameters of a recipe."""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from afterdrop.cli.options import OptionalFloat, OptionalInt, OptionalPath, OptionalText
from afterdrop.cli.train import parse_setting
from afterdrop.errors import ExtraError
from afterdrop.tune.objective import Objective
from afterdrop.tune.settings import plan_study
from afterdrop.tune.space import Axis


def tune(
    recipe: Annotated[Positional[str], tyro.conf.arg(metavar="RECIPE")],
    /,
    study: Path,
    data: OptionalPath = None,
    trials: int = 60,
    workers: int = 1,
    storage: OptionalText = None,
    name: OptionalText = None,
    member: str = "det",
    temperature: Literal["optimal", "plain"] = "optimal",
    random: bool = False,
    turns: OptionalInt = None,
    minutes_per_trial: OptionalFloat = None,
    budget: OptionalInt = None,
    change: Annotated[
        UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="NAME=VALUE")
    ] = (),
    range: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=LOW:HIGH")] = (),
    fix: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME")] = (),
    own_first: bool = True,
    prune: bool = True,
    top: int = 3,
    reruns: int = 2,
    seed: int = 0,
    device: tuple[str, ...] = (),
    lease: float = 60.0,
    quiet: bool = False,
) -> None:
    """Tune a recipe's hyperparameters with a Gaussian-process bandit; resumes by the same command.

    The objective is the validation XE of the deterministic member at its optimal temperature, so
    that tuning sees what selection will do. The best few are run again under other seeds. Writes
    STUDY/best.toml, which afterdrop train takes, study.json and the page study.html. Other
    hosts join by the same command, with STUDY or the storage shared.

    For example:
      afterdrop tune ptb-10m --data DIR --trials 60 --workers 2 --study studies/ptb
      afterdrop tune digits-mlp --turns 10 --trials 30 --study studies/digits
      afterdrop tune mine.toml --study s --storage postgresql://user@host/database

    Args:
        recipe: Name of a recipe, or the path of a .toml file.
        study: The study's folder: journal, run folders, results.
        data: The folder of the named data sets.
        trials: How many points to try.
        workers: Processes on this host; several may share a GPU.
        storage: sqlite:///FILE or postgresql://...; by default a journal file in STUDY.
        name: The study's name in the storage; by default that of the folder.
        member: What to tune for: det, gmc, amc, or ALPHA,MULTIPLIER such as 0.5,0.8.
        temperature: The member's optimal temperature, or T = 1 (plain).
        random: Random search instead of the bandit.
        turns: Shorten the recipe's schedule to so many turns.
        minutes_per_trial: A trial that takes longer counts with what it has reached.
        budget: Hold language models to so many parameters, where the recipe states sizes.
        change: A setting to change in every trial, by its name in the recipe's TOML.
        range: A range to search, as in optimiser.learning_rate=0.001:0.01:log.
        fix: A setting not to search.
        own_first: Whether the recipe as it is is the first point.
        prune: Whether hopeless trials are stopped early.
        top: How many of the best to run again.
        reruns: With how many other seeds; 0 is none.
        seed: Of the points.
        device: Where to train; workers take turns. By default a GPU if there is one.
        lease: Seconds without a sign of life after which a worker elsewhere counts as dead.
        quiet: Print the result only.
    """
    from afterdrop.tune.result import table, write_result  # need optuna
    from afterdrop.tune.study import tune as run_study

    settings = plan_study(
        recipe,
        changes=dict(parse_setting(text) for text in change),
        turns=turns,
        budget=budget,
        ranges=[Axis.parse(text) for text in range],
        fixed=fix,
        objective=Objective.parse(member, temperature),
        sampler="random" if random else "gp",
        seed=seed,
        own_first=own_first,
        prune=prune,
        minutes=minutes_per_trial,
    )
    result = run_study(
        settings,
        study,
        trials=trials,
        workers=workers,
        storage=storage,
        name=name,
        top=top,
        reruns=reruns,
        data=data,
        devices=device,
        lease=lease,
        quiet=quiet,
    )
    print(table(result))
    write_result(result, study)
    try:
        from afterdrop.report.study import write_study  # needs matplotlib

        print(f"\nWrote {write_study(result, study)}: ranking, history, importance and slices.")
    except ExtraError as error:
        print(f"\nNo study page: {error}")
    print(f"Wrote {study / 'best.toml'}. Next: afterdrop train {study / 'best.toml'} --out RUN")
