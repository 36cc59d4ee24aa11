"""A training step of the paper's language models on a GPU: kernels compared with PyTorch.

    python benchmarks/bench_train_gpu.py [--recipes ptb-24m-retuned ptb-24m-2layer] [--compile]
                                         [--profile] [--only kernels graph ...]

A step includes masks, forward, backward, L2 penalty, clipping and Adam. Contenders, on random
tokens with the vocabulary size of the data:

    kernels             what `afterdrop train` runs
    eager               the plain PyTorch form, float32 with TF32 products
    graph               the plain form as one CUDA graph
    compile + graph     the plain form through torch.compile, then one CUDA graph (--compile)
    cuDNN H             nn.LSTM in float16 as one CUDA graph, with a tied softmax and torch's fused
                        Adam: no state masks, no cap, no sum of layers, so a simpler model

Times are medians of CUDA events over --repeats steps. `sustained` is the wall time per step of
2,000 consecutive steps of the kernels, with windows from the CPU. --profile prints the time of each
kernel in a step.
"""

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from afterdrop import recipes
from afterdrop.models import LanguageModel
from afterdrop.train.config import TrainConfig
from afterdrop.train.fused_text import FusedText
from afterdrop.train.objective import add_prior_gradient, data_loss
from afterdrop.train.optimiser import AdamTF, build_optimiser
from afterdrop.train.whole_masks import RankRows

TYPES = {"ptb": 10_000, "wikitext-2": 33_279}
DEVICE = torch.device("cuda")
Step = Callable[[], None]


class RandomText:
    """The part of a text task that the kernels need, with windows of random tokens."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.device, self.state = config, DEVICE, None
        self.window = config.objective.window or 35
        batch = config.objective.batch_size
        self.rows = RankRows(slice(0, batch), batch, config.objective.samples)

    def train_stripes(self, device: torch.device) -> "RandomStripes":
        """Where windows come from."""
        types = TYPES[self.config.data.name]
        return RandomStripes((self.config.objective.batch_size, self.window), types)


class RandomStripes:
    """Windows of random tokens, made on the CPU."""

    def __init__(self, shape: tuple[int, int], types: int) -> None:
        self.shape, self.types = shape, types

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, time]."""
        inputs, targets = (torch.randint(self.types, self.shape) for _ in range(2))
        return inputs, targets


def fixed_window(config: TrainConfig) -> tuple[Tensor, Tensor]:
    inputs, targets = RandomText(config).train_stripes(DEVICE)[0]
    return inputs.to(DEVICE), targets.to(DEVICE)


def kernels_step(config: TrainConfig, model: LanguageModel) -> Step:
    optimiser = build_optimiser(list(model.parameters()), config.optimiser)
    assert isinstance(optimiser, AdamTF)
    fused = FusedText(RandomText(config), model, optimiser, 0)
    count = itertools.count()

    def step() -> None:
        fused.step(next(count))

    return step


def plain_step(config: TrainConfig, model: LanguageModel, run: Callable | None = None) -> Step:
    """Masks, forward, backward, L2, clip, Adam, with fixed tokens and a carried state."""
    parameters = list(model.parameters())
    optimiser = build_optimiser(parameters, config.optimiser)
    inputs, targets = fixed_window(config)
    state = model.initial_state(len(inputs))
    forward = model if run is None else run  # a compiled module has no truth value
    model.train()

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        logits, after = forward(inputs, state)
        data_loss(logits, targets).backward()
        add_prior_gradient(parameters, config.objective.l2_penalty)
        nn.utils.clip_grad_norm_(parameters, config.optimiser.max_norm or 10.0, foreach=True)
        optimiser.step()
        for old, new in zip(state, after):
            for part, value in zip(old, new):
                part.copy_(value.detach())

    return step


class CudnnModel(nn.Module):
    """nn.LSTM between a tied embedding and softmax."""

    def __init__(self, types: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(types, hidden) * 0.05)
        self.lstm = nn.LSTM(hidden, hidden, layers)
        self.dropout = nn.Dropout(0.6)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [time, B, V]."""
        x = self.dropout(nn.functional.embedding(tokens.t(), self.table))
        return self.dropout(self.lstm(x)[0]) @ self.table.t()


def cudnn_step(config: TrainConfig, hidden: int, layers: int) -> Step:
    model = CudnnModel(TYPES[config.data.name], hidden, layers).to(DEVICE).half()
    optimiser = torch.optim.Adam(model.parameters(), 1e-4, fused=True, capturable=True)
    inputs, targets = fixed_window(config)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        logits = model(inputs).float().flatten(0, 1)
        nn.functional.cross_entropy(logits, targets.t().flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0, foreach=True)
        optimiser.step()

    return step


def graphed(step: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(step: Step, repeats: int) -> float:
    for _ in range(5):
        step()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def sustained(step: Step, steps: int = 2000) -> float:
    """Milliseconds per step of many consecutive steps."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def profile_step(step: Step, repeats: int = 10, top: int = 24) -> None:
    """Prints the device time of each kernel in a step, and how often it runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / repeats
    print(f"  {total / 1e3:.3f} ms in kernels")
    for row in rows[:top]:
        share = row.self_device_time_total / repeats
        print(f"  {share:>9.1f} us {row.count / repeats:>6.0f} x  {row.key[:90]}")


def contenders(config: TrainConfig, compiled: bool) -> dict[str, Callable[[], Step]]:
    def model() -> LanguageModel:
        torch.manual_seed(0)
        return LanguageModel(config.model.language_model(TYPES[config.data.name])).to(DEVICE)

    def through_compile() -> Step:
        whole = model()
        return graphed(plain_step(config, whole, torch.compile(whole)))

    sizes = model().config.hidden_sizes
    made: dict[str, Callable[[], Step]] = {
        "kernels": lambda: kernels_step(config, model()),
        "graph": lambda: graphed(plain_step(config, model())),
        "eager": lambda: plain_step(config, model()),
        f"cuDNN {sizes[0]}": lambda: graphed(cudnn_step(config, sizes[0], len(sizes))),
    }
    wide = -(-sizes[0] // 128) * 128
    made[f"cuDNN {wide}"] = lambda: graphed(cudnn_step(config, wide, len(sizes)))
    if compiled:
        made["compile + graph"] = through_compile
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=["ptb-24m-retuned", "ptb-24m-2layer"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of contenders; by default all")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device: left out")
        return
    torch.set_float32_matmul_precision("high")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name in options.recipes:
        config = recipes.load(name).config
        found: dict[str, float] = {}
        for contender, make in contenders(config, options.compile).items():
            if options.only and contender not in options.only:
                continue
            try:
                step = make()
                found[contender] = milliseconds(step, options.repeats)
            except Exception as error:
                print(f"{name:<24}{contender:<18} failed: {str(error).splitlines()[0][:90]}")
                continue
            line = f"{name:<24}{contender:<18}{found[contender]:>9.3f} ms"
            if "kernels" in found:
                line += f"{found[contender] / found['kernels']:>8.1f} x"
            print(line, flush=True)
            if contender == "kernels":
                print(f"{name:<24}{'sustained':<18}{sustained(step):>9.3f} ms", flush=True)
                if options.profile:
                    profile_step(step)


if __name__ == "__main__":
    main()
