"""Time of a prediction: the model's own pass, the Predictor, its torch.export program, onnxruntime.

    python benchmarks/bench_export.py [--num-samples 16] [--repeats 20]

Milliseconds, best of the repeats, one thread, for batches of 1 and 32 examples; beside them the
size of the ONNX file and the largest difference of its log-probabilities from those of the
Predictor.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.selection.export import export_predictor

MEMBER = ad.Member(0.5, 0.8, 1.1)


class Encoder(nn.Module):
    """A small transformer encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(1000, 64)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, 10]."""
        return self.output(self.encoder(self.embedding(tokens)).mean(1))


class LSTMClassifier(nn.Module):
    """The last state of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.lstm = nn.LSTM(64, 128, 2, dropout=0.3, batch_first=True)
        self.output = nn.Sequential(nn.Dropout(0.3), nn.Linear(128, 10))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, 10]."""
        return self.output(self.lstm(self.embedding(tokens))[0][:, -1])


def cases() -> dict[str, tuple[nn.Module, Callable[[int], Tensor]]]:
    def half(*layers: nn.Module) -> list[nn.Module]:
        return [*layers, nn.ReLU(), nn.Dropout(0.5)]

    mlp = nn.Sequential(*half(nn.Linear(64, 256)), *half(nn.Linear(256, 256)), nn.Linear(256, 10))
    cnn = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout2d(0.2), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), *half(nn.Linear(1568, 128)), nn.Linear(128, 10)),
    )
    return {
        "MLP 64-256-256-10": (mlp, lambda n: torch.randn(n, 64)),
        "CNN with BatchNorm, 28x28": (cnn, lambda n: torch.randn(n, 1, 28, 28)),
        "Transformer encoder, 2 layers, 32 tokens": (
            Encoder(),
            lambda n: torch.randint(1000, (n, 32)),
        ),
        "LSTM, 2 layers, 32 tokens": (LSTMClassifier(), lambda n: torch.randint(1000, (n, 32))),
    }


def best(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the fastest call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = 1
    print(f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, {options}")
    print("| model | B | one pass | Predictor | program | onnxruntime | ONNX MB | difference |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name, (model, draw) in cases().items():
            model.eval()
            predictor = ad.Predictor(model, MEMBER, options.num_samples)
            files = {"torch": Path(folder) / "p.pt2", "onnx": Path(folder) / "p.onnx"}
            for kind, path in files.items():
                export_predictor(predictor, draw(4), path, "onnx" if kind == "onnx" else "torch")
            program = torch.export.load(files["torch"]).module()
            session = onnxruntime.InferenceSession(files["onnx"], session_options)
            (given,) = session.get_inputs()
            for size in (1, 32):
                x = draw(size)
                feed = {given.name: x.numpy()}
                calls: list[Callable[[], object]] = [
                    lambda x=x, model=model: model(x),
                    lambda x=x, predictor=predictor: predictor(x),
                    lambda x=x, program=program: program(x),
                    lambda feed=feed, session=session: session.run(None, feed),
                ]
                times = " | ".join(f"{best(call, options.repeats):.2f}" for call in calls)
                found = torch.from_numpy(session.run(None, feed)[0])
                difference = (found - predictor(x)).abs().max().item()
                megabytes = files["onnx"].stat().st_size / 1e6
                print(
                    f"| {name} | {size} | {times} | {megabytes:.2f} | {difference:.0e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
