"""Kernels are opt-in: a configuration field that their table does not list is refused."""

from dataclasses import dataclass, fields

import pytest

pytest.importorskip("triton", reason="kernels need Triton, which is not installed")

from afterdrop.models import LanguageModelConfig
from afterdrop.models.fused import SUPPORTED, why_not_fused
from afterdrop.models.kernel_support import why_unsupported


def test_every_field_of_a_language_model_is_listed():
    assert list(SUPPORTED) == [field.name for field in fields(LanguageModelConfig)]


def test_a_new_field_is_refused_until_it_is_listed():
    @dataclass(frozen=True)
    class Extended(LanguageModelConfig):
        peephole: bool = False

    config = Extended(9, (4, 4))
    reason = "peephole is a setting that the kernels do not know"
    assert why_not_fused(config) == reason
    assert why_not_fused(LanguageModelConfig(9, (4, 4))) is None
    assert why_unsupported(config, {**SUPPORTED, "peephole": (False,)}) is None
    assert why_unsupported(config, {**SUPPORTED, "peephole": (True,)}) == "peephole is False"


def test_a_new_value_of_a_listed_field_is_refused():
    config = LanguageModelConfig(9, (4, 4))
    object.__setattr__(config, "state_sharing", "document")  # the config itself would refuse it
    assert why_not_fused(config) == "state_sharing is 'document'"
