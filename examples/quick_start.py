"""
Quick start
===========

The three calls of afterdrop on made-up data: evaluate, select, predict. No extras are needed.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import afterdrop as ad

torch.manual_seed(0)
centres = torch.randn(4, 10)


def draw(count: int) -> tuple[Tensor, Tensor]:
    """Examples of four classes that overlap."""
    y = torch.randint(4, (count,))
    return centres[y] + 1.5 * torch.randn(count, 10), y


def main() -> None:
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = draw(100)
    for _ in range(300):
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        optimiser.step()

    scores = ad.evaluate(model, [draw(250) for _ in range(4)], num_samples=32)
    choice = ad.select(scores)
    predict = choice.predictor(model)

    x, y = draw(2000)
    before, after = cross_entropy(model.eval()(x), y), cross_entropy(predict(x), y)
    print(choice.headline())
    print(f"Cross entropy on new data: {before:.3f} for model.eval(), {after:.3f} for the choice")


if __name__ == "__main__":
    main()
