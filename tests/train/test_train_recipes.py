from pathlib import Path

import pytest
import torch

from afterdrop import recipes
from afterdrop.errors import FileError
from afterdrop.models import Classifier, LanguageModel, count_parameters
from afterdrop.train import ConfigError
from afterdrop.train.config import differences

VOCABULARIES = {"ptb": 10_001, "ptb-char": 51, "wikitext-2": 33_279, "enwik8": 206}
PUBLISHED = {
    "ptb-10m": (1194, 268, 9_997_549),
    "ptb-24m": (723, 723, 23_979_620),
    "ptb-10m-retuned": (1186, 272, 9_974_361),
    "ptb-24m-retuned": (723, 723, 23_979_620),
    "ptb-24m-2layer": (951, 951, 23_998_976),
    "ptb-24m-2layer-d8": (951, 951, 23_998_976),
    "ptb-24m-mogrifier": (912, 912, 23_987_393),
    "ptb-24m-mogrifier-d8": (912, 912, 23_987_393),
    "ptb-24m-mogrifier-fast": (912, 912, 23_987_393),
    "wikitext2-35m": (1222, 431, 34_939_122),
    "wikitext2-35m-mogrifier": (1374, 274, 34_978_845),
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
        "ptb-24m-2layer-fast",
        "ptb-24m-mos2-fast",
        "ptb-24m-mos15-fast",
        "wikitext2-24m-averaged",
        "pydoc-small",
        "pydoc-char-small",
        "digits-mlp",
        "lm",
        "lm-char",
    }
    assert set(recipes.names()) == {*PUBLISHED, *ours}


@pytest.mark.parametrize(
    "components, wanted", [("mos2", (909, 909, 23_984_876)), ("mos15", (1088, 317, 23_968_049))]
)
def test_mixtures_have_the_budget_and_schedule_of_one_softmax(components, wanted):
    one = recipes.load("ptb-24m-2layer-fast").config
    config = recipes.load(f"ptb-24m-{components}-fast").config
    sizes = config.model.language_model(10_001)
    assert (sizes.hidden_sizes[-1], sizes.embedding_size, count_parameters(sizes)) == wanted
    changed = {line.partition(":")[0] for line in differences(one, config)}
    assert changed - {"model.embedding_ratio"} == {
        "model.projection_dropout",
        "model.softmax_components",
    }


def test_the_papers_schedule():
    schedule = recipes.load("ptb-24m-retuned").config.schedule
    assert (schedule.intervals * schedule.steps_per_interval, schedule.drop_patience) == (
        250_000,
        90,
    )
    assert recipes.load("ptb-24m-2layer").config.averaging.latest == 800


def test_eight_masks_in_the_loss_change_batches_and_schedule_only():
    one, eight = (recipes.load(f"ptb-24m-2layer{end}").config for end in ("", "-d8"))
    assert {line.split(":")[0] for line in differences(one, eight)} == {
        "averaging.latest",
        "averaging.patience",
        "objective.batch_size",
        "objective.samples",
        "schedule.intervals",
        "schedule.steps_per_interval",
    }
    schedule = eight.schedule
    assert schedule.intervals * schedule.steps_per_interval == 41_500


def test_the_variants_of_the_mogrifier_change_what_they_say():
    one = recipes.load("ptb-24m-mogrifier").config
    schedule = {"schedule.intervals", "schedule.steps_per_interval"}
    schedule |= {"averaging.latest", "averaging.patience"}
    changed = {
        variant: {
            line.split(":")[0]
            for line in differences(one, recipes.load(f"ptb-24m-mogrifier-{variant}").config)
        }
        for variant in ("fast", "d8")
    }
    assert changed["fast"] == schedule
    batches = {"objective.batch_size", "objective.samples"}
    assert changed["d8"] == schedule | batches | {"averaging.kind"}


def test_a_users_recipe_is_read_from_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    source = Path(recipes.__file__).parent / "digits-mlp.toml"
    path.write_text(source.read_text().replace("intervals = 40", "intervals = 3"))
    assert recipes.load(path).config.schedule.intervals == 3
    path.write_text("intervals = ")
    with pytest.raises(ConfigError, match="not a valid recipe"):
        recipes.load(path)
    with pytest.raises(FileError, match="cannot read"):
        recipes.load(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="known are digits-mlp"):
        recipes.load("ptb-25m")
