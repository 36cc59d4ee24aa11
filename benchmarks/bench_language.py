"""Language models on a CPU: the LSTM stack compared with nn.LSTM, the family with an eager loop.

1. Tokens per second of two LSTM layers: ours (capped gate, masks on input, layers and state, sum of
   layers) and nn.LSTM in eager mode (without these; on a CPU a fused oneDNN primitive, with and
   without gradients). Required ratios: at least 1.0 forward and 0.7 in training. Forward is timed
   for deterministic evaluation, with masks without gradients, and with masks for training.
   `products` is the time of our matrix products alone, a lower bound for forward. Repetitions of
   both alternate, and the fastest of each counts. With --threads 1, times are CPU seconds, which do
   not depend on other work on the machine.
2. Family evaluation of a slice of text, 3 alphas x 5 multipliers x 13 temperatures, compared with a
   loop that runs K passes per grid point. The loop is timed for one grid point and multiplied by
   their number. Required: at least 10 times faster.

    python benchmarks/bench_language.py [--threads 2] [--hidden 200] [--seconds 5] [--stacks-only]
"""

import argparse
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.models import LanguageModel, LanguageModelConfig, LSTMStack, MaskConfig
from afterdrop.models.product import accumulator, linear

BATCH, TIME = 20, 35


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def alternate(runs: dict[str, Callable[[], object]], budget: float) -> dict[str, float]:
    """The fastest time of each; they alternate, so that other work on the machine affects all."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(runs, float("inf"))
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for name, run in runs.items():
            run()
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return best


def stacks(hidden: int, budget: float) -> None:
    x = torch.randn(TIME, BATCH, hidden)
    theirs = nn.LSTM(hidden, hidden, 2)
    masks = {f"{site}_dropout": MaskConfig(0.3) for site in ("input", "inter_layer")}
    ours = LSTMStack(hidden, (hidden, hidden), state_dropout=MaskConfig(0.3, "sequence"), **masks)
    state = ours.initial_state(BATCH)

    def forward(module: nn.Module, train: bool, grad: bool, *extra: object) -> Tensor:
        module.train(train)
        with torch.set_grad_enabled(grad):
            return module(x, *extra)[0]

    def training(module: nn.Module, *extra: object) -> None:
        module.zero_grad()
        forward(module, True, True, *extra).sum().backward()

    @torch.no_grad()
    def products() -> None:
        for layer in ours.layers:
            gates = linear(x.flatten(0, 1), layer.weight_x, layer.bias).view(TIME, BATCH, -1)
            add = accumulator(layer.weight_h, BATCH)
            for step in gates.unbind(0):
                add(step, state[0][0])

    kinds = {"evaluation": (False, False), "masks": (True, False), "with gradients": (True, True)}
    for name, kind in kinds.items():
        runs: dict[str, Callable[[], object]] = {
            "ours": lambda: forward(ours, *kind, state),  # noqa: B023
            "theirs": lambda: forward(theirs, *kind),  # noqa: B023
            "products": products,
        }
        show(f"2x{hidden} forward, {name}", alternate(runs, budget))
    runs = {"ours": lambda: training(ours, state), "theirs": lambda: training(theirs)}
    show(f"2x{hidden} training", alternate(runs, budget))


def show(name: str, best: dict[str, float]) -> None:
    rate = {which: BATCH * TIME / took for which, took in best.items()}
    bound = f"; products alone {rate['products']:>7.0f}" if "products" in rate else ""
    print(
        f"{name:<29} ours {rate['ours']:>7.0f} tokens/s, nn.LSTM {rate['theirs']:>7.0f}; "
        f"ratio {rate['ours'] / rate['theirs']:.2f}{bound}",
        flush=True,
    )


def family(types: int, hidden: int, tokens: int) -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocabulary=types,
        hidden_sizes=(hidden, hidden),
        input_dropout=0.4,
        state_dropout=0.3,
        output_dropout=0.5,
    )
    model = LanguageModel(config).eval()
    text = torch.randint(types, (tokens,))
    grid = ad.Grid((0.0, 0.5, 1.0), (0.2, 0.4, 0.6, 0.8, 1.0))
    options = {"grid": grid, "window": TIME, "stripes": BATCH, "lines": False}
    for k in (8, 32):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        ad.evaluate_text(model, text, 0, num_samples=k, **options)
        mine = time.perf_counter() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        windows = [w for w in text.split(TIME * BATCH) if len(w) == TIME * BATCH]

        def one_point(k: int = k, windows: list[torch.Tensor] = windows) -> None:
            model.train()
            with torch.no_grad():
                for window in windows:
                    total = 0
                    for _ in range(k):
                        logits = model(window.view(BATCH, TIME))[0]
                        total = total + logits.log_softmax(-1).exp()
            model.eval()

        points = 3 * 5 * 13
        loop = seconds(one_point, 1) * points * tokens / (len(windows) * TIME * BATCH)
        print(
            f"family, V={types}, 2x{hidden}, {tokens} tokens, K={k}: {mine:.1f} s, peak "
            f"+{grown:.0f} MiB; loop over {points} grid points {loop:.0f} s (extrapolated); "
            f"ratio {loop / mine:.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", default=(200, 650))
    parser.add_argument("--seconds", type=float, default=5, help="seconds per line about the stack")
    parser.add_argument("--stacks-only", action="store_true", help="skip the family evaluation")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, B={BATCH}, time={TIME}")
    for hidden in options.hidden:
        stacks(hidden, options.seconds)
    if not options.stacks_only:
        family(types=10_000, hidden=200, tokens=2100)


if __name__ == "__main__":
    main()
