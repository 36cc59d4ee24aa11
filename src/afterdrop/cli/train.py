"""afterdrop train: train a model with a recipe."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from afterdrop import recipes
from afterdrop.cli.options import OptionalFloat, OptionalInt, OptionalPath, OptionalText
from afterdrop.cli.torchrun import process_group, rank_device, speaks
from afterdrop.errors import DataError
from afterdrop.plain_text import first_line, one_line, shell_word
from afterdrop.stop_request import NAMES, resumable
from afterdrop.train import ConfigError
from afterdrop.train import run as run_training

_OWN_TEXT = "FOLDER"  # stands for the data in recipes for a user's own text


def train(
    recipe: Annotated[Positional[str], tyro.conf.arg(metavar="RECIPE")],
    /,
    out: Path,
    data: OptionalPath = None,
    level: Literal["word", "char", "byte"] | None = None,
    min_count: OptionalInt = None,
    change: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="NAME=VALUE")
    ] = (),
    device: OptionalText = None,
    max_minutes: OptionalFloat = None,
    track: bool = False,
    quiet: bool = False,
) -> None:
    """Train a model with dropout from a recipe; after an interruption, the same command resumes.

    Recipes: ptb-24m, ptb-24m-retuned, ptb-24m-2layer, ptb-24m-2layer-d8, ptb-24m-2layer-fast,
    ptb-24m-mos2-fast, ptb-24m-mos15-fast, ptb-24m-mogrifier, ptb-24m-mogrifier-d8,
    ptb-24m-mogrifier-fast, ptb-10m, ptb-10m-retuned, wikitext2-24m, wikitext2-24m-averaged,
    wikitext2-35m, wikitext2-35m-mogrifier, enwik8-27m, enwik8-46m, ptb-char, mnist-mlp,
    pydoc-small, pydoc-char-small, digits-mlp; the path of your own .toml file; or lm for your own
    folder of train.txt, valid.txt and test.txt (with --level char or byte, lm stands for lm-char).

    For example:
      afterdrop train ptb-24m --data DIR --out runs/ptb
      afterdrop train lm --data my_text --out runs/mine --set model.hidden_sizes=[650,650]
      torchrun --nproc-per-node 4 -m afterdrop train ptb-24m --data DIR --out runs/ptb

    Args:
        recipe: Name of a recipe, path of a .toml file, or lm.
        out: The run folder to write: config.json, metrics.jsonl, checkpoint/.
        data: Folder of the named data sets; with lm, the folder of your text.
        level: With lm: whether tokens are words, characters or bytes.
        min_count: With lm: replace tokens that occur fewer times by <unk>.
        change: Override a setting by its name in the recipe's TOML; may be repeated. The value
            none disables the setting, as in schedule.drop_patience=none.
        device: Device to train on; by default a GPU if there is one.
        max_minutes: Save a checkpoint and stop after this time.
        track: Also write TensorBoard files (needs the extra "track").
        quiet: Do not show a progress bar.
    """
    if recipe == "lm" and level in ("char", "byte"):
        recipe = "lm-char"
    config = recipes.load(recipe).config
    if config.data.name == _OWN_TEXT:
        if data is None:
            raise DataError(f"{recipe} trains on your own text; name its folder with --data FOLDER")
        given = {"data.name": str(data), "data.level": level, "data.min_count": min_count}
        own = {name: value for name, value in given.items() if value is not None}
        config, data = config.override(own), None
    elif level is not None or min_count is not None:
        what = f"level={level!r}" if level is not None else f"min_count={min_count}"
        raise DataError(
            f"{what} applies to your own text (lm) only; for {recipe}, use --set data.level=... or "
            "--set data.min_count=..."
        )
    config = config.override(dict(parse_setting(text) for text in change))
    where = rank_device(device)
    with process_group(where) as ranks:
        result = run_training(
            config,
            out,
            data=data,
            device=where,
            max_minutes=max_minutes,
            progress=not quiet,
            track=track,
            ranks=ranks,
        )
    if result.reason in NAMES:  # a command after `train &&` must not start
        raise resumable(result.reason)
    if not speaks():
        return
    if quiet:
        print(one_line(result.message))
    if result.finished:
        print(f"Next: afterdrop evaluate {shell_word(out)}")


def parse_setting(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE, where the value is TOML, a bare word (a string) or `none` (None).

    Example:
        >>> parse_setting("schedule.drop_patience=none")
        ('schedule.drop_patience', None)
    """
    name, _, value = text.partition("=")
    if not value:
        raise ConfigError(f"--set {text!r} must be name=value, as in optimiser.learning_rate=0.001")
    if value == "none":
        return name, None
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {name}: {first_line(error)}; give a shorter value") from error
