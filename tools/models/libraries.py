"""Makers of models from other libraries than transformers: timm, diffusers, x-transformers, peft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tools.models.architecture import Architecture, Inputs, hf
from tools.models.torchvision_stub import prepare_torchvision
from torch import nn

__all__ = ["adapted", "diffusers", "of_timm", "x_transformers"]


def of_timm(name: str, model: str, inputs: Inputs, **settings: Any) -> Architecture:
    """Describe a model of ``timm`` by its registered name or its class, with settings of its own."""

    def make() -> tuple[nn.Module, Any]:
        prepare_torchvision()
        import timm

        options = {"num_classes": 10, **settings}
        if hasattr(timm.models, model) and model[0].isupper():
            return getattr(timm.models, model)(**options), None
        return timm.create_model(model, pretrained=False, **options), None

    return Architecture(f"timm {name}", "timm", model, make, inputs)


def diffusers(
    name: str, model: str, inputs: Inputs, shared: tuple[str, ...] = (), **settings: Any
) -> Architecture:
    """Describe a class of ``diffusers``."""

    def make() -> tuple[nn.Module, Any]:
        prepare_torchvision()
        import diffusers

        instance = getattr(diffusers, model)(**settings)
        return instance, instance.config

    return Architecture(name, "diffusers", model, make, inputs, shared)


def x_transformers(name: str, build: Callable[[Any], nn.Module], inputs: Inputs) -> Architecture:
    """Describe a model of ``x_transformers``, built from that module."""

    def make() -> tuple[nn.Module, Any]:
        prepare_torchvision()
        import x_transformers

        return build(x_transformers), None

    return Architecture(f"x-transformers {name}", "x-transformers", "TransformerWrapper", make, inputs)


def adapted(
    name: str,
    model: str,
    config: str,
    inputs: Inputs,
    settings: Mapping[str, Any],
    adapter: str,
    /,
    **how: Any,
) -> Architecture:
    """Describe a class of ``transformers`` with an adapter of ``peft``."""
    base = hf(name, "peft", model, config, inputs, settings)

    def make() -> tuple[nn.Module, Any]:
        prepare_torchvision()
        import peft

        base_model, configuration = base.make()
        return peft.get_peft_model(base_model, getattr(peft, adapter)(**how)), configuration

    return Architecture(f"peft {name}", "peft", model, make, inputs)
