"""A predictor as a file that runs without afterdrop: a torch.export program, or ONNX.

The exporter belongs to selection because `Choice.export` calls it; it needs neither a framework nor
anything above selection.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from afterdrop.errors import AfterdropError, DataError, ExtraError
from afterdrop.evaluation.batches import call, to_device
from afterdrop.evaluation.likelihoods.build_likelihood import build_likelihood
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.files import write_atomic
from afterdrop.masks.model_call import LogitsPlace, batch_size, close, take_rows
from afterdrop.selection.predictor import Predictor
from afterdrop.selection.traceable_predictor import TraceablePredictor

Format = Literal["torch", "onnx"]
OUTPUT = "log_probs"
_FORWARD = (
    "nothing was written. The forward of the model must not depend on values of tensors, and must "
    "take the batch size from x.shape, not from len(x)"
)
SUFFIXES = {"torch": ".pt2", "onnx": ".onnx"}  # torch.export.load takes no other


def export_predictor(
    predictor: object,
    example_inputs: Any,
    path: str | Path,
    format: Format = "torch",
    logits: LogitsPlace | None = None,
) -> None:
    """Writes a predictor as a file (`Choice.export`).

    Args:
        predictor: A `Predictor` of classes or labels.
        example_inputs: At least two examples: a tensor, a tuple of positional or a mapping of
            keyword inputs.
        path: The file.
        format: "torch" or "onnx".
        logits: The function that finds the logits, if there is one.
    """
    if format not in ("torch", "onnx"):
        raise DataError(f"format={format!r} must be 'torch' or 'onnx'")
    if format == "onnx":
        _require_onnx()
    if Path(path).suffix != SUFFIXES[format]:
        raise DataError(f"path={str(path)!r} must end in {SUFFIXES[format]} for format={format!r}")
    if not isinstance(predictor, Predictor):
        raise DataError(
            f"this choice has a {type(predictor).__name__}, which cannot be exported; choices of "
            "one model on batches of examples can"
        )
    likelihood = build_likelihood(predictor.request, logits)
    if not isinstance(likelihood, Categorical):
        raise DataError(
            f"likelihood={predictor.request.likelihood!r} predicts a distribution of numbers, "
            "which is an object and not a tensor; only classes and labels can be exported"
        )
    arguments, size = _read_inputs(predictor, example_inputs)
    with torch.no_grad():
        traceable = TraceablePredictor(
            predictor.model, predictor.member, predictor.request, likelihood, arguments, size
        )
        program = _traced(traceable)
        _check_sizes(program, predictor, traceable, arguments, size)
    if format == "torch":
        content = io.BytesIO()
        torch.export.save(program, content)
        write_atomic(path, content.getvalue())
    else:
        names = _input_names(predictor.model, example_inputs, len(traceable.example))
        write_atomic(path, _onnx_bytes(program, names))


def _require_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ExtraError(
            f"format='onnx' needs {' and '.join(missing)}; install with "
            "pip install 'afterdrop[export]', or use format='torch'"
        )


def _read_inputs(predictor: Predictor, example_inputs: Any) -> tuple[Any, int]:
    """Positional and keyword inputs on the model's device, and the number of examples."""
    if isinstance(example_inputs, list):
        example_inputs = tuple(example_inputs)
    device = next((p.device for p in predictor.model.parameters()), torch.device("cpu"))
    arguments = call(lambda *args, **kwargs: (args, kwargs), to_device(example_inputs, device))
    size = batch_size(arguments, predictor.request.batch_dim)
    if size < 2:
        raise DataError(
            f"example_inputs has {size} example, from which the batch dimension of what the model "
            "computes cannot be told; give at least 2"
        )
    return arguments, size


def _traced(traceable: TraceablePredictor) -> Any:
    """The predictor as a torch.export program with a free batch size."""
    # AUTO also accepts a batch size that comes out fixed, which `_check_sizes` refuses. A named Dim
    # would also refuse strides of permuted rows, which torch cannot prove to be what they are.
    free = {traceable.batch_dim: torch.export.Dim.AUTO}
    shapes = tuple(free if batched else None for batched in traceable.batched)
    try:
        with traceable.ready(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own internals
            return torch.export.export(
                traceable, traceable.example, dynamic_shapes=(shapes,), strict=False
            )
    except AfterdropError:
        raise
    except Exception as error:  # torch.export may fail in any way on a user's model
        raise DataError(
            f"torch.export cannot trace the model ({type(error).__name__}: {_first_line(error)}); "
            f"{_FORWARD}"
        ) from error


def _check_sizes(
    program: Any, predictor: Predictor, traceable: TraceablePredictor, arguments: Any, size: int
) -> None:
    """Refuses a program that is not the predictor, at the example's size or another."""
    module, dim = program.module(), predictor.request.batch_dim
    for stop, copies in ((size, 1), (1, 1), (size, 2)):
        inputs, kwargs = take_rows(arguments, dim, size, 0, stop, copies)
        expected = predictor(*inputs, **kwargs)
        try:
            found = module(*take_rows(traceable.example, dim, size, 0, stop, copies))
        except (AssertionError, RuntimeError) as error:
            raise DataError(
                f"torch.export fixes the batch size of the model: {stop * copies} examples fail "
                f"where {size} do not ({_first_line(error)}); {_FORWARD}"
            ) from error
        if not close(found, expected):
            raise DataError(
                f"the exported program differs from the predictor on {stop * copies} examples "
                f"(by up to {_largest(found, expected)}); {_FORWARD}"
            )


def _largest(found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    return f"{(found - expected).nan_to_num().abs().max().item():.2g} nats"


def _input_names(model: nn.Module, inputs: Any, count: int) -> list[str]:
    """Names for the inputs of the file: keywords, or the parameters of `forward`."""
    if isinstance(inputs, Mapping):
        names = [str(name) for name, value in inputs.items() if isinstance(value, Tensor)]
    else:
        names = list(inspect.signature(model.forward).parameters)[:count]
    return names if len(names) == count else [f"input_{number}" for number in range(count)]


def _onnx_bytes(program: Any, names: list[str]) -> bytes:
    """The program as an ONNX model."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    try:
        log.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of onnxscript and torch about their own internals
            found = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=names, output_names=[OUTPUT]
            )
        assert found is not None
        model = found.model_proto
        _name_batch([value.type.tensor_type.shape for value in model.graph.input])
        _name_batch([value.type.tensor_type.shape for value in model.graph.output])
        return model.SerializeToString()
    except Exception as error:  # ONNX lacks some operators of torch
        raise DataError(
            f"torch.onnx cannot translate the model ({type(error).__name__}: "
            f"{_first_line(error)}); use format='torch'"
        ) from error
    finally:
        log.setLevel(level)


def _name_batch(shapes: list[Any]) -> None:
    """Names the free size: there is only one, and torch calls it s and a number."""
    for dim in (dim for shape in shapes for dim in shape.dim if dim.dim_param):
        dim.dim_param = re.sub(r"s\d+", "batch", dim.dim_param)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"
