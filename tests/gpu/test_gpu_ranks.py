"""Training and evaluation by several ranks with kernels on a GPU, against one process.

A machine with one GPU suffices: gloo lets two ranks share it, and NCCL runs with a single rank.
"""

import gc
import json
import math

import pytest
import shared_gpu
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import afterdrop as ad
from afterdrop.data import load_text
from afterdrop.ranks import Ranks
from afterdrop.train.text_task import TextTask
from afterdrop.train.trainer import Trainer
from scale.launch import torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What one process computes, and then two ranks that share its GPU."""
    folder = tmp_path_factory.mktemp("ranks")
    shared_gpu.write_text(folder / "text")
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Trainer, "_plain_step"), (shared_gpu.GenericEngine, "run")):
            patch.setattr(owner, name, getattr(owner, name))  # restored afterwards
        shared_gpu.compute(folder, "one", "cuda:0", split=False)
    done = torchrun(shared_gpu.__file__, str(folder), "cuda:0")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_two_ranks_train_with_kernels_as_one_process(folder):
    """Gradients are rounded to bfloat16 before and after their sum: losses within 0.5 %."""
    one, two = (
        [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == len(two) == 3
    for a, b in zip(one, two):
        for name in ("loss", "effective_samples", "xe", "xe_optimal"):
            if a[name] is not None:
                assert b[name] == pytest.approx(a[name], rel=5e-3), name
    weights = [load_file(folder / name / "checkpoint/last.safetensors") for name in ("one", "two")]
    for name, tensor in weights[0].items():
        if name.startswith("model."):
            assert (weights[1][name] - tensor).norm() < 0.03 * tensor.norm(), name


def test_two_ranks_evaluate_with_kernels_as_one_process(folder):
    """Batches are evaluated whole by one rank or the other, so the scores hold the same bits."""
    one = ad.Scores.load(folder / "one-0.safetensors")
    for rank in (0, 1):
        two = ad.Scores.load(folder / f"two-{rank}.safetensors")
        assert two.tensors.keys() == one.tensors.keys()
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(two.tensors[name], tensor, rtol=1e-4, atol=1e-4)


@pytest.fixture
def nccl(tmp_path):
    """A process group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    gc.collect()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def losses(folder, steps, *, replayed):
    """Losses of the first of two shares of each batch, summed by NCCL over one rank."""
    config, device = shared_gpu.config(folder / "text"), torch.device("cuda")
    torch.manual_seed(0)
    ranks = Ranks(0, 2)  # half of the batch; the group itself has one rank
    task = TextTask(config, load_text(config.data.name, level="word"), device, ranks)
    trainer = Trainer(config, task, task.build_model().to(device), ranks)
    fused = trainer._kernels()
    if not replayed:
        fused._replay = fused._update = lambda call: call()
    found = [fused.step(number).item() for number in range(steps)]
    if replayed:
        assert fused._replay._graph is not None and fused._update._graph is not None
    return found, [p.detach().clone() for p in trainer.parameters]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of NCCL about its device
def test_gradients_are_summed_by_nccl_between_two_graphs(folder, nccl, monkeypatch):
    """Replayed steps equal steps without graphs but for the order of atomic adds (1e-4)."""
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value])
    found, weights = losses(folder, 6, replayed=True)
    wanted, others = losses(folder, 6, replayed=False)
    assert all(math.isfinite(loss) for loss in found)
    assert found == pytest.approx(wanted, rel=1e-4)
    for a, b in zip(weights, others):
        assert (a - b).norm() < 1e-3 * b.norm() + 1e-6
