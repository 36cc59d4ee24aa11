"""A multilayer perceptron with dropout, for small images such as MNIST.

Legend: B images, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from afterdrop.models.checks import ModelError, check_rate, check_size, check_sizes


@dataclass(frozen=True)
class ClassifierConfig:
    """An MLP: dropped input, then layers of Linear, ReLU and Dropout, then Linear.

    Attributes:
        input_size: Number of pixels of an image, all channels together.
        classes: V.
        hidden_sizes: Units of each hidden layer; () is a linear classifier.
        input_dropout: Rate on the pixels.
        hidden_dropout: Rate after each hidden layer.

    Example:
        >>> ClassifierConfig(784, 10, (1024, 1024), input_dropout=0.2).hidden_dropout
        0.5
    """

    input_size: int
    classes: int
    hidden_sizes: tuple[int, ...] = (1024, 1024)
    input_dropout: float = 0.2
    hidden_dropout: float = 0.5

    def __post_init__(self) -> None:
        check_size("input_size", self.input_size)
        check_size("classes", self.classes)
        check_sizes("hidden_sizes", self.hidden_sizes, least=0)
        # JSON and TOML give lists; a tuple keeps the configuration hashable.
        object.__setattr__(self, "hidden_sizes", tuple(self.hidden_sizes))
        check_rate("input_dropout", self.input_dropout)
        check_rate("hidden_dropout", self.hidden_dropout)


class Classifier(nn.Module):
    """An MLP classifier: images [B, ...] to logits [B, V].

    Args:
        config: The sizes and rates.

    Example:
        >>> import torch
        >>> model = Classifier(ClassifierConfig(input_size=16, classes=3, hidden_sizes=(8,)))
        >>> model(torch.zeros(2, 1, 4, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.input_dropout = nn.Dropout(config.input_dropout)
        sizes = (config.input_size, *config.hidden_sizes)
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.Linear(size_in, size), nn.ReLU(), nn.Dropout(config.hidden_dropout))
            for size_in, size in zip(sizes, config.hidden_sizes)
        )
        self.output = nn.Linear(sizes[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, V]."""
        features = images.flatten(1) if images.dim() > 1 else images
        if features.dim() != 2 or features.shape[1] != self.config.input_size:
            raise ModelError(
                f"images has shape {tuple(images.shape)}; the model reads [B, ...] with "
                f"{self.config.input_size} pixels per image. Reshape, or set input_size."
            )
        if not features.is_floating_point():
            raise ModelError(
                f"images is {images.dtype}; the model reads floating-point pixels. "
                "Convert and scale them; for bytes, images.float() / 255."
            )
        features = self.input_dropout(features)
        for layer in self.hidden:
            features = layer(features)
        return self.output(features)
