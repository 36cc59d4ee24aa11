"""Settings of tests and doctests that must be made before torch or Triton are used."""

import importlib.util
import os
import signal

import torch

os.environ.setdefault(
    "TRITON_DEFAULT_FP_FUSION", "1"
)  # the default, which Triton warns will change
if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, on CPU tensors
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts background jobs with SIGINT ignored, which all child processes would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:  # not available on every platform
    collect_ignore_glob = [
        "src/afterdrop/kernels/*.py",
        "src/afterdrop/*/fused*.py",
        "src/afterdrop/evaluation/engines/*.py",
        "tests/kernels/*.py",
    ]
