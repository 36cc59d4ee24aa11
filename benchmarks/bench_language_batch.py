"""One PTB-sized batch: three alphas at once, compared with one mean by torch-uncertainty.

20 x 35 tokens, V = 10,000, an untrained LSTM of 2 x 200 with dropout between and after its layers,
K = 50. Each contender runs in its own process, which prints its time and the growth of its peak
resident memory. torch-uncertainty does not control the dropout inside nn.LSTM and so draws fewer
masks. The third row is a lower bound for both: K forward passes in train mode, one sample at a
time, with the logits discarded. With --threads 1, times are CPU seconds, which depend less on other
work on the machine.

    python benchmarks/bench_language_batch.py --peer-python PEERS/bin/python

Install the peer in a separate environment:
    python -m venv PEERS && PEERS/bin/pip install -c constraints.txt torch==2.13.0 \
        "torch-uncertainty[cpu,distribution]" safetensors tqdm
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

BATCH, TIME, TYPES, HIDDEN, SAMPLES = 20, 35, 10_000, 200, 50


class WordModel(nn.Module):
    """Embedding, two LSTM layers with dropout between, dropout, softmax layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TYPES, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 2, dropout=0.5, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(HIDDEN, TYPES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, time, V]."""
        return self.output(self.dropout(self.lstm(self.embedding(tokens))[0]))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(tokens: Tensor, targets: Tensor) -> None:
    import afterdrop as ad

    grid = ad.Grid((0.0, 0.5, 1.0), (0.0, 1.0))
    ad.evaluate(WordModel().eval(), [(tokens, targets)], grid=grid, num_samples=SAMPLES)


def theirs(tokens: Tensor, targets: Tensor, on_batch: bool = True) -> None:
    from torch_uncertainty.methods import mc_dropout

    flat = nn.Sequential(WordModel(), nn.Flatten(0, 1))
    model = mc_dropout(flat, num_estimators=SAMPLES, on_batch=on_batch)
    model.eval()
    with torch.no_grad():
        samples = model(tokens).view(SAMPLES, BATCH * TIME, TYPES)
        mean = samples.softmax(-1).mean(0)
        nn.functional.nll_loss(mean.log(), targets.flatten())


@torch.no_grad()
def passes(tokens: Tensor, targets: Tensor) -> None:
    model = WordModel().train()
    for _ in range(SAMPLES):
        model(tokens)


WHAT = {
    "afterdrop": ("three alphas, all T, bounds", ours),
    "torch-uncertainty": ("one mean", theirs),
    "forward passes": ("logits thrown away", passes),
}


def contender(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tokens = torch.randint(TYPES, (BATCH, TIME))
    targets = torch.randint(TYPES, (BATCH, TIME))
    clock = time.process_time if threads == 1 else time.perf_counter
    if name == "afterdrop":  # imports and tables are not measured
        import afterdrop as ad

        warm = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        ad.evaluate(warm, [(torch.randn(2, 2), torch.tensor([0, 1]))], num_samples=SAMPLES)
    elif name == "torch-uncertainty":
        import torch_uncertainty.methods  # noqa: F401
    WordModel()(tokens)
    before, start = peak_mib(), clock()
    WHAT[name][1](tokens, targets)
    print(json.dumps({"seconds": clock() - start, "mib": peak_mib() - before}))


def measure(python: str, name: str, threads: int) -> dict[str, float]:
    source = str(Path(__file__).resolve().parent.parent / "src")
    paths = [source, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [python, __file__, "--contender", name, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} failed; is it installed for {python}?\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", default=os.environ.get("PEER_PYTHON"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contender", choices=tuple(WHAT))
    options = parser.parse_args()
    if options.contender:
        contender(options.contender, options.threads)
        return
    names = {"afterdrop": sys.executable, "forward passes": sys.executable}
    if options.peer_python:
        names["torch-uncertainty"] = options.peer_python
    print(f"torch {torch.__version__}, {options.threads} threads; best of {options.repeats}")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.repeats):  # alternating, so that other work on the machine affects all
        for name, python in names.items():
            runs[name].append(measure(python, name, options.threads))
    best = {n: {key: min(run[key] for run in runs[n]) for key in ("seconds", "mib")} for n in names}
    for name, found in best.items():
        print(f"{name:<20}{found['seconds']:>8.2f} s{found['mib']:>10.0f} MiB   {WHAT[name][0]}")
    if not options.peer_python:
        print("No --peer-python (or PEER_PYTHON): no ratio. Its set-up is in the docstring.")
        return
    report(*(best[name] for name in WHAT))


def report(mine: dict[str, float], peer: dict[str, float], least: dict[str, float]) -> None:
    ratio, bound = (peer["seconds"] / other["seconds"] for other in (mine, least))
    print(
        f"time: torch-uncertainty / afterdrop = {ratio:.2f}   (promise: at least 2; "
        f"with all but the forward passes free {bound:.2f})"
    )
    print(
        f"memory: afterdrop / torch-uncertainty = {mine['mib'] / peer['mib']:.3f}"
        "   (promise: at most 0.1)"
    )


if __name__ == "__main__":
    main()
