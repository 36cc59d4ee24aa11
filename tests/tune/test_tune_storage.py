"""Storages that are away for a while, and journals that lost lines."""

import contextlib
import os
import sqlite3
import subprocess
import threading
from dataclasses import replace

import pytest
from postgres import Server

from afterdrop import train
from afterdrop.errors import FileError
from afterdrop.tune import optuna_backend, storage_retries, trial_ledger
from afterdrop.tune.checks import TuneError
from afterdrop.tune.journal_file import JournalFile
from afterdrop.tune.next_point import propose
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.search_space import Axis, Space, apply_point
from afterdrop.tune.storage_retries import StorageAway, no_retries, retried
from afterdrop.tune.study_runner import join_study, run_study
from afterdrop.tune.trial_ledger import Ledger
from afterdrop.tune.worker import Workplace


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


def test_a_journal_that_cannot_be_written_to_is_named(journal, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileError, match=r"journal\.log: .*No space left.*make room"):
            journal.append_logs([{"op_code": 5}])
    assert read(journal.path)[:5] == list(range(5))


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


def test_nothing_is_written_through_a_link_in_the_place_of_a_journal(tmp_path):
    """What is not a journal would be taken for an incomplete line, and removed."""
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "study" / "journal.log"
    elsewhere.write_text("years of work")
    path.parent.mkdir()
    path.symlink_to(elsewhere)
    with pytest.raises(TuneError, match=r"journal\.log' cannot be opened"):
        Backend(path.parent, None, "study")
    assert elsewhere.read_text() == "years of work"


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


# Outages in the middle of an operation


def test_a_trial_whose_parameters_were_not_all_written_keeps_its_point(
    tmp_path, settings, monkeypatch
):
    backend = Backend(tmp_path, None, "s")
    ledger = Ledger(backend, settings, "killed", lease=0.0)
    expected = [propose(settings, [])]
    written = []
    write = backend._storage.set_trial_param

    def killed_at_the_third(*arguments):
        written.append(arguments)
        if len(written) == 3:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(backend._storage, "set_trial_param", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        ledger.take(9)
    monkeypatch.undo()
    again = Ledger(Backend(tmp_path, None, "s"), settings, "next", lease=0.0)
    assert again.backend.trials()[0].point == expected[0]
    again.take(9)  # sees the other one for the first time
    retry = again.take(9)
    assert retry.notes["retry_of"] == 0 and retry.point == expected[0]


@pytest.mark.database
def test_a_restart_of_the_server_while_a_point_is_proposed_gives_it_once(
    tmp_path, name, postgres_server: Server, settings, monkeypatch, capsys
):
    one, other = (
        Ledger(Backend(tmp_path, postgres_server.url, name), settings, worker) for worker in "ab"
    )

    def slow(*arguments):
        monkeypatch.undo()
        postgres_server.stop()
        postgres_server.start()
        other.take(9)  # the lock of `one` is gone
        return propose(*arguments)

    monkeypatch.setattr(trial_ledger, "propose", slow)
    one.take(9)
    points = [row.point for row in one.backend.trials()]
    assert len(points) == 2 and points[0] != points[1]
    assert capsys.readouterr().err.count("is away") == 1


def test_a_storage_that_is_away_when_a_worker_opens_it_is_tried_again(
    tmp_path, monkeypatch, pauses
):
    errors = [optuna_backend.sqlalchemy.exc.OperationalError("x", {}, OSError("gone"))] * 2
    opened = optuna_backend._open

    def failing(*arguments):
        if errors:
            raise errors.pop()
        return opened(*arguments)

    monkeypatch.setattr(optuna_backend, "_open", failing)
    place = Workplace(str(tmp_path), f"sqlite:///{tmp_path}/study.db", "s", trials=2)
    with pytest.raises(TuneError, match=r"cannot be opened: gone"):
        place.new_backend()
    assert place.backend("-reruns").trials() == [] and pauses == [0.5]


def test_an_outage_does_not_count_as_silence_of_a_worker(tmp_path, settings, monkeypatch):
    ledger = Ledger(Backend(tmp_path, None, "s"), settings, "observer", lease=60.0)
    trial = ledger.take(9)
    ledger.worker = "nobody"
    clock = [0.0]
    monkeypatch.setattr(trial_ledger.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(optuna_backend.time, "monotonic", lambda: clock[0])
    ledger.take(9)
    clock[0] = 100.0
    with contextlib.suppress(StorageAway), ledger.backend.exclusive():
        raise optuna_backend.sqlalchemy.exc.OperationalError("x", {}, OSError("gone"))
    clock[0] = 130.0
    ledger.take(9)
    assert ledger.backend.trials()[trial.number].state == "running"
    clock[0] = 161.0
    ledger.take(9)
    assert ledger.backend.trials()[trial.number].state == "failed"


def test_a_database_whose_rows_contradict_each_other_is_damaged_and_not_away(tmp_path):
    file = tmp_path / "study.db"
    backend, space = Backend(tmp_path, f"sqlite:///{file}", "s"), Space((Axis("seed", 0, 1),))

    def start():
        backend.enqueue({"seed": 0.5}, {})
        with backend.exclusive():
            trial = backend.start(space)
        backend.finish(trial.number, "complete", 1.0)

    for _ in range(3):
        start()
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("DELETE FROM trials WHERE trial_id = 2")
        connection.commit()
    with pytest.raises(TuneError, match=r"study\.db is damaged \(Multiple.*restore it from a copy"):
        start()
