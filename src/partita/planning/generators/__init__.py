"""One file a schedule; `get_schedule` finds them by name."""

from __future__ import annotations

from partita.planning.generators.forward_only import forward_only
from partita.planning.generators.gpipe import gpipe
from partita.planning.generators.interleaved_1f1b import interleaved_1f1b
from partita.planning.generators.interleaved_zero_bubble import interleaved_zero_bubble
from partita.planning.generators.looped_bfs import looped_bfs
from partita.planning.generators.one_f_one_b import one_f_one_b
from partita.planning.generators.registry import ScheduleKind, get_schedule, schedule_names
from partita.planning.generators.v_shaped.dualpipe_v import dualpipe_v
from partita.planning.generators.v_shaped.v_half import v_half
from partita.planning.generators.v_shaped.v_min import v_min
from partita.planning.generators.v_shaped.zbv_zero_bubble import zbv_zero_bubble
from partita.planning.generators.zb_2p import zb_2p
from partita.planning.generators.zb_h1 import zb_h1
from partita.planning.generators.zb_h2 import zb_h2

__all__ = [
    "ScheduleKind",
    "dualpipe_v",
    "forward_only",
    "get_schedule",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "schedule_names",
    "v_half",
    "v_min",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zbv_zero_bubble",
]
