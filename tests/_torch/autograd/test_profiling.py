from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from partita._torch.autograd.profiling import is_profiling, profiler_range


def test_a_range_is_in_the_profile_where_it_is_wanted() -> None:
    assert not is_profiling()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert is_profiling()
        with profiler_range("shown"), profiler_range("hidden", wanted=False):
            pass
    assert {event.name for event in profiler.events()} & {"shown", "hidden"} == {"shown"}
