"""afterdrop reproduce: the paper's tables from runs, next to the published figures."""

import sys
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt, OptionalPath
from afterdrop.data import data_folder
from afterdrop.errors import DataError, ExtraError, FileError
from afterdrop.plain_text import one_line
from afterdrop.reproduce.chain import Chain
from afterdrop.reproduce.jobs import plan_jobs
from afterdrop.reproduce.tables.build_tables import paper_tables
from afterdrop.reproduce.tables.frequency_bands import parse_band
from afterdrop.reproduce.tables.table_writers import to_text, write_tables

SAMPLES = {"cpu": 20}  # K by device; 100 on any other


def reproduce(
    runs: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[RUN ...]")] = (),
    /,
    out: OptionalPath = None,
    bands: tuple[str, ...] = (),
    data: OptionalPath = None,
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
    minutes: float = 60.0,
    device: str = "cpu",
    num_samples: OptionalInt = None,
    only: tuple[str, ...] = (),
    quiet: bool = False,
) -> int | None:
    """Turn finished runs into the paper's Tables 1 to 5, next to the published figures.

    The configuration and the scores of a run determine which tables it is used for. Missing
    entries are listed with the commands that produce them. With --all, models are first trained,
    evaluated and selected on the data sets found, within --minutes: small models on a CPU, the
    paper's models with --device cuda. After an interruption, the same command resumes.

    For example:
      afterdrop reproduce runs/mnist runs/ptb --out tables
      afterdrop reproduce --all --data DIR --minutes 60 --out reproduction

    Args:
        runs: Run folders of afterdrop train or afterdrop evaluate.
        out: Folder for each table as .txt, .md, .csv and .tex and for figures as .pdf; required
            with --all.
        bands: Frequency bands of Table 3, such as "> 500" "< 500" "5-9"; by default the paper's.
        data: Folder of the named data sets, if it has moved since training.
        every: Train and evaluate first, in --out.
        minutes: With --all: total time, shared between the runs.
        device: With --all: device to train and evaluate on.
        num_samples: With --all: number of mask samples K; by default 20 on a CPU, else 100.
        only: With --all: only these of its runs, such as mnist ptb masks-shared masks-step.
        quiet: Do not show progress bars or print tables.
    """
    shown = [parse_band(band) for band in bands]
    faults: list[str] = []
    if every:
        if runs or out is None:
            raise DataError("--all creates its own runs: give --out FOLDER and no run folders")
        samples = num_samples or SAMPLES.get(device, 100)
        runs, faults = _run_chain(Chain(out, data, minutes, device, samples, not quiet), only)
        for fault in faults:
            print(f"afterdrop: {one_line(fault)}", file=sys.stderr)
        if faults and not runs:
            return 1
    tables = paper_tables(runs, bands=shown, data=data)
    if not quiet:
        for table in tables:
            print(to_text(table), end="\n\n")
    if out is not None:
        folder = out / "tables" if every else out
        write_tables(tables, folder)
        print(f"Wrote {one_line(folder)}: tables.md, table1.txt to table5.tex")
        _draw(runs, folder / "figures", data)
    return 1 if faults else None


def _run_chain(chain: Chain, only: tuple[str, ...]) -> tuple[tuple[Path, ...], list[str]]:
    """Runs the jobs whose data sets are in the data folder."""
    if not chain.minutes > 0:
        raise DataError(f"minutes={chain.minutes:g} must be positive")
    try:
        chain.data = data_folder(chain.data)
    except FileError:
        chain.data = None  # Table 5 can use the built-in text
    jobs, absent = plan_jobs(chain.data, small=chain.device == "cpu")
    for name in absent:
        print(f"Absent: {name} (afterdrop data fetch, or copy its files into the data folder)")
    names = [job.name for job in jobs]
    for name in only:
        if name not in names:
            raise DataError(f"--only {name}: the runs with these data are {', '.join(names)}")
    folders, faults = chain.run([job for job in jobs if not only or job.name in only])
    return tuple(folders), faults


def _draw(runs: tuple[Path, ...], folder: Path, data: Path | None) -> None:
    """Writes the figures if matplotlib is installed, and prints what is missing."""
    try:
        from afterdrop.reproduce.paper_figures import write_figures
    except ExtraError as error:
        print(f"Missing: {one_line(error)}")
        return
    written, faults = write_figures(runs, folder, data=data)
    print(f"Wrote {one_line(folder)}: {len(written)} figures")
    for fault in faults:
        print(f"Missing: {one_line(fault)}")
