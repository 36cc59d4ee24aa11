"""Hand-written models with the dropout, the inputs and the outputs of other packages' models."""

import torch
import torch.nn.functional as F
from torch import nn

from oracles.zoo import DropPath


class VisionBlock(nn.Module):
    """A block of timm's vision transformer: fused attention, and drop paths around both halves."""

    def __init__(self, width: int, rate: float, path: float) -> None:
        super().__init__()
        self.rate, self.norm = rate, nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.proj_drop, self.drop_path1 = nn.Dropout(rate), DropPath(path)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(rate))
        self.down, self.drop_path2 = nn.Linear(2 * width, width), DropPath(path)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped)
        x = x + self.drop_path1(self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2))))
        return x + self.drop_path2(self.down(self.mlp(x)))


class VisionTransformer(nn.Module):
    """Patches, a class token, blocks whose drop path grows with depth, and a dropped head."""

    def __init__(self, classes: int = 3, width: int = 8, rate: float = 0.2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.Sequential(*(VisionBlock(width, rate, path) for path in (0.0, 0.3)))
        self.head_drop, self.head = nn.Dropout(rate), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.head_drop(self.blocks(x)[:, 0]))


class Segmenter(nn.Module):
    """As torchvision's FCN: a dictionary of upsampled logits, an auxiliary head among them."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.3), nn.Conv2d(6, classes, 1))
        self.aux_classifier = nn.Sequential(nn.Dropout(0.3), nn.Conv2d(6, classes, 1))

    def forward(self, x):
        h, size = self.body(x), x.shape[-2:]
        heads = {"out": self.classifier, "aux": self.aux_classifier}
        return {name: F.interpolate(head(h), size, mode="bilinear") for name, head in heads.items()}


class GraphAttention(nn.Module):
    """As PyG's GAT: functional dropout on the features of nodes and on the weights of edges."""

    def __init__(self, features: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.first, self.score = nn.Linear(features, 8), nn.Linear(16, 1)
        self.out = nn.Linear(8, classes)

    def forward(self, x, edge_index):
        h = self.first(F.dropout(x, 0.3, training=self.training))
        source, target = edge_index
        weight = self.score(torch.cat([h[source], h[target]], -1)).sigmoid()
        weight = F.dropout(weight, 0.5, training=self.training)
        return self.out((h + torch.zeros_like(h).index_add(0, target, weight * h[source])).relu())


class SkipNet(nn.Module):
    """As MONAI's UNet: norm, dropout and activation after each convolution, and a skip."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()

        def unit(convolution):
            norm = nn.InstanceNorm2d(convolution.out_channels)
            return nn.Sequential(convolution, norm, nn.Dropout(0.2), nn.PReLU())

        self.down = unit(nn.Conv2d(1, 4, 3, 2, 1))
        self.up = unit(nn.ConvTranspose2d(4, 4, 2, 2))
        self.out = nn.Conv2d(5, classes, 1)

    def forward(self, x):
        return self.out(torch.cat([x, self.up(self.down(x))], 1))


class ArgumentMode(nn.Module):
    """As a Keras model: the mode is an argument, and calls bypass the hooks of torch."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, classes)

    def call(self, x, training=False):
        if training:
            x = F.dropout(x, 0.2, training=True)
        h = self.inner(x).relu()
        return self.out(F.dropout(h, 0.5, training=True) if training else h)

    forward = __call__ = call


class ModeAdapter(nn.Module):
    """The wrapper of the recipe: passes the mode on."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x, training=self.training)
