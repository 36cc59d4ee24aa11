"""Small randomly initialised models, each with dropout in other places."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp(features=5, hidden=7, classes=3, rate=0.5, dropout=nn.Dropout):
    return nn.Sequential(
        nn.Linear(features, hidden), nn.Tanh(), dropout(rate), nn.Linear(hidden, classes)
    )


class ConvNet(nn.Module):
    """BatchNorm, channel dropout and functional dropout that depends on self.training."""

    def __init__(self, classes=3):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
        self.drop, self.out = nn.Dropout2d(0.2), nn.Linear(6, classes)

    def forward(self, x):
        x = self.drop(F.relu(self.norm1(self.conv1(x))))
        x = F.relu(self.norm2(self.conv2(x))).mean((2, 3))
        return self.out(F.dropout(x, 0.3, training=self.training))


class Recurrent(nn.Module):
    """A stack with dropout between its layers, and one on its output."""

    def __init__(self, kind=nn.LSTM, out_rate=0.4, **options):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = kind(6, 8, num_layers=2, dropout=0.3, **options)
        width = options.get("proj_size") or 8
        self.drop = nn.Dropout(out_rate)
        self.out = nn.Linear(width * (2 if options.get("bidirectional") else 1), 11)

    def forward(self, tokens):
        return self.out(self.drop(self.rnn(self.embed(tokens))[0]))


class Packed(nn.Module):
    """Packs sequences of several lengths in its forward pass."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        final = self.rnn(packed)[1][0]
        return self.out(final[-1])


class LockedDropout(nn.Module):
    """One mask for all time steps (Gal and Ghahramani, 2016); time-major."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or not self.rate:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - self.rate)
        return x * mask / (1 - self.rate)


class DroppedEmbedding(nn.Module):
    """Drops whole words of the vocabulary."""

    def __init__(self, vocabulary, width, rate):
        super().__init__()
        self.weight, self.rate = nn.Parameter(torch.randn(vocabulary, width) * 0.3), rate

    def forward(self, tokens):
        weight = self.weight
        if self.training and self.rate:
            mask = weight.new_empty(weight.size(0), 1).bernoulli_(1 - self.rate)
            weight = weight * mask / (1 - self.rate)
        return F.embedding(tokens, weight)


class WeightDropped(nn.Module):
    """A recurrence whose hidden-to-hidden matrix is dropped once per sequence."""

    def __init__(self, inputs, hidden, rate):
        super().__init__()
        self.inputs = nn.Linear(inputs, 4 * hidden)
        self.raw, self.rate = nn.Parameter(torch.randn(4 * hidden, hidden) * 0.3), rate

    def forward(self, x):
        weight = self.raw
        if self.training and self.rate:
            mask = torch.empty_like(weight).bernoulli_(1 - self.rate)
            weight = weight * mask / (1 - self.rate)
        h = c = x.new_zeros(x.size(1), weight.size(1))
        out = []
        for step in self.inputs(x):
            i, f, g, o = (step + h @ weight.t()).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        return torch.stack(out)


class AWD(nn.Module):
    """Like AWD-LSTM, 8 sites: words, input, 3 recurrent matrices, 2 between layers, output."""

    RATES = (
        "words.rate",
        "lock_in.rate",
        "layers.0.rate",
        "layers.1.rate",
        "layers.2.rate",
        "between.0.rate",
        "between.1.rate",
        "lock_out.rate",
    )

    def __init__(self, vocabulary=13, width=6, hidden=8):
        super().__init__()
        self.words, self.lock_in = DroppedEmbedding(vocabulary, width, 0.1), LockedDropout(0.3)
        self.layers = nn.ModuleList(
            WeightDropped(width if i == 0 else hidden, hidden, 0.4) for i in range(3)
        )
        self.between = nn.ModuleList(LockedDropout(0.2) for _ in range(2))
        self.lock_out, self.out = LockedDropout(0.4), nn.Linear(hidden, vocabulary)

    def forward(self, tokens):
        x = self.lock_in(self.words(tokens))
        for layer, between in zip(self.layers, [*self.between, self.lock_out]):
            x = between(layer(x))
        return self.out(x)


class DropPath(nn.Module):
    """With the attributes and arithmetic of timm's."""

    def __init__(self, drop_prob=0.0, scale_by_keep=True):
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        if keep > 0.0 and self.scale_by_keep:
            mask.div_(keep)
        return x * mask


class StochasticDepth(nn.Module):
    """With the attributes and arithmetic of torchvision's."""

    def __init__(self, p, mode):
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        size = [x.shape[0]] + [1] * (x.ndim - 1) if self.mode == "row" else [1] * x.ndim
        mask = torch.empty(size, dtype=x.dtype).bernoulli_(1 - self.p)
        if self.p < 1.0:
            mask.div_(1 - self.p)
        return x * mask


class Residual(nn.Module):
    def __init__(self, path, width=6, classes=3):
        super().__init__()
        self.inner, self.path, self.out = nn.Linear(width, width), path, nn.Linear(width, classes)

    def forward(self, x):
        return self.out(x + self.path(self.inner(x).tanh()))
