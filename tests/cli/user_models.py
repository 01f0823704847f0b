"""A file with models for the tests of commands, as text that a user would write."""

from __future__ import annotations

MODELS = """
import torch


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.b = torch.nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n.add_(1)
        return self.b(self.a(x) * self.n)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, mask, *, scale=1.0):
        x = y = self.embed(ids)
        for layer in self.layers:
            x = torch.nn.functional.dropout(layer(x).relu(), 0.1, self.training)
        return {"logits": self.head(self.norm(x) + y) * scale * mask[..., None], "hidden": x}


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.b = torch.nn.Linear(4, 4)

    def forward(self, x, table):
        return self.b(self.a(x).relu()) + table.sum(0)


class Broken(Table):
    def forward(self, x):
        raise ValueError("not today")


def counted():
    print("made")
    torch.manual_seed(0)
    return Counted(), (torch.randn(2, 4),)


def tied():
    torch.manual_seed(0)
    return Tied(), (torch.randint(50, (2, 6)),), {"mask": torch.ones(2, 6), "scale": 2.0}


def frozen():
    model, args = counted()
    return model.requires_grad_(False), args


def table():
    return Table(), (torch.randn(2, 4), torch.randn(3, 4))


def broken():
    return Broken(), (torch.randn(2, 4),)


def bare():
    with torch.device("meta"):
        return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
"""
