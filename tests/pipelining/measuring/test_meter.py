from __future__ import annotations

import torch

from partita._torch.operators.roofline import FixedSpeeds
from partita.pipelining.measuring.meter import CLOCK, event_meter, meter_for, roofline


class Queue:
    """A device that works later: calls put seconds into the queue, and time passes when one waits for it."""

    def __init__(self) -> None:
        self.waiting: list[float | Mark] = []
        self.now_ms = 0.0

    def wait(self) -> None:
        for item in self.waiting:
            if isinstance(item, Mark):
                item.at_ms = self.now_ms
            else:
                self.now_ms += 1000 * item
        self.waiting.clear()


class Mark:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.at_ms = queue, 0.0

    def record(self) -> None:
        self.queue.waiting.append(self)

    def elapsed_time(self, end: Mark) -> float:
        return end.at_ms - self.at_ms


def test_work_that_was_queued_before_is_not_measured_and_work_that_returns_early_is() -> None:
    queue = Queue()
    meter = event_meter(lambda: Mark(queue), queue.wait)
    queue.waiting.append(5.0)
    result, seconds = meter.timed(lambda: queue.waiting.append(2.0) or "done")  # type: ignore[func-returns-value]
    assert (result, seconds) == ("done", 2.0)
    assert not meter.is_exact


def test_the_clock_is_taken_for_the_host_and_a_roofline_where_there_is_no_memory() -> None:
    here, nowhere = torch.ones(4, 4), torch.ones(4, 4, device="meta")
    assert meter_for([here, 3]) is CLOCK
    assert meter_for([here], FixedSpeeds()).is_exact
    assert meter_for([here, nowhere]).is_exact
    assert CLOCK.timed(lambda: 7)[0] == 7


def test_a_roofline_tells_the_same_each_time_and_takes_attention_as_one_operator() -> None:
    meter = roofline(FixedSpeeds(1e12, 1e9))
    q = torch.empty(1, 2, 256, 8, device="meta")
    attend = torch.nn.functional.scaled_dot_product_attention
    times = [meter.timed(lambda: attend(q, q, q))[1] for _ in range(2)]
    assert times[0] == times[1] < 2 * 256 * 256 * 4 / 1e9
