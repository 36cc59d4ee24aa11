"""What every test and doctest needs before anything is imported."""

import importlib.util
import os
import signal

import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default, which it warns will change
if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, on CPU tensors
    os.environ["TRITON_INTERPRET"] = "1"

# A shell ignores SIGINT for what it starts in the background, and all children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:  # not there on every platform
    collect_ignore_glob = [
        "src/afterdrop/kernels/*.py",
        "src/afterdrop/*/fused*.py",
        "src/afterdrop/evaluation/engines/*.py",
        "tests/kernels/*.py",
    ]
