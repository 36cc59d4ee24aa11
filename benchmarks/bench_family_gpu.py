"""Family evaluation on a GPU: a language model with the kernels, and any other model.

    python benchmarks/bench_family_gpu.py [text] [image] [words] [batch]
        [--recipe ptb-24m-retuned] [--tokens 73760] [--run RUN [--data DIR]] [--batches 3]

`text` evaluates a recipe's model with new weights on random tokens, or (with --run) a trained model
on its validation data: 5 alphas x 11 multipliers x all temperatures, deterministic carry, one
stripe. It is compared with an eager loop that runs the model once per alpha, multiplier and sample
over 64 stripes; the loop is timed for one pass over a slice and extrapolated. `image` is a ViT-B/16
on 64 images and `words` a GPT-2-sized model on 4 x 256 tokens, both with new weights, 3 alphas and
K = 50. They are compared with a plain loop that keeps the mean of probabilities, and with
torch-uncertainty (one mean) if it is installed. `batch` does the same with the PTB-sized batch of
`bench_language_batch`, where torch-uncertainty runs all samples at once. An evaluation has fixed
costs (dry runs, fingerprint), so each is timed on one batch and on several: "per batch" is the time
of each further batch, "fixed" the rest of the first. Ratios are times relative to afterdrop's.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import afterdrop as ad
from afterdrop import recipes
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import StreamSettings
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel
from afterdrop.train import load_model
from bench_language_batch import BATCH, TIME, TYPES, WordModel

DEVICE = torch.device("cuda")
STRIPES = 64  # of the eager loop
SAMPLES = 50
KINDS = ("text", "image", "words", "batch")


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and peak device memory in GiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    del found  # freeing a gigabyte of scores is not part of the evaluation
    return seconds, torch.cuda.max_memory_allocated() / 2**30


def subject(options: argparse.Namespace) -> tuple[str, LanguageModel, Tensor, int]:
    """The name, model, tokens and window of `text`."""
    if options.run is not None:
        model, config, load_data = load_model(options.run, device=DEVICE)
        assert isinstance(model, LanguageModel)
        name, tokens = f"{options.run.name}, validation", load_data(options.data).valid.long()
    else:
        config = recipes.load(options.recipe).config
        torch.manual_seed(0)
        model = LanguageModel(config.model.language_model(options.types)).to(DEVICE)
        name, tokens = options.recipe, torch.randint(options.types, (options.tokens,))
    return name, model.eval(), tokens, config.objective.window or 35


def text(options: argparse.Namespace) -> None:
    name, model, tokens, window = subject(options)
    grid, types = ad.Grid(), model.config.vocabulary

    def evaluate(count: int, samples: int) -> Callable[[], object]:
        request = ad.Request(grid, Plan(samples), stream=StreamSettings(window))
        execution = Execution(windows=128)
        return lambda: run_text(model, tokens[:count], 0, request, execution, lines=False)

    cold, _ = timed(evaluate(20 * window, options.num_samples))
    # Two batches, of full and of another size, so that nothing is compiled while timing.
    evaluate(min(len(tokens), 140 * window), options.num_samples)()
    took, peak = timed(evaluate(len(tokens), options.num_samples))
    _, fewer = timed(evaluate(len(tokens) // 10, options.num_samples // 5))
    print(
        f"{name}: {len(tokens)} tokens, V = {types}, {len(grid)} members, all T, "
        f"K = {options.num_samples}: {took:.1f} s, {peak:.1f} GiB (K = {options.num_samples // 5}: "
        f"{fewer:.1f} GiB); first call, with compilation: {cold:.1f} s for {20 * window} tokens"
    )
    part = torch.randint(types, (STRIPES, 4 * window), device=DEVICE)
    one, _ = timed(eager_pass(model, part, window))
    one, _ = timed(eager_pass(model, part, window))
    passes = len(grid.alphas) * len(grid.stochastic) * options.num_samples
    loop = one * passes * len(tokens) / part.numel()
    print(
        f"eager loop, {STRIPES} stripes: {passes} passes, {loop:.0f} s (one pass over "
        f"{part.numel()} tokens: {one:.2f} s, the rest extrapolated); ratio {loop / took:.0f}"
    )


def eager_pass(model: LanguageModel, tokens: Tensor, window: int) -> Callable[[], object]:
    """One sample of one member, window by window with a carried state."""

    @torch.no_grad()
    def run() -> None:
        model.train()
        state, total = None, torch.zeros((), dtype=torch.float64, device=DEVICE)
        for part in tokens.split(window, dim=1):
            logits, state = model(part, state)
            lp = logits.log_softmax(-1).gather(-1, part.unsqueeze(-1))
            total += lp.double().sum()
        model.eval()

    return run


class Vision(nn.Module):
    """A ViT-B/16: 12 layers of 768, 197 tokens, 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 768))
        self.place = nn.Parameter(torch.randn(1, 197, 768) * 0.02)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.out = nn.Linear(768, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, 1000]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.out(self.encoder(x)[:, 0])


class Words(nn.Module):
    """GPT-2-sized: 12 layers of 768, a tied softmax over 50,257 types."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50257, 768) * 0.02)
        self.place = nn.Parameter(torch.randn(1, 1024, 768) * 0.01)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(
            768, 12, 3072, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, time, V]."""
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        x = self.dropout(nn.functional.embedding(tokens, self.table) + self.place[:, :time])
        return self.encoder(x, mask, is_causal=True) @ self.table.t()


def others(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    options: argparse.Namespace,
    at_once: bool = False,
) -> None:
    """Any model: three alphas compared with one mean; the peer loops unless `at_once`."""
    model = model.to(DEVICE).eval()
    grid = ad.Grid((0.0, 0.5, 1.0), (0.0, 1.0))

    def ours(batches: list[tuple[Tensor, Tensor]]) -> None:
        ad.evaluate(model, batches, grid=grid, num_samples=SAMPLES)

    @torch.no_grad()
    def plain(batches: list[tuple[Tensor, Tensor]]) -> None:
        model.train()
        for inputs, targets in batches:
            mean = torch.zeros((), device=DEVICE)
            for _ in range(SAMPLES):
                mean = mean + model(inputs).softmax(-1) / SAMPLES
            mean.flatten(0, -2).log().gather(-1, targets.flatten().unsqueeze(-1)).mean().item()
        model.eval()

    runs: dict[str, Callable[[list[tuple[Tensor, Tensor]]], None]] = {
        "afterdrop": ours,
        "plain loop, one mean": plain,
    }
    try:
        from torch_uncertainty.methods import mc_dropout
    except ImportError:
        print("torch-uncertainty is not installed: left out")
    else:

        @torch.no_grad()
        def peer(batches: list[tuple[Tensor, Tensor]]) -> None:
            flat = nn.Sequential(model, nn.Flatten(0, -2))
            wrapped = mc_dropout(flat, num_estimators=SAMPLES, on_batch=at_once).eval()
            for inputs, targets in batches:
                samples = wrapped(inputs).view(SAMPLES, targets.numel(), -1)
                log_mean = samples.softmax(-1).mean(0).log()
                nn.functional.nll_loss(log_mean, targets.flatten()).item()

        runs["torch-uncertainty, one mean"] = peer
    compare(runs, batch, options)


def compare(
    runs: dict[str, Callable[[list[tuple[Tensor, Tensor]]], None]],
    batch: tuple[Tensor, Tensor],
    options: argparse.Namespace,
) -> None:
    """Prints seconds for one batch, for several, and for each further batch."""
    many = options.batches
    print(
        f"{'':<30}{'1 batch':>10}{f'{many} batches':>12}{'a batch':>10}{'fixed':>9}{'peak':>11}"
        f"{'ratio: 1':>10}{many:>6}{'a batch':>9}"
    )
    own: list[float] = []
    for name, run in runs.items():
        run([batch])
        one, _ = min(timed(partial(run, [batch])) for _ in range(options.repeats))
        several, peak = min(timed(partial(run, [batch] * many)) for _ in range(options.repeats))
        each = (several - one) / (many - 1)
        seconds = [one, several, each]
        own = own or seconds
        ratios = [theirs / mine for theirs, mine in zip(seconds, own)]
        print(
            f"{name:<30}{one:>8.3f} s{several:>10.3f} s{each:>8.3f} s{one - each:>7.3f} s"
            f"{peak:>7.1f} GiB{ratios[0]:>10.2f}{ratios[1]:>6.2f}{ratios[2]:>9.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=KINDS, default="text")
    parser.add_argument("--recipe", default="ptb-24m-retuned")
    parser.add_argument("--tokens", type=int, default=73_760)
    parser.add_argument("--types", type=int, default=10_000)
    parser.add_argument("--run", type=Path, help="a run folder, instead of --recipe and --tokens")
    parser.add_argument("--data", type=Path, help="folder of its data set")
    parser.add_argument("--num-samples", type=int, default=100)
    parser.add_argument(
        "--batches", type=int, default=3, help="number of batches of image, words and batch"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="repetitions, of which the fastest counts (not for text)",
    )
    options = parser.parse_args()
    if options.batches < 2:
        parser.error(f"--batches is {options.batches}; give 2 or more, to tell fixed costs apart")
    if not torch.cuda.is_available():
        print("needs a CUDA device: left out")
        return
    torch.set_float32_matmul_precision("high")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for what in KINDS:
        if what in options.what:
            print(f"\n{what}")
            run(what, options)


def run(what: str, options: argparse.Namespace) -> None:
    if what == "text":
        text(options)
    elif what == "image":
        images = torch.randn(64, 3, 224, 224, device=DEVICE)
        others(Vision(), (images, labels((64,), 1000)), options)
    elif what == "words":
        tokens, targets = (labels((4, 256), 50257) for _ in range(2))
        others(Words(), (tokens, targets), options)
    else:
        tokens, targets = (labels((BATCH, TIME), TYPES) for _ in range(2))
        others(WordModel(), (tokens, targets), options, at_once=True)


def labels(shape: tuple[int, ...], classes: int) -> Tensor:
    return torch.randint(classes, shape, device=DEVICE)


if __name__ == "__main__":
    main()
