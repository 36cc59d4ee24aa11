"""lm-evaluation-harness: the model "afterdrop" scores tasks with the chosen member.

    python -m afterdrop.integrations.lm_eval --model afterdrop --model_args pretrained=DIR ...

takes the arguments of `lm_eval`, whose command line does not load models of other packages itself.
In Python, `register()` comes before `lm_eval.simple_evaluate(model="afterdrop", ...)`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from afterdrop.errors import ExtraError
from afterdrop.selection import Choice

NAME = "afterdrop"


def register() -> None:
    """Makes the model "afterdrop" known to lm_eval.

    Raises:
        ExtraError: If lm_eval is missing.
    """
    try:
        from lm_eval.api.registry import model_registry, register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ExtraError.of(error, f"the model {NAME!r} needs lm_eval", "lm-eval") from error

    if NAME not in model_registry:
        register_model(NAME)(type("AfterdropLM", (ChosenMember, HFLM), {}))


class ChosenMember:
    """A language model of lm_eval whose logits are the log-probabilities of the chosen member.

    Mixed into lm_eval's model for transformers, `HFLM`.

    Args:
        pretrained: Folder of the model, or the model.
        choice: Folder or file of the choice; by default the folder of the adapter or of the model.
        num_samples: Mask samples; by default those that the choice was made for.
        any_weights: Whether to accept weights that are not those that were evaluated.
        **options: As for `HFLM`.
    """

    def __init__(
        self,
        pretrained: Any,
        choice: str | None = None,
        num_samples: int | None = None,
        any_weights: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(pretrained, **options)  # type: ignore[call-arg]  # of HFLM
        found = Choice.load(choice or options.get("peft") or pretrained)
        self.predictor: Any = found.predictor(
            self.model,  # type: ignore[attr-defined]  # of HFLM
            num_samples=num_samples,
            any_weights=any_weights,
        )

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Log-probabilities [B, time, V]; mask and labels are given for encoder-decoders."""
        if labels is None:
            return self.predictor(input_ids=inps)
        return self.predictor(input_ids=inps, attention_mask=attn_mask, labels=labels)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError(
            "the model 'afterdrop' scores given answers (loglikelihood, multiple_choice, "
            "perplexity); for tasks that generate text, use the model 'hf', which is deterministic"
        )


def main() -> None:
    """The command line of lm_eval, with the model "afterdrop"."""
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
