"""Threads that cut models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import torch
from torch import nn

from partita.capture import capture
from partita.capture.one_thread_at_a_time import one_thread_at_a_time


def test_a_thread_waits_for_another_and_not_for_itself() -> None:
    entered, order = Event(), list[str]()

    @one_thread_at_a_time()
    def second() -> None:
        order.append("second")

    def other() -> None:
        entered.set()
        second()

    with ThreadPoolExecutor() as pool, one_thread_at_a_time():
        waiting = pool.submit(other)
        assert entered.wait(60)
        with one_thread_at_a_time():
            order.append("first")
    waiting.result(60)
    assert order == ["first", "second"]


def test_models_that_several_threads_capture_at_once_are_all_proven() -> None:
    """Each found the settings and random generators of the process changed by another one's capture: "the
    graph that it traces is not the model", "the runs drew another amount of random numbers".
    """
    threads = 3
    start = Barrier(threads)

    def captured(width: int) -> bool:
        model = nn.Sequential(nn.Linear(width, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        start.wait(60)
        return capture(model, (torch.randn(2, width),), prove=True).proof.holds

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(captured, range(4, 4 + threads)))
