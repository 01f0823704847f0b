from __future__ import annotations

import pytest
import torch

from partita._torch.operators.call_recording import WholeCall, record_calls
from partita.errors import ExecutionError


def test_calls_are_listed_and_writes_put_back() -> None:
    x = torch.zeros(3)
    result, calls = record_calls(lambda: x.view(-1).add_(1).sin())
    assert [call.function for call in calls] == [
        torch.ops.aten.view.default,
        torch.ops.aten.add_.Tensor,
        torch.ops.aten.sin.default,
    ]
    assert [call.fresh for call in calls] == [(False,), (False,), (True,)]
    assert x.tolist() == [0.0] * 3
    for call in calls:
        call.run()
    assert x.tolist() == [1.0] * 3
    assert torch.equal(result, x.sin())


def test_writes_that_no_schema_declares_are_put_back_too() -> None:
    norm = torch.nn.BatchNorm1d(2)
    with torch.no_grad():
        record_calls(lambda: norm(torch.randn(4, 2)))
    assert norm.running_mean.tolist() == [0.0, 0.0]
    assert norm.num_batches_tracked.item() == 0


def test_an_error_puts_back_what_was_written() -> None:
    x, state = torch.zeros(1), torch.random.get_rng_state()

    def run() -> float:
        torch.rand(1)
        return x.add_(1).item()

    with pytest.raises(ExecutionError, match="can't be recorded"):
        record_calls(run)
    assert x.item() == 0.0
    assert torch.equal(torch.random.get_rng_state(), state)


def test_memory_that_has_moved_is_refused() -> None:
    x = torch.zeros(2)
    _, calls = record_calls(lambda: x + 1)
    x.untyped_storage().resize_(1 << 22)
    with pytest.raises(ExecutionError, match="has moved since the recording: record again"):
        calls[0].run()


def test_a_compiled_function_is_one_call_and_its_writes_are_put_back() -> None:
    """Its kernels write to bare addresses, which no operator call shows."""
    total = torch.zeros(2)

    def kernel(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.numpy()[:] += x.numpy()  # past the dispatcher
        return torch.from_numpy(x.numpy() * 2)

    whole = WholeCall(kernel, written={1})
    x = torch.ones(2)
    result, calls = record_calls(lambda: whole(x, total).sin())
    assert [call.function for call in calls] == [kernel, torch.ops.aten.sin.default]
    assert total.tolist() == [0.0, 0.0]
    x.fill_(3.0)
    for call in calls:
        call.run()
    assert total.tolist() == [3.0, 3.0]
    assert torch.equal(result, torch.full((2,), 6.0).sin())
    assert whole(x, total).tolist() == [6.0, 6.0]  # by itself it is just the function
