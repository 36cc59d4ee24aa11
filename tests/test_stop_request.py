"""Which signals stop work, and which of them count."""

import signal

import pytest

from afterdrop import stop_request as module
from afterdrop.stop_request import Terminated, sigterm_raises, stop_request


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def test_the_echo_of_sigterm_does_not_end_what_keeps_the_work():
    kept = []
    with pytest.raises(Terminated), sigterm_raises(Terminated):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            kept.append("all")
    assert kept == ["all"]


def test_a_later_sigterm_has_its_usual_effect(monkeypatch):
    monkeypatch.setattr(module, "_ECHO", 0.0)
    with pytest.raises(ValueError), sigterm_raises(ValueError), sigterm_raises(Terminated):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
