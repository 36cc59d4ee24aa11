"""An interrupted distillation resumes with what it finished, and with nothing else."""

import dataclasses
import shutil
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import afterdrop as ad
from afterdrop.distillation import Distilled, student_training
from afterdrop.errors import FileError
from afterdrop.files import TEMPORARY
from afterdrop.tensor_files import read_tensors, write_tensors

EPOCHS = 4
FILE = "distil.safetensors"


def distil(case, folder=None, **options):
    choice, model, data = case
    found = {"epochs": EPOCHS, "resume": folder, **options}
    return ad.distil(found.pop("choice", choice), model, found.pop("data", data), **found)


def interrupt(case, folder, monkeypatch, after=2, **options):
    """Interrupts a distillation after some epochs; the error."""
    epoch = student_training.StudentTraining._epoch

    def interrupted(self, batches):
        if len(self.losses) == after:
            raise KeyboardInterrupt
        return epoch(self, batches)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(student_training.StudentTraining, "_epoch", interrupted)
        distil(case, folder, **options)
    return caught.value


def is_same(found, whole):
    states = found.model.state_dict(), whole.model.state_dict()
    same = all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    return same and found.divergences == whole.divergences and found.kept == whole.kept


def loader(data, **options):
    x, y = (torch.cat(parts) for parts in zip(*data))
    return DataLoader(list(zip(x, y)), batch_size=30, **options)


def test_an_interrupted_distillation_ends_with_the_same_weights(case, tmp_path, monkeypatch):
    error = interrupt(case, tmp_path, monkeypatch)
    kept = f"2 finished epochs are kept in {tmp_path / FILE}: the same call resumes"
    assert error.__notes__ == [kept]
    assert is_same(distil(case, tmp_path), distil(case))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["_measured", "select", "kept_gain"])
def test_epochs_are_kept_until_the_result_exists(case, tmp_path, monkeypatch, place):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    valid = case[2]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(sys.modules[Distilled.__module__], place, interrupted)
        distil(case, tmp_path, valid=valid)
    assert "4 finished epochs" in caught.value.__notes__[0]
    with monkeypatch.context() as patch:
        patch.setattr(student_training.StudentTraining, "_epoch", None)  # nothing is left to train
        resumed = distil(case, tmp_path, valid=valid)
    assert is_same(resumed, distil(case, valid=valid))
    assert not list(tmp_path.iterdir())


def test_without_a_finished_epoch_nothing_is_kept(case, tmp_path, monkeypatch):
    error = interrupt(case, tmp_path / "one", monkeypatch, after=1)
    assert error.__notes__[0].startswith("1 finished epoch is kept in")
    shutil.rmtree(tmp_path / "one")
    error = interrupt(case, tmp_path, monkeypatch, after=0)
    assert error.__notes__[0].startswith("no epoch was finished")
    assert not list(tmp_path.iterdir())
    assert not hasattr(interrupt(case, None, monkeypatch), "__notes__")


def test_other_settings_are_refused(case, tmp_path, monkeypatch):
    choice, model, data = case
    interrupt(case, tmp_path, monkeypatch)
    warmer = dataclasses.replace(choice.member, temperature=choice.member.temperature * 2)
    others = [
        ({"epochs": 5}, "epochs was 4 and is 5"),
        ({"lr": 0.01}, r"lr was 0\.001 and is 0\.01"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"data": data[:3]}, "batches was 4 and is 3"),
        ({"choice": dataclasses.replace(choice, num_samples=4)}, "num_samples was 8 and is 4"),
        ({"choice": dataclasses.replace(choice, member=warmer)}, "temperature was"),
    ]
    for options, message in others:
        with pytest.raises(FileError, match=message) as caught:
            distil(case, tmp_path, **options)
        assert str(tmp_path / FILE) in str(caught.value) and "remove that file" in str(caught.value)
        assert not hasattr(caught.value, "__notes__")
    monkeypatch.setattr(model[0].weight, "requires_grad", False)
    with pytest.raises(FileError, match="trained was"):
        distil(case, tmp_path)


def test_other_data_are_refused(case, tmp_path, monkeypatch):
    data = case[2]
    others = [(torch.randn_like(x), y) for x, y in data]
    for made in (list, iter, loader):
        interrupt(case, tmp_path, monkeypatch, data=made(data))
        with pytest.raises(FileError, match=r"first batch .* same data .* remove that file"):
            distil(case, tmp_path, data=made(others))
        assert is_same(distil(case, tmp_path, data=made(data)), distil(case, data=made(data)))


@pytest.mark.parametrize(("device", "same"), [("some GPU", True), ("cpu", False)])
def test_another_device_may_round_more(case, tmp_path, monkeypatch, device, same):
    with monkeypatch.context() as patch:
        patch.setattr(student_training, "device_kind", lambda _: device)
        interrupt(case, tmp_path, monkeypatch)
    hook = case[1].register_forward_hook(lambda module, inputs, output: output * 1.003)
    with nullcontext() if same else pytest.raises(FileError, match="does not predict"):
        assert len(distil(case, tmp_path).divergences) == EPOCHS
    hook.remove()


def test_only_which_targets_count_identifies_them(case, tmp_path, monkeypatch):
    interrupt(case, tmp_path, monkeypatch)
    relabelled = [(x, torch.zeros_like(y)) for x, y in case[2]]
    assert is_same(distil(case, tmp_path, data=relabelled), distil(case))


def test_a_loader_with_an_order_of_its_own_resumes_with_a_warning(case, tmp_path, monkeypatch):
    def shuffled(seed):
        return loader(case[2], shuffle=True, generator=torch.Generator().manual_seed(seed))

    interrupt(case, tmp_path, monkeypatch, data=shuffled(0))
    with pytest.warns(UserWarning, match="only shuffles"):
        error = interrupt(case, tmp_path, monkeypatch, after=3, data=shuffled(1))
    assert "3 finished epochs" in error.__notes__[0]
    distil(case, tmp_path, data=shuffled(1))  # which begins as the last time


def test_changed_code_is_refused(case, tmp_path, monkeypatch):
    interrupt(case, tmp_path, monkeypatch)
    forward = nn.Linear.forward
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 1.01)
        with pytest.raises(FileError, match="code or its settings have changed"):
            distil(case, tmp_path)
    with monkeypatch.context() as patch:  # rounding
        patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * (1 + 2**-22))
        distil(case, tmp_path)


def test_one_distillation_at_a_time_uses_a_file(case, tmp_path, monkeypatch):
    epoch, refused = student_training.StudentTraining._epoch, []

    def meanwhile(self, batches):
        with pytest.raises(FileError, match=f"another process is distilling into {tmp_path}"):
            distil(case, tmp_path)
        refused.append(len(self.losses))
        return epoch(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(student_training.StudentTraining, "_epoch", meanwhile)
        found = distil(case, tmp_path)
    assert is_same(found, distil(case)) and refused == list(range(EPOCHS))


KILLED = """
import fcntl, sys, time
held = [open(path, "a") for path in sys.argv[1:]]
for file in held:
    fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_process_does_not_block(case, tmp_path, monkeypatch):
    interrupt(case, tmp_path, monkeypatch)
    left = [tmp_path / ".distil.lock", tmp_path / f".{FILE}.x{TEMPORARY}"]
    command = [sys.executable, "-S", "-c", KILLED, *map(str, left)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            with pytest.raises(FileError, match="another process is distilling"):
                distil(case, tmp_path)
        finally:
            process.send_signal(signal.SIGKILL)
    assert all(path.exists() for path in left)
    assert is_same(distil(case, tmp_path), distil(case))
    assert not list(tmp_path.iterdir())


def damage_payload(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_losses(path):
    tensors, note = read_tensors(path)
    write_tensors(path, tensors, {**note, "losses": []})


def leave_out_tensors(path):
    write_tensors(path, {"outputs": read_tensors(path)[0]["outputs"]}, read_tensors(path)[1])


def remove_header(path):
    tensors, note = read_tensors(path)
    write_tensors(path, tensors, {"schedule": {}, "losses": note["losses"]})  # of version 1


@pytest.mark.parametrize(
    "damage", [damage_payload, damage_losses, leave_out_tensors, remove_header]
)
def test_a_damaged_file_is_refused_with_the_remedy(case, tmp_path, monkeypatch, damage):
    interrupt(case, tmp_path, monkeypatch)
    damage(tmp_path / FILE)
    with pytest.raises(FileError) as caught:
        distil(case, tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / FILE)) and "\n" not in message
    assert "remove" in message and message.endswith("to begin the distillation again")
    assert not hasattr(caught.value, "__notes__")
    (tmp_path / FILE).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distil(case, tmp_path, epochs=1)
