"""afterdrop doctor: versions, devices, kernels and extras of this environment."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator

import torch

import afterdrop
from afterdrop import kernels


def doctor() -> None:
    """Print versions, devices, whether kernels run on them, and which extras are present.

    Include the output when you report a problem.

    For example:
      afterdrop doctor
    """
    for name, state in _findings():
        print(f"{name:<16}{state}")


def _findings() -> Iterator[tuple[str, str]]:
    yield "afterdrop", afterdrop.__version__
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    extras: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("afterdrop") or ():
        package = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if extra is None:
            yield package, _version(package) or "missing: reinstall afterdrop"
        elif package != "afterdrop":
            extras.setdefault(extra.group(1), []).append(package)
    yield from _devices()
    for extra_name, packages in extras.items():
        missing = [package for package in packages if _version(package) is None]
        remedy = f"missing {', '.join(missing)}: pip install 'afterdrop[{extra_name}]'"
        yield f"[{extra_name}]", remedy if missing else "present"


def _devices() -> Iterator[tuple[str, str]]:
    """The devices that torch can use, and whether kernels run on each."""
    yield "cpu", f"{torch.get_num_threads()} threads; runs the plain form"
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        reason = kernels.why_not(device)
        state = "runs kernels" if reason is None else f"runs the plain form: {reason}"
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        yield str(device), f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB; {state}"
    if not torch.cuda.is_available():
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield "cuda", f"not available (torch is built {build}): kernels do not run"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
