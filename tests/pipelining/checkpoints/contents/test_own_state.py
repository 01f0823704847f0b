"""Values of a state dict that are no memory of the module were copied into a tensor that nobody has: loading
went well, and the model was as before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining.checkpoints import load_checkpoint, load_safetensors, save_checkpoint
from partita.pipelining.checkpoints.contents.own_state import loadable_state


class _Half(nn.Linear):
    """Saves its weight in half precision."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(2, 2)
        self.register_state_dict_post_hook(
            lambda _module, state, prefix, _: state.update(
                {f"{prefix}weight": state[f"{prefix}weight"].half()}
            )
        )


class _LeavesOut(nn.Linear):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(2, 2)
        self.register_state_dict_post_hook(
            lambda _module, state, prefix, _: state.__delitem__(f"{prefix}bias")
        )


class _Merged(nn.Linear):
    """Saves one weight, the sum, as a layer does whose adapter is merged, and can't take it back."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(2, 2)
        self.added = nn.Parameter(torch.randn(2, 2))
        self.register_state_dict_post_hook(self._merge)

    @staticmethod
    def _merge(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] + state.pop(f"{prefix}added")


def _in(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(2, 2))


def test_a_weight_that_is_saved_in_half_precision_is_loaded_as_the_model_loads_it(tmp_path: Path) -> None:
    model, other, wanted = _in(_Half(1)), _in(_Half(2)), _in(_Half(3))
    wanted.load_state_dict(model.state_dict())
    save_checkpoint(tmp_path, model)
    load_checkpoint(tmp_path, other)
    assert all(map(torch.equal, other.parameters(), wanted.parameters()))


def test_of_a_safetensors_file_too(tmp_path: Path) -> None:
    model, other, wanted = _in(_Half(1)), _in(_Half(2)), _in(_Half(3))
    wanted.load_state_dict(model.state_dict())
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    load_safetensors(other, tmp_path)
    assert all(map(torch.equal, other.parameters(), wanted.parameters()))


@pytest.mark.parametrize("kind", [_LeavesOut, _Merged])
def test_what_the_model_itself_would_not_take_back_is_refused_and_changes_nothing(
    tmp_path: Path, kind: type[Any]
) -> None:
    save_checkpoint(tmp_path, _in(kind(1)))
    model = _in(kind(2))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="Missing key"):
        _in(kind(2)).load_state_dict(_in(kind(1)).state_dict())
    with pytest.raises(
        CheckpointError, match=r"does not take back what its state_dict\(\) says(?s:.*)Missing key"
    ):
        load_checkpoint(tmp_path, model)
    assert all(map(torch.equal, before, model.parameters()))
    load_checkpoint(tmp_path, model, strict=False)
    assert torch.equal(model[0].weight, _in(kind(1)).state_dict()["0.weight"])


def test_without_a_new_value_a_computed_one_is_not_given_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Sequential(nn.Identity(), nn.Linear(2, 2)))
    model = _in(_Half(1))
    before = model[0].weight.clone()
    assert load_checkpoint(tmp_path, model, strict=False).missing == ("0.weight", "0.bias")
    assert torch.equal(model[0].weight, before)


def test_a_quantised_layer_gets_its_scale(tmp_path: Path) -> None:
    """Its ``state_dict()`` makes a tensor of it."""

    class Scaled(nn.Linear):
        def __init__(self, scale: float) -> None:
            super().__init__(2, 2)
            self.scale = scale

        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
            destination[f"{prefix}scale"] = torch.tensor(self.scale)

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            self.scale = float(state.pop(f"{prefix}scale"))
            super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]

    save_checkpoint(tmp_path, _in(Scaled(0.5)))
    model = _in(Scaled(2.0))
    load_checkpoint(tmp_path, model)
    assert model[0].scale == 0.5


def test_a_hook_that_refuses_to_load_leaves_all_as_it_was(tmp_path: Path) -> None:
    """It refused the old state too; that error took the place of the first, and nothing else was undone."""

    class Refuses(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_state_dict_post_hook(
                lambda _module, state, prefix, _: state.update({f"{prefix}version": torch.tensor(1)})
            )
            self.register_load_state_dict_pre_hook(self._refuse)

        @staticmethod
        def _refuse(*_: Any) -> None:
            raise ValueError("another version")

    save_checkpoint(tmp_path, nn.Sequential(_Half(1), Refuses()))
    model = nn.Sequential(_Half(2), Refuses())
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match="another version") as raised:
        load_checkpoint(tmp_path, model)
    assert any("not all is as it was before" in note for note in raised.value.__notes__)
    assert all(map(torch.equal, before, model.parameters()))


def test_no_second_copy_is_made_of_tensors_beside_extra_state() -> None:
    """Who writes to them keeps them."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, _state: int) -> None:
            """Nothing changes."""

    model = _in(Extra(2, 2))
    restore = loadable_state(model).keep()
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    restore()
    assert (model[0].weight == 3.0).all()


def test_tensors_that_a_state_dict_puts_back_first_are_not_computed() -> None:
    """FSDP's hook puts shards in place of whole parameters when ``state_dict()`` is called: all of them were
    taken for computed ones, and copied.
    """
    model = nn.Linear(2, 2)
    sharded = model.weight
    model.weight = nn.Parameter(sharded.detach().clone())
    model.register_state_dict_pre_hook(lambda module, *_: setattr(module, "weight", sharded))
    state = loadable_state(model)
    assert not state.computed
    assert not state.leaves_out


def test_an_override_of_a_state_dict_need_not_take_keep_vars(tmp_path: Path) -> None:
    class Own(nn.Sequential):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return dict(super().state_dict())

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layer = nn.Linear(2, 2)
        return Own(layer, layer)

    model_1, model_2 = model(1), model(2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model_1, model_2)]
    model_1(torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    save_checkpoint(tmp_path, model_1, optimizers[0])
    load_checkpoint(tmp_path, model_2, optimizers[1])
    assert all(map(torch.equal, model_1.parameters(), model_2.parameters()))
    assert not loadable_state(model_2).computed


def test_a_plain_module_is_asked_for_nothing() -> None:
    state = loadable_state(_in(nn.BatchNorm1d(2)))
    assert not state.computed
    assert not state.leaves_out
    state.put({})
    state.keep()()
