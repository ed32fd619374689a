"""What a case of the fuzzer is, and how hypothesis draws one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hypothesis import strategies as st

from .arguments import LAYOUTS, SPECIALS, VALUES

CELL_OPERATORS = ("forward", "_forward_with_gates", "backward")
SEQUENCE_OPERATORS = ("sequence_forward", "_sequence_forward_with_gates", "sequence_backward")
WITH_FORMULAS = ("forward", "sequence_forward")
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """All that a case depends on, so that its line of JSON repeats it."""

    call: str
    dtype: str = "float32"
    time: int = 1
    batch: int = 1
    features: int = 1
    state: int = 1
    # How many steps each row has, where sequences are packed.
    lengths: tuple[int, ...] | None = None
    reverse: bool = False
    resets: bool = False
    output_mask: tuple[bool, ...] = (True,) * 5
    layouts: tuple[str, ...] = ("contiguous",)
    values: str = "normal"
    special: str | None = None
    seed: int = 0
    threads: int = 1
    composite: bool = False
    onednn: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Case:
        values = json.loads(line)
        return Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


SMALL = st.integers(0, 4)
MEDIUM = st.integers(0, 40)
# At and beside what blocks, panels, chunks and vectors are divided by.
EDGES = st.sampled_from([15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70, 96, 127, 128, 129])
WIDE = st.sampled_from([100, 130, 192, 255, 256, 257, 259, 270, 300, 334])

FEW = st.sampled_from([0, 1, 3])
# In the order time, batch, features, state.
SIZES = {
    "empty": (FEW, FEW, FEW, FEW),
    "tiny": (SMALL, SMALL, SMALL, SMALL),
    "small": (st.integers(0, 12), st.integers(0, 20), MEDIUM, MEDIUM),
    "edges": (st.integers(0, 12), EDGES, EDGES, EDGES),
    "wide": (st.integers(0, 12), st.integers(1, 20), WIDE, WIDE),
    "tall": (st.integers(0, 8), st.sampled_from([70, 130, 257, 300]), SMALL, EDGES),
    # More rows than one chunk of backward has.
    "long": (st.integers(25, 45), st.integers(30, 60), SMALL, st.integers(1, 40)),
}
# What is drawn often stands often.
PROFILES = ("empty", "tiny", "small", "small", "small", "edges", "edges", "wide", "tall", "long")
# Products of a case, so that none takes seconds.
MOST_PRODUCTS = 20_000_000


@st.composite
def sizes(draw: st.DrawFn, one_step: bool) -> tuple[int, int, int, int]:
    time, batch, features, state = (draw(size) for size in SIZES[draw(st.sampled_from(PROFILES))])
    time = 1 if one_step else time
    of_a_row = max(1, time) * 3 * state * (state + features)
    return time, min(batch, max(1, MOST_PRODUCTS // max(1, of_a_row))), features, state


def mostly(often: object, seldom: st.SearchStrategy, times: int) -> st.SearchStrategy:
    return st.integers(0, times).flatmap(lambda i: st.just(often) if i < times else seldom)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    call = draw(st.sampled_from((*CELL_OPERATORS, *SEQUENCE_OPERATORS)))
    is_sequence = call in SEQUENCE_OPERATORS
    time, batch, features, state = draw(sizes(one_step=not is_sequence))
    lengths = None
    if is_sequence and draw(st.booleans()):
        batch = batch if time > 0 else 0
        lengths = draw(st.lists(st.integers(1, max(1, time)), min_size=batch, max_size=batch))
        lengths = tuple(sorted(lengths, reverse=True))
    return Case(
        call=call,
        dtype=draw(st.sampled_from(DTYPES)),
        time=time,
        batch=batch,
        features=features,
        state=state,
        lengths=lengths,
        reverse=is_sequence and draw(st.booleans()),
        resets=is_sequence and draw(st.booleans()),
        output_mask=tuple(draw(st.lists(mostly(True, st.just(False), 2), min_size=5, max_size=5)))
        if call.endswith("backward")
        else (True,) * 5,
        layouts=tuple(
            draw(
                st.lists(mostly("contiguous", st.sampled_from(LAYOUTS), 1), min_size=1, max_size=9)
            )
        ),
        values=draw(mostly("normal", st.sampled_from(VALUES), 2)),
        special=draw(mostly(None, st.sampled_from(SPECIALS), 4)),
        seed=draw(st.integers(0, 2**32 - 1)),
        threads=draw(st.integers(1, 4)),
        composite=call in WITH_FORMULAS and draw(mostly(False, st.just(True), 4)),
        onednn=draw(mostly(True, st.just(False), 8)),
    )
