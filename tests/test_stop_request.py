"""Which signals stop work, and which of them count."""

import os
import signal
import sys

import pytest

from afterdrop import stop_request as module
from afterdrop.stop_request import NUMBERS, StopSignal, signals_raise, stop_request

pytestmark = pytest.mark.usefixtures("default_signals")


@pytest.mark.parametrize("number", NUMBERS)
def test_the_echo_of_a_stop_request_does_not_end_the_work(number):
    with stop_request() as request:
        signal.raise_signal(number)
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)  # as torchrun does after Ctrl-C
        assert request.signal == number.name


@pytest.mark.parametrize("nested", [False, True])
def test_a_later_signal_has_its_usual_effect(nested, monkeypatch):
    monkeypatch.setattr(module, "_ECHO", 0.0)
    with pytest.raises(KeyboardInterrupt), stop_request() as request:
        if nested:
            with stop_request():
                signal.raise_signal(signal.SIGINT)
                assert request.signal == "SIGINT"
                signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert not nested and request.signal == "SIGINT"
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("echo", NUMBERS)
def test_the_echo_of_a_signal_does_not_end_what_keeps_the_work(number, echo):
    kept = []
    with pytest.raises(StopSignal, match=number.name) as stop, signals_raise(StopSignal):
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(echo)
            kept.append("all")
    assert kept == ["all"]
    assert stop.value.status == 128 + number


def test_a_later_sigterm_has_its_usual_effect(monkeypatch):
    monkeypatch.setattr(module, "_ECHO", 0.0)
    with pytest.raises(ValueError), signals_raise(ValueError), signals_raise(StopSignal):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def arrives_at_once(monkeypatch):
    """Makes SIGTERM arrive as soon as there is a handler of the package for it."""
    real = signal.signal

    def handle(number, handler):
        before = real(number, handler)
        if number == signal.SIGTERM and handler is not before and handler is not signal.SIG_DFL:
            signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", handle)


def test_a_signal_that_arrives_while_handlers_are_set_is_not_lost(arrives_at_once):
    with stop_request() as request:
        assert request.signal == "SIGTERM"


def test_an_error_while_handlers_are_set_restores_those_of_before(arrives_at_once):
    before = {number: signal.getsignal(number) for number in NUMBERS}
    with pytest.raises(StopSignal), signals_raise(StopSignal):
        pytest.fail("the signal is raised before")
    assert {number: signal.getsignal(number) for number in NUMBERS} == before


@pytest.mark.skipif(sys.platform == "win32", reason="it has no fork")
@pytest.mark.parametrize("handled", [stop_request, lambda: signals_raise(StopSignal)])
def test_a_forked_process_can_be_ended(handled):
    with handled():
        process = os.fork()
        if process == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGTERM


def test_signals_that_the_process_ignores_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    try:
        with signals_raise(StopSignal), stop_request() as request:
            signal.raise_signal(signal.SIGHUP)
            assert request.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)
