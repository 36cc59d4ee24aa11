"""afterdrop tune: search the hyperparameters of a recipe."""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from afterdrop.cli.options import OptionalFloat, OptionalInt, OptionalPath, OptionalText
from afterdrop.cli.train import parse_setting
from afterdrop.errors import ExtraError
from afterdrop.plain_text import one_line, shell_word
from afterdrop.tune.search_space import Axis
from afterdrop.tune.study_files import ranking_table, write_result
from afterdrop.tune.study_settings import plan_study
from afterdrop.tune.tuning_objective import Objective


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
    intervals: OptionalInt = None,
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
    """Tune a recipe's hyperparameters with a Gaussian-process bandit; the same command resumes.

    The objective is the validation cross entropy (XE) of the deterministic member at its optimal
    temperature, because that temperature will be fitted after training anyway. The best
    configurations are trained again with other seeds. Writes STUDY/best.toml (a recipe for
    afterdrop train), study.json and the page study.html. To add workers on other hosts, run the
    same command there; STUDY or the storage must be shared.

    For example:
      afterdrop tune ptb-10m --data DIR --trials 60 --workers 2 --study studies/ptb
      afterdrop tune digits-mlp --intervals 10 --trials 30 --study studies/digits
      afterdrop tune mine.toml --study s --storage postgresql://user@host/database

    Args:
        recipe: Name of a recipe, or path of a .toml file.
        study: The study folder: journal, run folders of the trials, results.
        data: Folder of the named data sets.
        trials: Number of configurations to try.
        workers: Number of processes on this host; several may share a GPU.
        storage: sqlite:///FILE or postgresql://...; by default a journal file in STUDY.
        name: Name of the study in the storage; by default the name of the folder.
        member: The member to tune for: det, gmc, amc, or ALPHA,MULTIPLIER such as 0.5,0.8.
        temperature: Evaluate the member at its optimal temperature, or at T = 1 (plain).
        random: Search at random instead of with the bandit.
        intervals: Shorten the schedule to this number of validation intervals.
        minutes_per_trial: Stop a trial after this time; it counts with the XE reached.
        budget: Solve hidden sizes for this number of parameters, where the recipe has sizes.
        change: Override a setting in every trial, by its name in the recipe's TOML.
        range: Search this range, as in optimiser.learning_rate=0.001:0.01:log.
        fix: Exclude a setting from the search.
        own_first: Whether to try the unmodified recipe first.
        prune: Whether to stop unpromising trials early.
        top: Number of best configurations to train again.
        reruns: Number of other seeds to train them with; 0 for none.
        seed: Seed of the search.
        device: Devices to train on, assigned to the workers in turn; by default a GPU if any.
        lease: Seconds without a heartbeat after which a worker on another host counts as dead.
        quiet: Print the result only.
    """
    from afterdrop.tune.study_runner import run_study  # needs optuna

    settings = plan_study(
        recipe,
        changes=dict(parse_setting(text) for text in change),
        intervals=intervals,
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
    print(ranking_table(result))
    write_result(result, study)
    try:
        from afterdrop.report.study_page import write_study  # needs matplotlib

        page = one_line(write_study(result, study))
        print(f"\nWrote {page}: ranking, history, importance and slices.")
    except ExtraError as error:
        print(f"\nNo study page: {one_line(error)}")
    best = study / "best.toml"
    print(f"Wrote {one_line(best)}. Next: afterdrop train {shell_word(best)} --out RUN")
