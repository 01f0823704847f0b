"""Memory for a stage that was cut from a model on the meta device, which no single machine need hold.

::

    with torch.device("meta"):  model = Model()           no memory at all
    pipe = pipeline(model, (tokens.to("meta"),), ...)     the cut needs shapes only
    stage = pipe.build_stage(rank)
    materialise(stage, "cuda", init_buffers=...)          memory for this stage's own tensors
    load_safetensors(stage, "model.safetensors")          and what belongs into it
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from partita._torch.modules.contents import is_persistent_buffer
from partita._torch.tensors.parameters import parameter_like
from partita._torch.tensors.storage import has_memory
from partita.errors import CheckpointError
from partita.listing import listed
from partita.pipelining.interface.two_modes import graphs_in
from partita.pipelining.stages.placing.move_graph import move_graph
from partita.pipelining.stages.placing.state_of_stage import Stages, stage_modules

__all__ = ["InitBuffers", "Slot", "materialise", "parameters_on_meta", "tensor_slots"]

InitBuffers = Callable[[str], Tensor | None] | Mapping[str, Tensor] | nn.Module
"""Tensors that no checkpoint has: a function of the name, a mapping, or a module that has them."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build models whose buffers have memory and whose parameters are on the meta device.

    This gives the buffers that no checkpoint has (tables of a rotary embedding), computed by the model's own
    code, for no more memory than the largest single parameter takes. Not for a model that is to be cut: see
    `materialise`. Holds for all threads.

    >>> with parameters_on_meta():
    ...     layer = nn.BatchNorm1d(4)
    >>> layer.weight.device.type, layer.running_var.device.type
    ('meta', 'cpu')
    """

    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def put(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if not has_memory(parameter):
            return None  # unchanged, so that a tied parameter stays one object
        real, on_meta = moved.get(id(parameter), (None, None))
        if real is None or real() is not parameter:
            on_meta = parameter_like(parameter, parameter.detach().to("meta"))
            moved[id(parameter)] = (weakref.ref(parameter), on_meta)
        return on_meta

    handle = register_module_parameter_registration_hook(put)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def materialise(
    stage: Stages, device: torch.device | str = "cpu", *, init_buffers: InitBuffers | None = None
) -> None:
    """Give a stage that was cut from a model on the meta device memory of its own, in place.

    Parameters and persistent buffers get memory for `load_checkpoint` or `load_safetensors` to fill; until
    then floating-point values are NaN and integers the smallest there is, so that what is never filled shows.
    Non-persistent buffers, and tensors that are plain attributes or written out in ``forward``, are in no
    checkpoint: ``init_buffers`` brings them. Tied tensors stay tied, and operations that make tensors on the
    meta device make them on ``device``. What has memory elsewhere is moved there.

    Make optimizers afterwards: parameters become new objects.

    Args:
        stage: one or several, not wrapped yet.
        device: where to.
        init_buffers: gives each such tensor by its name: a function (which may return None), a mapping, or a
            module that has them, such as one built under `parameters_on_meta`.

    Raises:
        CheckpointError: ``init_buffers`` lacks a tensor, or has one of another shape or dtype. Nothing has
            been changed then.

    >>> with torch.device("meta"):
    ...     layer = nn.Linear(2, 2)
    >>> materialise(layer)
    >>> layer.bias
    Parameter containing:
    tensor([nan, nan], requires_grad=True)
    """
    device = torch.device(device)
    source = _source(init_buffers)
    modules = stage_modules(stage)
    plans = [_buffer_values(module, source) for module in modules]
    left = [name for _, missing in plans for name in missing]
    if left:
        raise CheckpointError(
            f"nothing brings the non-persistent buffers or constants {listed(left)}, and no checkpoint has "
            "them: pass init_buffers, a function from a name to the tensor or a module built under "
            "parameters_on_meta()"
        )
    for module, (tables, _) in zip(modules, plans, strict=True):
        _fill(module, device, tables)
        for child in graphs_in(module):
            move_graph(child, torch.device("meta"), device)


Slot = tuple[nn.Module, str, str, Tensor]
"""A module, the name that it has for a tensor, the name from the root, and the tensor."""


def tensor_slots(root: nn.Module) -> Iterator[Slot]:
    """Every place in a module that holds a tensor: parameters, buffers, and plain attributes."""
    for path, module in root.named_modules(remove_duplicate=False):
        own: list[tuple[str, Tensor]] = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        own += [*module.named_buffers(recurse=False, remove_duplicate=False)]
        own += [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
        for name, tensor in own:
            yield module, name, f"{path}.{name}" if path else name, tensor


def _source(init_buffers: InitBuffers | None) -> Callable[[str], Tensor | None]:
    if init_buffers is None:
        return lambda _: None
    if isinstance(init_buffers, nn.Module):
        return lambda name: _attribute(init_buffers, name)
    return init_buffers.get if isinstance(init_buffers, Mapping) else init_buffers


def _attribute(module: nn.Module, name: str) -> Tensor | None:
    value: object = module
    for atom in name.split("."):
        value = getattr(value, atom, None)
    return value if isinstance(value, Tensor) else None


def _buffer_values(
    root: nn.Module, source: Callable[[str], Tensor | None]
) -> tuple[dict[int, Tensor], list[str]]:
    """The values of non-persistent buffers, by the id of the tensor that they replace; and the names that
    have none.
    """
    slots = [slot for slot in tensor_slots(root) if not has_memory(slot[3])]
    loadable = {
        id(tensor)
        for module, name, _, tensor in slots
        if isinstance(tensor, nn.Parameter) or is_persistent_buffer(module, name)
    }
    tables: dict[int, Tensor] = {}
    missing: dict[int, str] = {}
    for _, _, name, tensor in slots:
        if id(tensor) in loadable or id(tensor) in tables:
            continue
        table = source(name)
        if table is None or not has_memory(table):
            missing.setdefault(id(tensor), name)
            continue
        if table.shape != tensor.shape or table.dtype != tensor.dtype:
            raise CheckpointError(
                f"init_buffers brings {table.dtype} of shape {list(table.shape)} for {name!r}, which is "
                f"{tensor.dtype} of shape {list(tensor.shape)}: bring what the model computes"
            )
        tables[id(tensor)] = table
    return tables, [name for identity, name in missing.items() if identity not in tables]


def _fill(root: nn.Module, device: torch.device, tables: Mapping[int, Tensor]) -> None:
    by_identity: dict[int, Tensor] = {}
    for module, name, _, tensor in list(tensor_slots(root)):
        identity = id(tensor)
        if identity not in by_identity:
            by_identity[identity] = _with_memory(tensor, device, tables.get(identity))
        setattr(module, name, by_identity[identity])


def _with_memory(tensor: Tensor, device: torch.device, table: Tensor | None) -> Tensor:
    if table is None and tensor.device == device:
        return tensor
    if table is not None:
        value = table.detach().to(device, copy=True)
    elif has_memory(tensor):
        value = tensor.detach().to(device)
    else:
        value = torch.empty_like(tensor, device=device, requires_grad=False).fill_(_unset(tensor.dtype))
    if isinstance(tensor, nn.Parameter):
        return parameter_like(tensor, value)
    return value


def _unset(dtype: torch.dtype) -> float | bool | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min
