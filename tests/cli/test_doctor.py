"""afterdrop doctor and afterdrop --completion."""

import importlib.metadata
import shutil
import subprocess

import pytest
import torch

from afterdrop.cli import VERBS, main


def doctor_lines(capsys) -> dict[str, str]:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines}


def test_doctor_prints_versions_devices_and_extras(capsys):
    found = doctor_lines(capsys)
    assert found["torch"] == torch.__version__
    assert found["[report]"] == "present"
    assert "plain form" in found["cpu"]


def test_doctor_names_a_missing_extra_and_its_remedy(capsys, monkeypatch):
    version = importlib.metadata.version

    def without_optuna(package: str) -> str:
        if package == "optuna":
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", without_optuna)
    assert doctor_lines(capsys)["[tune]"] == "missing optuna: pip install 'afterdrop[tune]'"


def test_doctor_says_why_kernels_do_not_run(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "kernels do not run" in doctor_lines(capsys)["cuda"]


@pytest.mark.subprocess
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_bash_completion_completes_verbs_and_options(capsys, tmp_path):
    assert main(["--completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out, encoding="utf-8")

    def completed(*words: str) -> list[str]:
        listed = " ".join(f"'{word}'" for word in words)
        command = (
            f"source {script}; COMP_WORDS=(afterdrop {listed}); COMP_CWORD={len(words)}; "
            "_tyro_afterdrop; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        return subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=True
        ).stdout.split()

    assert completed("se") == ["select"]
    assert completed("select", "runs/words", "--num") == ["--num-samples"]
    assert set(completed("")) >= set(VERBS)


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys):
    assert main(["--completion", "fish"]) == 2
    assert "bash or zsh" in capsys.readouterr().err
