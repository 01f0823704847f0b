"""From a stage without memory to one with: the ordinary way to a model that no single machine can hold.

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
from partita._torch.tensors.storage import has_memory
from partita.errors import CheckpointError
from partita.listing import listed
from partita.pipelining.interface.two_modes import graphs_in
from partita.pipelining.stages.move_graph import move_graph
from partita.pipelining.stages.state_of_stage import Stages, stage_modules

__all__ = ["InitBuffers", "Slot", "materialise", "parameters_on_meta", "tensor_slots"]

InitBuffers = Callable[[str], Tensor | None] | Mapping[str, Tensor] | nn.Module
"""Where tensors come from that no checkpoint has: a function of the name, a table, or a module."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Models built inside get their buffers for real and their parameters on the meta device.

    So the buffers that no checkpoint has (tables of a rotary embedding) can be had from the model's own code
    at the cost of the largest single parameter. Not for a model that is to be cut: see `materialise`. Holds
    for all threads.

    >>> with parameters_on_meta():
    ...     layer = nn.BatchNorm1d(4)
    >>> layer.weight.device.type, layer.running_var.device.type
    ('meta', 'cpu')
    """

    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def put(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if not has_memory(parameter):
            return None  # as it is: a tied parameter stays one object
        real, made = moved.get(id(parameter), (None, None))
        if real is None or real() is not parameter:
            made = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            moved[id(parameter)] = (weakref.ref(parameter), made)
        return made

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
        init_buffers: asked for each such tensor on the meta device by its name: a function (None: it does not
            know), a table, or a module that has them, such as one built under `parameters_on_meta`.

    Raises:
        CheckpointError: names the buffers that nobody brings, before anything is changed; or a shape or dtype
            that is not the buffer's.

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
    plans = [_tables(module, source) for module in modules]
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


def _source(given: InitBuffers | None) -> Callable[[str], Tensor | None]:
    if given is None:
        return lambda _: None
    if isinstance(given, nn.Module):
        return lambda name: _attribute(given, name)
    return given.get if isinstance(given, Mapping) else given


def _attribute(module: nn.Module, name: str) -> Tensor | None:
    value: object = module
    for atom in name.split("."):
        value = getattr(value, atom, None)
    return value if isinstance(value, Tensor) else None


def _tables(root: nn.Module, source: Callable[[str], Tensor | None]) -> tuple[dict[int, Tensor], list[str]]:
    """The contents of non-persistent buffers by the tensor that they replace, and the names that have
    none.
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
    made: dict[int, Tensor] = {}
    for module, name, _, tensor in list(tensor_slots(root)):
        identity = id(tensor)
        if identity not in made:
            made[identity] = _made(tensor, device, tables.get(identity))
        setattr(module, name, made[identity])
    del made


def _made(tensor: Tensor, device: torch.device, table: Tensor | None) -> Tensor:
    if table is None and tensor.device == device:
        return tensor
    if table is not None:
        value = table.detach().to(device, copy=True)
    elif has_memory(tensor):
        value = tensor.detach().to(device)
    else:
        value = torch.empty_like(tensor, device=device, requires_grad=False).fill_(_unset(tensor.dtype))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, tensor.requires_grad)
    return value


def _unset(dtype: torch.dtype) -> float | bool | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min
