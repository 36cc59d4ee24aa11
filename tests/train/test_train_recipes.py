from pathlib import Path

import pytest
import torch

from afterdrop import recipes
from afterdrop.errors import FileError
from afterdrop.models import Classifier, LanguageModel
from afterdrop.train import ConfigError

VOCABULARIES = {"ptb": 10_001, "ptb-char": 51, "wikitext-2": 33_279, "enwik8": 206}
PUBLISHED = {
    "ptb-10m": (1194, 268, 9_997_549),
    "ptb-24m": (723, 723, 23_979_620),
    "ptb-10m-retuned": (1186, 272, 9_974_361),
    "ptb-24m-retuned": (723, 723, 23_979_620),
    "ptb-24m-2layer": (951, 951, 23_998_976),
    "wikitext2-24m": (1227, 149, 23_982_129),
    "enwik8-27m": (911, 911, 26_947_586),
    "enwik8-46m": (1192, 1192, 45_978_030),
}


@pytest.mark.parametrize("name", recipes.names())
def test_every_number_has_a_source(name):
    recipe = recipes.load(name)
    given = (Path(recipes.__file__).parent / f"{name}.toml").read_text()
    assert recipe.description and recipe.source
    section = ""
    for line in given.partition("[source]")[0].splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line and not line.startswith(("description", "#")):
            key, value = (part.strip() for part in line.split("=", 1))
            dotted = f"{section}.{key}" if section else key
            if not value.startswith('"'):
                assert dotted in recipe.source or section in recipe.source, dotted


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_builds_its_model(name):
    config = recipes.load(name).config
    with torch.device("meta"):
        if config.model.kind == "classifier":
            model = Classifier(config.model.classifier(784, 10))
        else:
            size = VOCABULARIES.get(config.data.name, 2350)
            model = LanguageModel(config.model.language_model(size))
    assert sum(p.numel() for p in model.parameters()) > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_and_parameters(name):
    config = recipes.load(name).config
    sizes = config.model.language_model(VOCABULARIES[config.data.name])
    with torch.device("meta"):
        model = LanguageModel(sizes)
    parameters = sum(p.numel() for p in model.parameters())
    assert (sizes.hidden_sizes[-1], sizes.embedding_size, parameters) == PUBLISHED[name]


def test_the_list_is_complete():
    ours = {
        "mnist-mlp",
        "ptb-char",
        "wikitext2-24m-averaged",
        "pydoc-small",
        "pydoc-char-small",
        "digits-mlp",
        "lm",
        "lm-char",
    }
    assert set(recipes.names()) == {*PUBLISHED, *ours}


def test_the_papers_schedule():
    schedule = recipes.load("ptb-24m-retuned").config.schedule
    assert (schedule.intervals * schedule.steps_per_interval, schedule.drop_patience) == (
        250_000,
        90,
    )
    assert recipes.load("ptb-24m-2layer").config.averaging.latest == 800


def test_a_users_recipe_is_read_from_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    source = Path(recipes.__file__).parent / "digits-mlp.toml"
    path.write_text(source.read_text().replace("intervals = 40", "intervals = 3"))
    assert recipes.load(path).config.schedule.intervals == 3
    path.write_text("intervals = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        recipes.load(path)
    with pytest.raises(FileError, match="cannot read"):
        recipes.load(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="known are digits-mlp"):
        recipes.load("ptb-25m")
