"""What holds for every test: one thread and one seed, so that runs are repeatable, and properties without a
clock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# The processes that a test starts share the machine's cores: where each of them had a thread per core, they
# would take eight times as long. Set before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import tests.rare_collections  # noqa: F401
import torch
from hypothesis import HealthCheck, Phase, settings

from partita._torch.autograd import global_settings as ambient

torch.set_num_threads(1)
# Else each process that compiles with Inductor starts others to help it, which import torch first.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# On a busy machine the time of one example says nothing. PARTITA_RANDOMIZE=1 looks for new examples. Which
# lines a failure depends on is not looked for: with every line of torch traced that takes hours, beyond any
# time limit.
settings.register_profile(
    "partita",
    deadline=None,
    derandomize=os.environ.get("PARTITA_RANDOMIZE") != "1",
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("partita")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that take long come first, so that no worker is left alone with one at the end. Dear
    tests are for ``make fuzz``, some of them for ``make newcomer``.
    """
    if "PARTITA_FUZZ_EXAMPLES" not in os.environ:
        for item in items:
            if item.get_closest_marker("dear") is not None:
                item.add_marker(pytest.mark.skip(reason="dear: make fuzz"))
    long = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(autouse=True)
def _same_settings() -> Iterator[None]:
    """What a test leaves behind, such as another default dtype, the next ones would run with."""
    before = ambient.capture()
    yield
    after = ambient.capture()
    ambient.restore(before)
    assert after == before


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Whichever tests ran before, and however many workers there are."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """What one test compiled, and how often, is no business of the next; nor is whether anything compiles."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        assert dynamo.eval_frame._stance.stance == "default"


class _AtOnce:
    """Tells of a failure when it happens, so that a run that is cut off has told of it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called in the process that prints, for the tests of all workers."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line("")
            reporter.write_line(f"FAILED in {report.when}: {report.nodeid}", red=True)
            reporter.write_line(f"    {_reason(report)}")


def pytest_configure(config: pytest.Config) -> None:
    """Reports at once only where there is somebody to tell: a worker's reach the process that started it.

    GPUs are for ``-m gpu`` alone: what is tested without one is what the CPU does, also where there is one,
    and processes that share it would only be in each other's way.
    """
    if "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_AtOnce(config))


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
    return "\n    ".join(line[:300] for line in text.splitlines()[:12])
