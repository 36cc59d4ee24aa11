"""Storages that are away for a while, and journals that lost lines."""

import subprocess
import threading
from dataclasses import replace

import pytest
from postgres import Server

from afterdrop import train
from afterdrop.tune import optuna_backend, storage_retries
from afterdrop.tune.checks import TuneError
from afterdrop.tune.journal_file import JournalFile
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.search_space import apply_point
from afterdrop.tune.storage_retries import StorageAway, no_retries, retried
from afterdrop.tune.study_runner import join_study, run_study
from afterdrop.tune.trial_ledger import Ledger


@pytest.fixture
def pauses(monkeypatch):
    """The clock stands still except for pauses, which are noted."""
    found = []
    monkeypatch.setattr(storage_retries.time, "sleep", found.append)
    monkeypatch.setattr(storage_retries.time, "monotonic", lambda: sum(found))
    return found


def away_for(times):
    left = [times]

    @retried
    def operation():
        left[0] -= 1
        if left[0] >= 0:
            raise StorageAway("connection refused")
        return "done"

    return operation


def test_an_operation_is_repeated_with_growing_pauses_and_one_line(pauses, capsys):
    assert away_for(4)() == "done"
    assert pauses == [0.5, 1, 2, 4]
    said = capsys.readouterr().err
    assert said == (
        "afterdrop: the storage of the study is away (connection refused); trying again for 300 s\n"
    )


def test_a_storage_that_stays_away_ends_the_study_in_one_line(pauses):
    with pytest.raises(TuneError, match=r"away for 300 s \(connection refused\).*same command"):
        away_for(10**6)()
    assert 270 < sum(pauses) <= 300


def test_only_whole_operations_are_repeated(pauses):
    inner = away_for(1)
    outer_calls = []

    @retried
    def outer():
        outer_calls.append(1)
        return inner()

    assert outer() == "done" and len(outer_calls) == 2
    with no_retries(), pytest.raises(StorageAway):
        away_for(1)()


@pytest.mark.database
def test_a_server_that_comes_back_is_used_again(tmp_path, name, postgres_server: Server, capsys):
    backend = Backend(tmp_path, postgres_server.url, name)
    backend.write_settings({"seed": 1})
    postgres_server.stop()
    later = threading.Timer(2.0, postgres_server.start)
    later.start()
    try:
        found = backend.settings()
    finally:
        later.join()
    assert found == {"seed": 1} and backend.trials() == []
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is away" in said and "trying again for 300 s" in said


def test_errors_of_the_connection_are_told_from_others(tmp_path, monkeypatch, pauses):
    backend = Backend(tmp_path, f"sqlite:///{tmp_path}/study.db", "s")
    errors = [optuna_backend.sqlalchemy.exc.OperationalError("x", {}, OSError("gone\nfor good"))]
    get = backend._study.get_trials

    def failing(**options):
        if errors:
            raise errors.pop()
        return get(**options)

    monkeypatch.setattr(backend._study, "get_trials", failing)
    assert backend.trials() == [] and pauses == [0.5]
    errors.append(KeyError("value"))
    with pytest.raises(TuneError, match=r"study\.db is damaged"):
        backend.trials()


# Journals


@pytest.fixture
def journal(tmp_path):
    found = JournalFile(tmp_path / "journal.log")
    found.append_logs([{"op_code": n} for n in range(5)])
    return found


def read(path, first=0):
    return [log["op_code"] for log in JournalFile(path).read_logs(first)]


def test_several_writers_append_and_all_read_the_same(journal):
    def append(start):
        mine = JournalFile(journal.path)
        for n in range(start, start + 10):
            mine.append_logs([{"op_code": n}])

    threads = [threading.Thread(target=append, args=(start,)) for start in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(journal.path)
    assert found[:5] == list(range(5)) and sorted(found[5:]) == [
        start + n for start in (100, 200, 300) for n in range(10)
    ]
    assert [log["op_code"] for log in journal.read_logs(5)] == found[5:] == read(journal.path, 5)


def test_an_incomplete_last_line_is_dropped_by_the_next_writer(journal):
    with open(journal.path, "ab") as file:
        file.write(b'{"op_code": 9, "wor')
    assert read(journal.path) == list(range(5))
    JournalFile(journal.path).append_logs([{"op_code": 5}])
    assert read(journal.path) == list(range(6))


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:2], *lines[3:]],
        lambda lines: [*lines[:2], b"not json\n", *lines[3:]],
        lambda lines: [*lines[:2], b"[1]\n", *lines[3:]],
        lambda lines: [*lines[:2], lines[2].replace(b": 2", b": 7", 1), *lines[3:]],
        lambda lines: [*lines[:2], b"\xff\xfe\n", *lines[3:]],
        lambda lines: [*lines[:2], lines[1], *lines[2:]],
        lambda lines: [*lines[:2], lines[3], lines[2], lines[4]],
    ],
)
def test_lost_and_changed_lines_are_named_with_the_way_on(journal, change):
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join(change(lines)))
    with pytest.raises(TuneError, match=r"line 3 of .*journal\.log.*: head -n 2 ") as caught:
        read(journal.path)
    subprocess.run(str(caught.value).rpartition("goes on: ")[2], shell=True, check=True)
    assert read(journal.path) == [0, 1]


def test_a_journal_that_shrinks_while_it_is_used_is_not_written_to(journal):
    assert [log["op_code"] for log in journal.read_logs(0)] == list(range(5))
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join(lines[:2]))
    for use in (lambda: list(journal.read_logs(5)), lambda: journal.append_logs([{"op_code": 5}])):
        with pytest.raises(TuneError, match=r"journal\.log lost lines .*same command again"):
            use()
    assert read(journal.path) == [0, 1]


def test_a_journal_that_does_not_know_a_trial_finds_another_folder_for_its_number(
    tmp_path, settings
):
    # A worker is killed in its second trial, and the lines of that trial are lost.
    folder = tmp_path / "study"
    backend = Backend(folder, None, "study")
    join_study(backend, settings)
    ledger = Ledger(backend, settings, "killed")
    ledger.complete(ledger.take(3), 1.0)
    kept = backend.folder.joinpath("journal.log").read_bytes()
    point = replace(ledger.take(3), point=settings.space.point([0.5] * len(settings.space)))
    train.run(
        apply_point(settings.config, point.point),
        folder / "trials" / f"{point.number:04d}",
        device="cpu",
        progress=False,
    )
    backend.folder.joinpath("journal.log").write_bytes(kept)
    result = run_study(settings, folder, trials=3, reruns=0, devices=["cpu"], quiet=True)
    assert [row.state for row in result.trials] == ["complete"] * 3
    assert (folder / "trials" / "0001-1").is_dir()
