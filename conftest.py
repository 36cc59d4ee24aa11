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


def patch_language_once_per_launch() -> None:
    """Makes Triton's interpreter a third faster.

    At every call of a function in a kernel, of which there are thousands, it looks for the parts of
    the language that it replaces. Once per module and launch is enough.
    """
    from triton.runtime import interpreter

    launch, seen = interpreter.GridExecutor.__call__, set()

    def launch_kernel(self, *args, **kwargs):
        seen.clear()
        return launch(self, *args, **kwargs)

    def call_function(self, *args, **kwargs):
        if id(self.fn.__globals__) not in seen:
            seen.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_kernel
    interpreter.InterpretedFunction.__call__ = call_function


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
elif not torch.cuda.is_available():
    patch_language_once_per_launch()
