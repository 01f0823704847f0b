"""Whether a node can be recorded into a CUDA graph; if not, why, where in the user's code, and what to do.

A recording fixes which kernels run, on which addresses, with which sizes. So a node can't be captured where
the host has to see a value, where a shape depends on data, where a tensor lies elsewhere, and where Python
does something that a replay would not do again (a print, unknown code).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.operators.capturable import CaptureFacts, capture_facts, operator_of
from partita._torch.operators.schemas import is_higher_order, is_operator
from partita.cudagraphs.facts.devices import DATA_DEPENDENT, ValueFacts, value_facts
from partita.cudagraphs.facts.source_line import source_line
from partita.errors import ArgumentError
from partita.graph.attributes import lookup
from partita.graph.effect_rules.node_effect import PURE, NodeEffect, nodes_in
from partita.graph.effects import Effects, metadata

__all__ = ["CaptureRules", "CaptureRulings", "Neutral", "Refusal"]

_HIGHER_ORDER = ("triton_kernel_wrapper", "auto_functionalized", "flex_attention", "out_dtype")
_SIZE_READERS = (
    "sym_size sym_stride sym_numel sym_storage_offset size stride numel storage_offset dim ndimension "
    "nelement dim_order is_contiguous element_size get_device is_floating_point is_complex is_same_size "
    "is_tensor _get_data_attr len __len__ getattr type"
)
_READS_SIZE = frozenset(_SIZE_READERS.split())
_NO_LAUNCH = frozenset(["getitem", "__getitem__", "view", "reshape", "detach"])


class Neutral(Enum):
    """The verdict on a node that handles no tensor: it may run in any piece."""

    NEUTRAL = "neutral"


@dataclass(frozen=True)
class CaptureRules:
    """What counts as capturable.

    Attributes:
        device_type: of the tensors that may be captured. Any but ``"cuda"`` is for tests.
        allow: names of custom operators (``"namespace::name"``) that may be captured: they do nothing on the
            host that has to happen at each run, and don't wait for the device.
    """

    device_type: str = "cuda"
    allow: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        wrong = [name for name in self.allow if "::" not in name]
        if wrong:
            raise ArgumentError(
                f"allow names operators as 'namespace::name', got {wrong[0]!r}: print(op._schema.name) "
                f"shows it"
            )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node is not captured.

    Attributes:
        node: its name.
        what: the operator, as text.
        reason: ends the sentence "it can't be captured: ...".
        way_out: what the user can do.
        source: ``file:line: code`` of the user's code, empty where it is not known.
    """

    node: str
    what: str
    reason: str
    way_out: str
    source: str = ""

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.node} ({self.what}){where}: {self.reason}; {self.way_out}"


class CaptureRulings:
    """Verdicts on the nodes of one graph."""

    def __init__(self, gm: GraphModule, effects: Effects, rules: CaptureRules) -> None:
        self.gm = gm
        self.effects = effects
        self.rules = rules
        self._values = [value_facts(gm, node) for node in effects.nodes]
        self._read: set[Node] = set()  # numbers that the host gets from the device, and what it makes of them

    def verdict(self, position: int) -> torch.device | Neutral | Refusal:
        """The device on which the node can be captured; or that it may run anywhere; or why it can't be.

        Ask for the nodes in order: what takes a number that was read from the device depends on what reads
        it.
        """
        node = self.effects.nodes[position]
        effect = self.effects.by_position.get(position, PURE)
        objection = self._objection(node, position, effect)
        numbers = [operand.name for operand in node.all_input_nodes if operand in self._read]
        if objection == _HOST_READ or (numbers and self._values[position].is_number):
            self._read.add(node)
        if objection is None and numbers:
            reason = f"it takes the number {numbers[0]!r}, which the host has read from the device"
            objection = (reason, _HOST_READ[1])
        verdict = self._device(node, position) if objection is None else objection
        if isinstance(verdict, tuple):
            return Refusal(node.name, _text(node), *verdict, source_line(node))
        return verdict

    def launches(self, position: int) -> int:
        """How many kernels the node starts, as far as one can say: 0 for a view, else 1."""
        node = self.effects.nodes[position]
        if self._values[position].is_number:
            return 0
        operator = operator_of(node)
        if operator is not None:
            return int(capture_facts(operator).launches)
        return int(_name(node) not in _NO_LAUNCH)

    def _objection(self, node: Node, position: int, effect: NodeEffect) -> tuple[str, str] | Neutral | None:
        """What speaks against capturing a node apart from its devices."""
        result = self._values[position]
        operands = [self._values[self.effects.index[operand]] for operand in node.all_input_nodes]
        has_examples = result.has_example and all(operand.has_example for operand in operands)
        # 1. What changes the state of all that follows, and what is no work for a device.
        if effect.barrier:
            return f"it changes global state ({effect.why})", "set it once, outside of the model"
        if has_examples and not effect.observable and _is_neutral(node, result, operands):
            return Neutral.NEUTRAL

        # 2. What the operator does, as its schema and tags have it.
        if is_higher_order(node.target):
            return self._objection_to_higher_order(node)
        operator = operator_of(node)
        facts = capture_facts(operator) if operator is not None else None
        objection = None if facts is None else self._objection_to_operator(node, facts)
        if objection is not None:
            return objection

        # 3. What the node does to other values, and what the host sees of it.
        if effect.unknown:
            return f"nothing is known of it ({effect.why})", _REGISTER
        if effect.host and not _asserts_on_device(facts):
            return f"the host can see what it does ({effect.why})", "move it out of the model, or drop it"
        if self._mask_index(node, facts):
            return _MASK
        if not has_examples:
            return _UNKNOWN_VALUE
        if effect.entangles:
            return f"it keeps tensors in a container ({effect.why})", "pass the tensors on as values"
        if node.op == "call_module":
            return self._objection_to_module(node)
        if result.is_number and not all(operand.empty for operand in operands):
            return _HOST_READ
        return None

    def _objection_to_higher_order(self, node: Node) -> tuple[str, str] | None:
        name = getattr(node.target, "__name__", str(node.target))
        if not name.startswith(_HIGHER_ORDER):
            return f"{name} runs Python or asks the host", _INLINE
        wrapped: Any = node.args[0] if name.startswith("auto_functionalized") else None
        return self._objection_to_operator(node, capture_facts(wrapped)) if is_operator(wrapped) else None

    def _objection_to_operator(self, node: Node, facts: CaptureFacts) -> tuple[str, str] | None:
        if facts.reads_host:
            return _HOST_READ
        if facts.dynamic_shape and not facts.indexes:
            return _DYNAMIC
        if facts.name == "partita::seed_site":
            return _SEEDS
        if not facts.is_built_in and facts.name not in self.rules.allow:
            return (
                f"it is the custom operator {facts.name}, and nobody says what it does on the host",
                f'pass allow=("{facts.name}",) if it neither waits for the device nor does anything on the '
                "host",
            )
        if facts.unsafe and facts.name not in self.rules.allow:
            return f"{facts.name} is tagged as unsafe for CUDA graphs", "use another operator"
        if facts.synchronises:
            return (
                f"{facts.name} waits for the device or reads from it",
                "move it to the end, or use another operator",
            )
        if facts.rebinds:
            return (
                f"{facts.name} changes a tensor's shape or memory in place",
                "use the version that returns a tensor",
            )
        if facts.dropout_at is not None and _argument(node, facts.dropout_at, "dropout_p") != 0:
            return _ATTENTION_DROPOUT
        if node.kwargs.get("generator") is not None:
            return "it draws from a generator of its own", "use the device's default generator"
        return None

    def _objection_to_module(self, node: Node) -> tuple[str, str] | None:
        module = lookup(self.gm, node)
        if isinstance(module, GraphModule):
            return "it calls a nested graph", _INLINE
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            return (
                "max_norm makes the embedding wait for the device",
                "renormalise the weight outside of the model",
            )
        return None

    def _mask_index(self, node: Node, facts: CaptureFacts | None) -> bool:
        """Whether a tensor is indexed by a mask: how many elements that picks, only the data says."""
        name = _name(node)
        indexed = facts is not None and facts.indexes
        if not indexed and name not in ("getitem", "setitem", "__getitem__", "__setitem__"):
            return False
        if indexed and node.op == "call_function":
            indices: Any = node.kwargs.get("indices", node.args[1] if len(node.args) > 1 else ())
        else:
            indices = node.args[1:2]
        return any(self._values[self.effects.index[index]].mask for index in nodes_in(indices))

    def _device(self, node: Node, position: int) -> torch.device | tuple[str, str]:
        """The one device of all tensors that the node touches; or a reason and a way out."""
        # 1. The tensors: operands, the result, and what a module holds.
        values = {operand.name: self._values[self.effects.index[operand]] for operand in node.all_input_nodes}
        values[node.name] = self._values[position]
        if node.op == "call_module":
            module = lookup(self.gm, node)
            tensors = (*module.parameters(), *module.buffers())
            values[str(node.target)] = ValueFacts(devices=frozenset(tensor.device for tensor in tensors))
        for name, value in values.items():
            if value.problem:
                way_out = _DYNAMIC[1] if value.problem == DATA_DEPENDENT else "use plain strided tensors"
                return f"{name!r} is {value.problem}", way_out

        # 2. None of them lies elsewhere.
        kind = self.rules.device_type
        for name, value in values.items():
            for device in value.devices:
                if device.type != kind:
                    what = "its result" if name == node.name else repr(name)
                    way_out = f"create it on the {kind} device, or move this before or after the model"
                    return f"{what} lies on {device}", way_out

        # 3. 0-d tensors on the CPU may be operands where they are taken as numbers.
        scalars = [name for name, value in values.items() if value.host_scalar]
        devices = frozenset[torch.device]().union(*(value.devices for value in values.values()))
        if kind == "cpu" and scalars:
            devices |= {torch.device("cpu")}
        elif node.name in scalars:
            way_out = f"keep it on the {kind} device, or move this before or after the model"
            return "its result lies on cpu", way_out
        elif scalars and not self._takes_scalars(node):
            way_out = f"create it on the {kind} device: torch.tensor(..., device=x.device)"
            return f"{scalars[-1]!r} is a tensor on cpu", way_out

        # 4. There is one device, and only one.
        if not devices:
            return "no tensor that it touches lies on a device", "nothing to capture here"
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            return f"it works on {names} at once", "copy between devices only at few places"
        return next(iter(devices))

    def _takes_scalars(self, node: Node) -> bool:
        """Whether the node takes 0-d CPU tensors as numbers: their value is fixed in a recording."""
        operator = operator_of(node)
        if operator is None:
            return node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"
        return capture_facts(operator).pointwise


def _is_neutral(node: Node, result: ValueFacts, operands: list[ValueFacts]) -> bool:
    """Whether a node works on numbers only, takes ``values[0]`` of a list or tuple, or reads a size."""
    if result.is_number and (all(operand.empty for operand in operands) or _name(node) in _READS_SIZE):
        return True
    source = node.args[0] if _name(node) == "getitem" and operands else None
    return isinstance(source, Node) and isinstance(metadata(source), (list, tuple, dict))


def _asserts_on_device(facts: CaptureFacts | None) -> bool:
    return facts is not None and facts.name.startswith(
        ("aten::_assert_async", "aten::_functional_assert_async")
    )


def _name(node: Node) -> str:
    if isinstance(node.target, str):
        return node.target
    operator = operator_of(node)
    if operator is not None:
        return capture_facts(operator).name.partition("::")[2]
    return str(getattr(node.target, "__name__", ""))


def _argument(node: Node, position: int, name: str) -> Any:
    """A number that an operator is called with; 0 where it is left out."""
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else 0)


def _text(node: Node) -> str:
    if node.op != "call_function":
        return f"{node.op} {node.target}"
    module = getattr(node.target, "__module__", "") or ""
    name = getattr(node.target, "__name__", str(node.target))
    return str(node.target) if module.startswith("torch._ops") else f"{module}.{name}".removeprefix("_")


_UNKNOWN_VALUE = (
    "its shapes and devices are not known",
    "give example inputs, so that they can be found out",
)
_HOST_READ = (
    "the host reads a value from the device",
    "keep it a tensor (torch.where instead of `if`), or read it after the model has run",
)
_DYNAMIC = (
    "the shape of its result depends on the data",
    "use a form of fixed size: torch.where, masked_fill, or nonzero_static",
)
_MASK = (
    "it indexes by a mask, and only the data says how many elements that picks",
    "use torch.where(mask, new, old) or masked_fill",
)
_REGISTER = "register it with torch.library.custom_op and pass its name in allow=(...)"
_INLINE = "write the branch with torch.where, or leave it between the regions"
_ATTENTION_DROPOUT = (
    "attention with dropout hands its backward pass the seed on the host, or on the device where it is "
    "recorded, and both would have to be recorded at once",
    "set its dropout_p to 0, or drop out with torch.nn.functional.dropout, outside of the attention",
)
_SEEDS = (
    "it seeds the generators for one microbatch, so that a mask does not depend on the cut",
    "nothing to do: the random call behind it is captured, in a region that starts there",
)
