"""Runs in each of two ranks that torchrun starts; writes what it finds for the tests to compare.

torchrun --nproc-per-node 2 driver.py FOLDER
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import tiny
import torch
import torch.distributed as dist

import afterdrop as ad
from afterdrop import train
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.ranks import current
from afterdrop.train.text_task import TextTask

folder = Path(sys.argv[-1])
rank = int(os.environ.get("RANK", 0))
notes: dict[str, object] = {}


def trained(config, name, **options):
    result = train.run(
        config, folder / name, device="cpu", progress=False, ranks="split", **options
    )
    return [result.finished, result.reason, result.step, result.interval, result.message]


def message(call):
    try:
        call()
    except ad.AfterdropError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def evaluated(name, **options):
    model, batches = tiny.classifier()
    options = {"grid": tiny.GRID, "num_samples": 4, "ranks": "split", **options}
    scores = ad.evaluate(model, options.pop("batches", batches), **options)
    scores.save(folder / f"{name}-{rank}.safetensors")


def text_evaluated(name, **stream):
    model, text = tiny.language_model()
    execution = Execution(resume=folder / f"{name}.parts", ranks=current("split"), windows=2)
    scores = run_text(model, text, 0, tiny.text_request(**stream), execution, lines=False)
    scores.save(folder / f"{name}-{rank}.safetensors")


def train_together():
    config = tiny.text_config(str(folder / "text"))
    notes["text"] = trained(config, "text-two")
    notes["again"] = trained(config, "text-two")  # finished: told by rank 0
    notes["image"] = trained(tiny.image_config(), "image-two")
    notes["resumed"] = trained(config, "alone-then-two")  # one process was stopped there
    notes["late"] = trained(config, "late", max_minutes=1e-9 if rank == 1 else 60)
    stop_one(config)
    odd = config.override({"objective.batch_size": 5})
    notes["odd batch"] = message(lambda: trained(odd, "odd"))
    other = config.override({"seed": rank})
    notes["other config"] = message(lambda: trained(other, "other"))
    notes["held"] = message(lambda: trained(config.override({"seed": 9}), "text-two"))


def stop_one(config):
    """A signal that reaches one rank only stops all of them after the same step."""
    real, steps = TextTask.loss, iter(range(1000))

    def loss(self, model, step):
        if next(steps) == 7 and rank == 1:
            signal.raise_signal(signal.SIGINT)
        return real(self, model, step)

    TextTask.loss = loss
    notes["stopped"] = trained(config, "two-then-alone")
    TextTask.loss = real


def evaluate_together():
    _, batches = tiny.classifier()
    evaluated("five")
    evaluated("one", batches=batches[:1])
    evaluated("resumed", resume=folder / "resumed-parts")
    evaluated("auto", num_samples="auto", resume=folder / "auto-parts")
    text_evaluated("text-deterministic")
    text_evaluated("text-sampled", carry="sampled", stripes=2)
    notes["other data"] = message(lambda: evaluated("x", batches=batches[rank : rank + 2]))
    notes["other seed"] = message(lambda: evaluated("x", seed=rank))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_together()
    evaluate_together()
    (folder / f"notes-{rank}.json").write_text(json.dumps(notes))
    with contextlib.suppress(RuntimeError):  # the other rank may close before it is heard
        dist.barrier()
    dist.destroy_process_group()
