"""Time of a predictor with K = 100 samples, compared with plain loops of K passes.

Baselines, alternated with what is measured, the least of several repeats of each:

    loop    K passes in train mode (torch's own dropout) over the batch, whose probabilities are
            averaged
    rows    the same as one pass over K copies of the batch, where its rows fit a GiB

The goal is at most the time of the loop.

    python benchmarks/bench_predictor.py [--device cpu] [--samples 100] [--repeats 5] [--bert]
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import afterdrop as ad


def mlp() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = [nn.Dropout(0.2)]
    for _ in range(2):
        layers += [nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(64, 256)


def cnn() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Dropout2d(0.2), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(800, 128), nn.ReLU()]
    layers += [nn.Dropout(0.5), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(64, 1, 28, 28)


class Transformer(nn.Module):
    """A classifier of token sequences."""

    def __init__(self, width: int, heads: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(tokens, width), nn.Dropout(0.1)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the first position."""
        return self.head(self.blocks(self.drop(self.embed(tokens)))[:, 0])


def transformer() -> tuple[nn.Module, Tensor]:
    return Transformer(64, 4, 2, 1000), torch.randint(1000, (64, 32))


def bert_base() -> tuple[nn.Module, Tensor]:
    return Transformer(768, 12, 12, 30522), torch.randint(30522, (64, 128))


@torch.no_grad()
def loop(model: nn.Module, x: Tensor, samples: int) -> Tensor:
    """What a user writes: the mean of probabilities over passes."""
    _train(model)
    total = model(x).softmax(-1)
    for _ in range(samples - 1):
        total += model(x).softmax(-1)
    return total.div_(samples).log_()


@torch.no_grad()
def rows(model: nn.Module, x: Tensor, samples: int) -> Tensor:
    """The same in one pass."""
    _train(model)
    out = model(x.repeat(samples, *[1] * (x.dim() - 1))).softmax(-1)
    return out.unflatten(0, (samples, -1)).mean(0).log_()


def _train(model: nn.Module) -> None:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def least(
    runs: dict[str, Callable[[], object]], warm_up: int, repeats: int, device: str
) -> dict[str, float]:
    """The least seconds of each run (of the processor's time on a CPU); the runs take turns."""
    best = dict.fromkeys(runs, math.inf)
    # On a shared machine, the time that other programs take does not count.
    clock = time.process_time if device == "cpu" else time.perf_counter
    for repeat in range(warm_up + repeats):
        for name, run in runs.items():
            begun = clock()
            run()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if repeat >= warm_up:  # before: dry runs, masks and graphs are made
                best[name] = min(best[name], clock() - begun)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3, help="repeats that are not timed")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--bert", action="store_true", help="a model of the size of BERT-base, too")
    parser.add_argument("--only", help="one model by name")
    args = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, {args.device}, K = {args.samples}")
    print(
        f"{'model':<13}{'batch':>5}{'loop':>12}{'rows':>12}{'Predictor':>12}{'ratio to loop':>15}"
    )
    models = {"MLP": mlp, "CNN": cnn, "transformer": transformer}
    if args.bert:
        models["BERT-base"] = bert_base
    for name, make in models.items():
        if args.only in (None, name):
            measure(args, name, make)


def measure(
    args: argparse.Namespace, name: str, make: Callable[[], tuple[nn.Module, Tensor]]
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model, inputs = model.to(args.device).eval(), inputs.to(args.device)
    predict = ad.Predictor(model, ad.Member(1, 1), num_samples=args.samples)
    predict(inputs[:1])  # makes the masks, which are the same for every batch
    for batch in args.batches:
        x = inputs[:batch].contiguous()
        runs: dict[str, Callable[[], object]] = {
            "loop": lambda x=x: loop(model, x, args.samples),
            "predict": lambda x=x: predict(x),
        }
        if predict._sites.row_bytes * batch * args.samples < 2**30:
            runs["rows"] = lambda x=x: rows(model, x, args.samples)
        found = least(runs, args.warm_up, args.repeats, args.device)
        shown = "".join(
            f"{1000 * found[run]:>9.2f} ms" if run in found else f"{'-':>12}"
            for run in ("loop", "rows", "predict")
        )
        print(f"{name:<13}{batch:>5}{shown}{found['predict'] / found['loop']:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
