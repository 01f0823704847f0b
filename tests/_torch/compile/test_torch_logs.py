"""Torch's logs go where they went before somebody looked at what a model prints."""

from __future__ import annotations

import io
import logging
import sys
from contextlib import redirect_stderr

from partita._torch.compile.torch_logs import torch_logs_to


def test_logs_that_follow_stderr_go_elsewhere_within_the_block_and_come_back() -> None:
    printed, logged, later = io.StringIO(), io.StringIO(), io.StringIO()
    log = logging.getLogger("torch._dynamo")
    with redirect_stderr(printed), torch_logs_to(logged):
        log.warning("first")
        sys.stderr.write("printed\n")
    with redirect_stderr(later):
        log.warning("second")
    assert printed.getvalue() == "printed\n"
    assert logged.getvalue().count("first") <= 1
    assert ("first" in logged.getvalue()) == ("second" in later.getvalue())
