"""Language models on a CPU: the stack against nn.LSTM, and the family against the eager loop.

1. Tokens per second of two LSTM layers, forward and training, ours (capped gate, masks on input,
   layers and state, sum of layers) against nn.LSTM in eager mode (none of these). Asked for: at
   least 1.0 in forward, at least 0.7 in training.
2. Family evaluation of a slice of text, 3 alphas x 5 multipliers x 13 temperatures, against the
   loop that runs K passes for every grid point. The loop is timed for one grid point and multiplied
   by their number. Asked for: at least 10 times faster.

    python benchmarks/bench_language.py [--threads 2]
"""

import argparse
import resource
import time
from collections.abc import Callable

import torch
from torch import nn

import afterdrop as ad
from afterdrop.evaluate.evaluate import Settings
from afterdrop.evaluate.language import StreamSettings, evaluate_text
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig, LSTMStack, MaskConfig

BATCH, TIME = 20, 35


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def stacks(hidden: int) -> None:
    x = torch.randn(TIME, BATCH, hidden)
    theirs = nn.LSTM(hidden, hidden, 2)
    masks = {f"{site}_dropout": MaskConfig(0.3) for site in ("input", "inter_layer")}
    ours = LSTMStack(hidden, (hidden, hidden), state_dropout=MaskConfig(0.3, "sequence"), **masks)
    state = ours.initial_state(BATCH)

    def forward(module: nn.Module, *extra: object) -> None:
        module.eval()
        with torch.no_grad():
            module(x, *extra)

    def training(module: nn.Module, *extra: object) -> None:
        module.train()
        module.zero_grad()
        module(x, *extra)[0].sum().backward()

    for name, run in (("forward", forward), ("training", training)):
        mine = seconds(lambda: run(ours, state))  # noqa: B023
        other = seconds(lambda: run(theirs))  # noqa: B023
        tokens = BATCH * TIME
        print(
            f"2x{hidden} {name:<9} ours {tokens / mine:>9.0f} tokens/s, nn.LSTM "
            f"{tokens / other:>9.0f}; ratio {other / mine:.2f}"
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
    stream = StreamSettings(TIME, BATCH)
    for k in (8, 32):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        evaluate_text(model, text, 0, Settings(grid, Plan(k)), stream, lines=False)
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
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, B={BATCH}, T={TIME}")
    for hidden in (200, 650):
        stacks(hidden)
    family(types=10_000, hidden=200, tokens=2100)


if __name__ == "__main__":
    main()
