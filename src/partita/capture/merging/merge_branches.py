"""Merging the traces of the two branches of a condition into one graph.

The nodes of the two are aligned, into pairs and nodes without a counterpart. A node that only one branch has
is computed only where the condition has that branch's truth (`OnlyIf`), and where a pair has different
operands, one of them is chosen when the graph runs (`choose`); see `partita.graph.effect_rules.conditions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from partita._torch.export.signature import all_arguments, all_keywords
from partita._torch.operators.schemas import is_in_place
from partita._torch.tensors.storage import same_bits, storage_key
from partita.capture.open_sizes.sizes import Sizes
from partita.capture.tracing.module_paths import module_calls
from partita.errors import CaptureError
from partita.graph.attributes import attribute, lookup
from partita.graph.effect_rules.conditions import OnlyIf, choose, require_condition
from partita.graph.effect_rules.node_effect import PURE
from partita.graph.effects import Effects, analyse, metadata
from partita.graph.storages import example_memory
from partita.graph.structure import structural_hash

__all__ = ["Branch", "merge_branches"]

_CONSTANT_OF_BRANCH = "of_a_branch_"
"""The prefix of the names of constants that only one branch has."""


@dataclass(frozen=True)
class Branch:
    """A model that was traced with one answer to the condition.

    Attributes:
        condition: the node that reads the condition.
        truth: the answer.
    """

    module: GraphModule
    sizes: Sizes
    condition: Node
    truth: bool


def merge_branches(mine: Branch, theirs: Branch) -> Sizes:
    """Add ``theirs`` to the graph of ``mine``, in place; return the sizes of the merged graph.

    Raises:
        CaptureError: a node that only one of them has does more than compute or write a value, or the two
            return different kinds of values. The graph of ``mine`` is unchanged then.
    """
    # Express both in the same open sizes.
    sizes, other_sizes = mine.sizes, theirs.sizes
    if (common := sizes.in_terms_of(other_sizes)) is not None:
        mine = replace(mine, sizes=common)
    elif (common := other_sizes.in_terms_of(sizes)) is not None:
        theirs = replace(theirs, sizes=common)
    else:
        raise CaptureError("the two ways leave other sizes open")
    # Align the nodes, check that they can be merged, and merge.
    kinds = _Kinds()
    pairs = list(_aligned(mine, theirs, kinds))
    effects = (analyse(mine.module), analyse(theirs.module))
    _check_results(*pairs[-1])
    for side, analysed in enumerate(effects):
        alone = [node for pair in pairs if None in pair and (node := pair[side]) is not None]
        for node in alone:
            _check_alone(analysed, node)
    constants = {
        node: kinds.of(side.module, side.sizes, node)
        for side, analysed in zip((mine, theirs), effects, strict=True)
        for node in _unwritten_constants(side.module, analysed)
    }
    return _Merge(mine, theirs, constants).run(pairs)


def _aligned(mine: Branch, theirs: Branch, kinds: _Kinds) -> Iterator[tuple[Node | None, Node | None]]:
    """The nodes of both graphs, in an order that is that of each; None where one has no such node.

    The two nodes that read the condition are a pair.
    """
    sides = [(side, list(side.module.graph.nodes)) for side in (mine, theirs)]
    cuts = [nodes.index(side.condition) for side, nodes in sides]
    # Before the condition nodes are equal if what they compute is, behind it if they are of one kind.
    parts = ((kinds.expression, [slice(cut) for cut in cuts]), (kinds.of, [slice(cut, None) for cut in cuts]))
    for key, (mine_part, theirs_part) in parts:
        nodes, other_nodes = sides[0][1][mine_part], sides[1][1][theirs_part]
        keys = [key(mine.module, mine.sizes, node) for node in nodes]
        other_keys = [key(theirs.module, theirs.sizes, node) for node in other_nodes]
        matcher = SequenceMatcher(None, keys, other_keys, False)
        for tag, start, end, other_start, other_end in matcher.get_opcodes():
            if tag == "equal":
                yield from zip(nodes[start:end], other_nodes[other_start:other_end], strict=True)
                continue
            yield from ((node, None) for node in nodes[start:end])
            yield from ((None, node) for node in other_nodes[other_start:other_end])


class _Kinds:
    """Keys that are equal for two nodes that can be merged into one."""

    def __init__(self) -> None:
        self._constants: list[Tensor] = []
        self._expressions: dict[Any, int] = {}
        self._of_node: dict[Node, str] = {}

    def expression(self, module: GraphModule, sizes: Sizes, node: Node) -> int:
        """Return a key that is equal for nodes of one kind with equal operands; call it in graph order."""
        operands = repr(map_arg((node.args, node.kwargs), self._of_node.__getitem__))
        key = (self.of(module, sizes, node), operands)
        number = self._expressions.setdefault(key, len(self._expressions))
        # a size is the same whichever tensor it was read from
        size = sizes.numbers.get(node.name)
        self._of_node[node] = f"expression {number}" if size is None else f"size {size}"
        return number

    def of(self, module: GraphModule, sizes: Sizes, node: Node) -> tuple[Any, ...]:
        """Return a key that is equal for nodes of one kind, whatever their operands."""
        if node.op == "get_attr":
            item = attribute(module, node)
            if isinstance(item.value, GraphModule):  # such as what torch.cond runs: its name says nothing
                inside = item.value.graph.find_nodes(op="get_attr")
                holds = [self.of(item.value, sizes, one) for one in inside]
                return (node.op, structural_hash(item.value.graph, item.value), *holds)
            if not isinstance(item.value, Tensor):
                return (node.op, node.target)
            return (node.op, self._number(item.value) if item.kind == "constant" else id(item.value))
        target = node.target if node.op == "call_function" else str(node.target)
        opened = sizes.shapes.get(node.name), sizes.numbers.get(node.name)
        shape = (
            (len(all_arguments(node.target, node.args)), *sorted(all_keywords(node.target, node.kwargs)))
            if node.op != "output"
            else ()
        )
        return (node.op, target, tuple(module_calls(node)), _facts(node), opened, shape)

    def _number(self, constant: Tensor) -> int:
        """A number that is the same for constants of equal value: each trace creates its own."""
        for number, earlier in enumerate(self._constants):
            if constant is earlier or same_bits(constant, earlier):
                return number
        self._constants.append(constant)
        return len(self._constants) - 1


def _unwritten_constants(module: GraphModule, effects: Effects) -> Iterator[Node]:
    """The nodes that get a constant which nothing in the graph writes to."""
    written = effects.written
    for node in module.graph.nodes:
        if node.op == "get_attr" and written.isdisjoint(effects.storages_of([node])):
            yield node


def _check_alone(effects: Effects, node: Node) -> None:
    """Refuse a node that only one way has if it does more than compute a value or write to memory."""
    if node.op == "get_attr" or node.target is require_condition:
        return  # a check does nothing where its condition was not read
    position = effects.index[node]
    effect = effects.by_position.get(position, PURE)
    observable = replace(effect, writes=()).observable
    if node.op != "call_function" or position in effects.regions or observable:
        raise CaptureError(
            f"only one of the two ways has {node.name!r}, which does more than to compute or write a value"
        )


def _check_results(node: Node | None, twin: Node | None) -> None:
    """Refuse two ways that return something else than tensors of the same kind in the same places."""
    if node is None or twin is None:
        raise CaptureError("the two ways return something else")
    for left, right in zip_longest(*(_leaves(side.args) for side in (node, twin))):
        tensors = isinstance(left, Node) and isinstance(right, Node)
        if _facts(left) != _facts(right) if tensors else (type(left), left) != (type(right), right):
            raise CaptureError("the two ways return something else")


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _before_writes(node: Node) -> Node:
    """The node of the tensor that operations in place have handed on, one to the next, as this node's."""
    while True:
        target, operands = node.target, node.args
        while isinstance(target, OnlyIf):
            target, operands = target.target, operands[1:]
        if not is_in_place(target) or not isinstance(operands[0], Node):
            return node
        node = operands[0]


def _facts(node: Node) -> tuple[Any, ...]:
    value = metadata(node)
    return tuple(getattr(value, fact, None) for fact in ("shape", "dtype", "requires_grad"))


class _Merge:
    """The working state of one `merge_branches` call.

    Attributes:
        asked: whether the condition has been read by the nodes that are merged so far.
        image: for each node of the other graph, the node here that stands for it.
        renamed: the new names of the other graph's nodes that were copied.
        choices: the nodes that choose between two values, by these values.
        alike: for each chosen tensor, the name of one that it is chosen from.
        memory: for each storage of an example value of the other graph, one here that stands for it.
        constants: keys that are equal for constants of both graphs that have the same value throughout.
    """

    def __init__(self, mine: Branch, theirs: Branch, constants: Mapping[Node, Any]) -> None:
        self.module = mine.module
        self.graph = mine.module.graph
        self.sizes = mine.sizes
        self.condition = mine.condition
        self.truth = mine.truth
        self.other = theirs
        self.asked = False
        self.image: dict[Node, Node] = {}
        self.renamed: dict[str, str] = {}
        self.choices: dict[tuple[Any, ...], Node] = {}
        self.alike: dict[str, str] = {}
        self.memory: dict[int, Tensor] = {}
        self.constants = constants

    def run(self, pairs: list[tuple[Node | None, Node | None]]) -> Sizes:
        # Merge the nodes in order.
        sizes, other_sizes = self.sizes, self.other.sizes
        self._check_alike_before(pairs)
        before: Node | None = None
        for node, twin in pairs:
            if node is None:
                assert twin is not None
                before = self._copied(twin, before)
                continue
            before = node
            if twin is not None:
                self.image[twin] = node
                self._note_memory(node, twin)
                self._merge_operands(node, twin)
            elif _is_guarded(node, sizes):
                self._guard(node, self.truth)
            self.asked |= node is self.condition
        self.graph.lint()
        self.module.recompile()
        # The open shapes, numbers and conditions of both.
        shapes = {**self._here(other_sizes.shapes), **sizes.shapes}
        shapes |= {name: shapes[one] for name, one in self.alike.items() if one in shapes}
        return replace(
            sizes,
            shapes=shapes,
            numbers={**self._here(other_sizes.numbers), **sizes.numbers},
            conditions=tuple(dict.fromkeys((*sizes.conditions, *other_sizes.conditions))),
            fixed=sizes.fixed or other_sizes.fixed,
        )

    def _check_alike_before(self, pairs: list[tuple[Node | None, Node | None]]) -> None:
        """Refuse two ways that differ before the condition is read."""
        for node, twin in pairs:
            if twin is not None:
                self.image[twin] = node if node is not None else twin
            if node is not None and twin is not None:
                for left, right in zip(*_padded(node, twin), strict=True):
                    self._merged(node, left, right)
            if node is self.condition:
                return

    def _here(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {self.renamed[name]: fact for name, fact in facts.items() if name in self.renamed}

    def _guard(self, node: Node, truth: bool) -> None:
        """Compute a node only where the condition has this truth; before the condition is read, always."""
        if not self.asked:
            return
        node.args = (self.condition, *node.args)
        node.target = OnlyIf(node.target, truth)  # type: ignore[arg-type]

    def _copied(self, twin: Node, before: Node | None) -> Node:
        """Copy a node that only the other graph has, behind ``before``."""
        if before is None:
            before = next(iter(self.graph.nodes))
            assert twin.op == "get_attr"
        with self.graph.inserting_after(before):
            copied = self.graph.node_copy(twin, self.image.__getitem__)
        if twin.op == "get_attr":
            copied.target = self._copied_attribute(twin)
        elif _is_guarded(twin, self.other.sizes):
            self._guard(copied, not self.truth)
        if isinstance(example := example_memory(twin), Tensor):
            copied.meta["memory"] = self.memory.setdefault(storage_key(example), example)
        self.image[twin] = copied
        self.renamed[twin.name] = copied.name
        return copied

    def _note_memory(self, node: Node, twin: Node) -> None:
        """Note that the two have the same memory, in which nodes that are copied may lie, too."""
        here, there = example_memory(node), example_memory(twin)
        if isinstance(here, Tensor) and isinstance(there, Tensor):
            self.memory.setdefault(storage_key(there), here)

    def _copied_attribute(self, twin: Node) -> str:
        """Add a constant or nested graph of the other graph to this module; return its name here."""
        number = 0
        while hasattr(self.module, name := f"{_CONSTANT_OF_BRANCH}{number}"):
            number += 1
        setattr(self.module, name, lookup(self.other.module, twin))
        return name

    def _merge_operands(self, node: Node, twin: Node) -> None:
        """Let a node that both graphs have use the operands of the branch that is taken."""
        (args, kwargs), (other_args, other_kwargs) = _padded(node, twin)
        node.args = self._merged(node, args, other_args)
        node.kwargs = self._merged(node, kwargs, other_kwargs)

    def _merged(self, node: Node, left: Any, right: Any) -> Any:
        if isinstance(right, Node):
            size = self.other.sizes.numbers.get(right.name)
            if size is not None and isinstance(left, Node) and self.sizes.numbers.get(left.name) == size:
                return left
            constant = self.constants.get(right)
            if constant is not None and isinstance(left, Node) and self.constants.get(left) == constant:
                return left
            right = self.image[right]
        if left is right:
            return left
        if isinstance(left, Node) and isinstance(right, Node):
            written = _before_writes(left)
            if written is _before_writes(right) and _facts(left) == _facts(right) == _facts(written):
                return written  # the same tensor, to which the ways write something else
        if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
            return {key: self._merged(node, value, right[key]) for key, value in left.items()}
        alike = (
            isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right)
        )
        if alike:
            return type(left)([self._merged(node, a, b) for a, b in zip(left, right, strict=True)])
        if type(left) is type(right) and not isinstance(left, Node) and left == right:
            return left
        return self._choice(node, left, right)

    def _choice(self, node: Node, left: Any, right: Any) -> Node:
        if not self.asked:
            raise CaptureError(f"the two ways differ in {node.name!r}, before the model asks")
        in_order = (left, right) if self.truth else (right, left)
        key = tuple(side if isinstance(side, Node) else repr(side) for side in in_order)
        if key in self.choices:
            return self.choices[key]
        with self.graph.inserting_before(node):
            choice = self.graph.call_function(choose, (self.condition, *in_order))
        choice.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        one, two = in_order
        if isinstance(one, Node) and isinstance(two, Node) and _facts(one) == _facts(two):
            choice.meta["val"] = metadata(one)
            self.alike[choice.name] = one.name
        self.choices[key] = choice
        return choice


def _is_guarded(node: Node, sizes: Sizes) -> bool:
    """Whether a node must not run in the other branch; sizes are read in both."""
    computes = node.op == "call_function" and node.name not in sizes.numbers
    return computes and node.target is not require_condition


def _padded(node: Node, twin: Node) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """The arguments of both, with the defaults of those that one of them leaves out."""
    sides = (node, twin)
    if len(node.args) == len(twin.args) and node.kwargs.keys() == twin.kwargs.keys():
        return [(side.args, side.kwargs) for side in sides]
    return [(all_arguments(side.target, side.args), all_keywords(side.target, side.kwargs)) for side in sides]
