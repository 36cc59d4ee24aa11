"""afterdrop sites: list the dropout sites of a model."""

from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalText, logits_place
from afterdrop.cli.resolve import resolve_batches, resolve_model
from afterdrop.evaluation.batches import call, open_batches
from afterdrop.evaluation.labelled_items import split_item
from afterdrop.masks.sites import Sites, find_sites


def sites(
    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")],
    data: Annotated[Positional[str], tyro.conf.arg(metavar="DATA")],
    /,
    split: str = "valid",
    rates: tuple[str, ...] = (),
    noise: tuple[str, ...] = (),
    batch_dim: int = 0,
    logits: OptionalText = None,
) -> None:
    """List every dropout site of a model, verified by dry runs on the first batch.

    Prints each site with its operator and rate, and the modules that stay in eval mode because
    their randomness is not dropout. If the model draws random numbers that cannot be controlled,
    the error names the module and the remedy.

    For example:
      afterdrop sites mymodel:load_model mymodel:valid_batches
      afterdrop sites awd:load_model awd:valid_batches --rates encoder.dropoute

    Args:
        model: Import path of a module or of a function that returns one, such as pkg.module:name.
        data: Import path of batches (inputs, targets) or of a function that returns them.
        split: Split of the data, if they are built in.
        rates: Attributes that hold the rates of masks that the model draws itself.
        noise: Modules whose random draws are not dropout.
        batch_dim: Batch dimension of the inputs.
        logits: Index or key of the logits in the model's output, if several tensors may be the
            logits.
    """
    module = resolve_model(model)
    head, _, _ = open_batches(resolve_batches(data, split))
    inputs, _ = split_item(head, None, 0)

    options: dict[str, Any] = {"rates": rates, "noise": noise, "batch_dim": batch_dim}
    options["logits"] = logits_place(logits)

    def dry_run(*args: Any, **kwargs: Any) -> Sites:
        return find_sites(module, *args, **options, **kwargs)

    print(call(dry_run, tuple(inputs) if isinstance(inputs, list) else inputs))
