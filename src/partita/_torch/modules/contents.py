"""What a module holds beyond its documented iterators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = [
    "carry_hooks",
    "first_hook_inside",
    "forward_hooks",
    "has_backward_hooks",
    "has_forward_hooks",
    "has_global_hooks",
    "is_buffer",
    "is_guards_module",
    "is_parameter",
    "is_persistent",
    "is_persistent_buffer",
    "modules_in",
    "named_state",
    "named_tables",
    "own_hooks",
    "own_module",
    "owns_attribute",
    "parameters_in",
    "registries",
    "state_tables",
]

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_CARRIED = (
    "_forward_hooks_always_called",
    *(f"_{when}_hooks{how}" for when in ("forward", "forward_pre") for how in ("", "_with_kwargs")),
    *(f"_{when}_hooks" for when in ("backward", "backward_pre")),
)
_EXPORT_CHECK = ("torch.export._unlift", "_check_input_constraints_pre_hook")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def modules_in(module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """What ``module.named_modules()`` yields, in that order, with the names: in a third of the time, for what
    looks at all modules in each step.

    >>> list(modules_in(torch.nn.Sequential(torch.nn.ReLU())).values())
    ['', '0']
    """
    names: dict[torch.nn.Module, str] = {}
    ahead = [(module, "")]
    while ahead:
        part, path = ahead.pop()
        if part in names:
            continue
        names[part] = path
        children = part._modules
        if children:
            dot = f"{path}." if path else ""
            ahead += [(child, dot + name) for name, child in reversed(children.items()) if child is not None]
    return names


def parameters_in(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under each of their names; those of a module that stands in several places under one of
    them. See `modules_in`.
    """
    for part, path in modules_in(module).items():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, parameter


def named_state(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, under each of their names.

    >>> [name for name, _ in named_state(torch.nn.BatchNorm1d(2))]
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of ``module`` runs user code that its class does not show: a hook, or a ``forward`` set
    on the instance.
    """
    if has_global_hooks():
        return True
    return "forward" in vars(module) or any(True for _ in own_hooks(module))


def has_global_hooks() -> bool:
    """Whether a call of any module runs hooks that are registered for all."""
    everywhere = vars(torch.nn.modules.module)
    return any(everywhere[name] for name in _GLOBAL_HOOKS)


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a backward pass through ``module`` itself runs hooks that are registered on it."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def first_hook_inside(module: torch.nn.Module) -> str:
    """The name of a submodule that has a hook which its user has set, or an empty string. Hooks of torch's
    own, such as those of ``torch.nn.utils.weight_norm``, belong to what a module computes.
    """
    for child, path in modules_in(module).items():
        if not path:
            continue
        for hook in own_hooks(child):
            home, _ = _origin(hook)
            if (home or type(hook).__module__).partition(".")[0] != "torch":
                return path
    return ""


def own_hooks(module: torch.nn.Module) -> Iterator[Any]:
    """The forward and backward hooks of ``module`` alone."""
    for name in _HOOKS:
        yield from (getattr(module, name, None) or {}).values()


def forward_hooks(module: torch.nn.Module) -> Iterator[Any]:
    """The hooks that a call of ``module`` runs around its ``forward``: its own, and those of all modules."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        yield from getattr(module, name).values()
        yield from getattr(torch.nn.modules.module, f"_global{name}").values()


def carry_hooks(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give ``target`` the forward and backward hooks of ``source``, which are called with ``target`` as their
    module from now on.

    Of the hooks that ``ExportedProgram.module()`` sets, the check of its inputs comes along with what it
    needs; those that let modules be inputs do not: they can't be pickled.
    """
    for name in _CARRIED:
        hooks = vars(source).get(name)
        if not hooks:
            continue
        kept = {key: hook for key, hook in hooks.items() if not _is_of_export(hook, source)}
        vars(target)[name] = type(hooks)(kept)
        if any(_origin(hook) == _EXPORT_CHECK for hook in kept.values()):
            for attribute in ("_in_spec", "range_constraints", "validate_inputs"):
                vars(target)[attribute] = vars(source)[attribute]
            if hasattr(source, "_guards_fn"):
                vars(target)["_guards_fn"] = None  # tells the check that the graph looks at sizes itself
    if vars(target).get("_backward_hooks"):
        vars(target)["_is_full_backward_hook"] = source._is_full_backward_hook


def _origin(hook: object) -> tuple[str, str]:
    return getattr(hook, "__module__", "") or "", getattr(hook, "__name__", "")


def _is_of_export(hook: object, module: torch.nn.Module) -> bool:
    home, name = _origin(hook)
    if home != _EXPORT_CHECK[0]:
        return False
    return (
        name == "<lambda>" or not {"_in_spec", "range_constraints", "validate_inputs"} <= vars(module).keys()
    )


def is_parameter(module: torch.nn.Module, name: str) -> bool:
    """Whether ``module`` itself has a parameter called ``name``."""
    return name in module._parameters


def is_buffer(module: torch.nn.Module, name: str) -> bool:
    """Whether ``module`` itself has a buffer called ``name``."""
    return name in module._buffers


def own_module(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The child called ``name``, or None. A class attribute of that name is no child."""
    return module._modules.get(name)


def owns_attribute(module: torch.nn.Module, name: str) -> bool:
    """Whether ``module`` itself holds ``name``, and its class does not compute it (as a parametrised weight
    is computed).
    """
    holders = (module._parameters, module._buffers, module._modules, vars(module))
    return any(name in holder for holder in holders)


def registries(module: torch.nn.Module) -> Iterator[Mapping[str, object]]:
    """What ``module`` and the modules within it keep their parameters, buffers and children in, by name."""
    for each in module.modules():
        yield from (each._parameters, each._buffers, each._modules)


def is_persistent_buffer(module: torch.nn.Module, name: str) -> bool:
    """Whether the buffer called ``name`` of ``module`` itself belongs to its state dict."""
    return name in module._buffers and name not in module._non_persistent_buffers_set


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether the parameter or buffer of this name, of ``module`` or of one within it, belongs to its state
    dict.

    >>> is_persistent(torch.nn.Sequential(torch.nn.BatchNorm1d(2)), "0.running_mean")
    True
    """
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    return not is_buffer(owner, leaf) or is_persistent_buffer(owner, leaf)


def is_guards_module(module: torch.nn.Module) -> bool:
    """Whether ``module`` is the input check that ``ExportedProgram.module()`` puts at the head of its
    graph.
    """
    return type(module).__name__ == "GuardsFn" and type(module).__module__.startswith("torch.export")


state_tables = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
"""Where a module keeps its state and its children."""


def named_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``module`` itself keeps its parameters and its buffers in, by name."""
    return module._parameters, module._buffers
