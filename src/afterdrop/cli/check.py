"""afterdrop check: test whether the dropout of a model is controlled correctly."""

from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt, OptionalText, logits_place
from afterdrop.cli.resolve import resolve_batches, resolve_model
from afterdrop.conformance import check as check_model


def check(
    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")],
    data: Annotated[Positional[str], tyro.conf.arg(metavar="DATA")],
    /,
    split: str = "valid",
    num_samples: int = 200,
    seed: int = 0,
    rates: tuple[str, ...] = (),
    noise: tuple[str, ...] = (),
    batch_dim: int = 0,
    class_dim: OptionalInt = None,
    logits: OptionalText = None,
) -> int:
    """Test on the first batch whether the dropout of a model is controlled correctly.

    Prints a verdict per line: the dropout sites, the random operations of a train-mode pass, mean
    and variance under the model's own dropout and under control, the model before and after, eval
    mode called twice, and two threads. The exit status is 1 if a test failed.

    For example:
      afterdrop check mymodel:load_model mymodel:valid_batches
      afterdrop check awd:load_model awd:valid_batches --rates encoder.dropoute

    Args:
        model: Import path of a module or of a function that returns one, such as pkg.module:name.
        data: Import path of batches (inputs, targets) or of a function that returns them.
        split: Split of the data, if they are built in.
        num_samples: Mask samples with either kind of dropout, even.
        seed: Seed of both.
        rates: Attributes that hold the rates of masks that the model draws itself.
        noise: Modules whose random draws are not dropout.
        batch_dim: Batch dimension of inputs, targets and logits.
        class_dim: Class dimension of the logits; by default the last.
        logits: Index or key of the logits in the model's output, if several tensors may be the
            logits.
    """
    found = check_model(
        resolve_model(model),
        resolve_batches(data, split),
        num_samples=num_samples,
        seed=seed,
        rates=rates,
        noise=noise,
        batch_dim=batch_dim,
        class_dim=class_dim,
        logits=logits_place(logits),
    )
    print(found)
    return 0 if found.passed else 1
