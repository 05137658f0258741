"""From what was recorded of a step to what a trace tells of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seg4k.memory.recorder import Place, Record, Recorder
from seg4k.memory.traced import KINDS, STATIC, Held, Segment, Trace, around, outermost_of

__all__ = ["Noted", "held_by", "tally"]

_POINTS = 60  # of the outline of live memory, per stretch between two marks


@dataclass
class Noted:
    """What was seen of the segments while the step ran, by name.

    Attributes:
        saved: what autograd saved in a place.
        inputs: the storages of a segment's positional arguments.
        fixed_inputs: those of them that offloading leaves where they are.
        arguments: the positional arguments themselves, as the first call had them.
    """

    saved: dict[str, list[Record]] = field(default_factory=dict)
    inputs: dict[str, list[Record]] = field(default_factory=dict)
    fixed_inputs: dict[str, list[Record]] = field(default_factory=dict)
    arguments: dict[str, tuple[object, ...]] = field(default_factory=dict)


def tally(
    recorder: Recorder, names: Sequence[str], alive_at_backward: Sequence[Record], held: Held | None
) -> Trace:
    """Add up a recorded step.

    Args:
        recorder: of the step, at its end.
        names: segments in forward order, and the other places.
        alive_at_backward: what lived when the backward of the last batch began.
        held: to be handed on.
    """
    live = recorder.live
    peak = max(live)
    moment = live.index(peak)
    segments = {name: Segment() for name in names}
    for place, bytes_ in recorder.peaks.items():
        phase = "backward" if place.phase == "recompute" else place.phase
        own = segments[place.name].own_peaks
        own[phase] = max(own.get(phase, 0), bytes_)
        for name in around(place.name, segments):
            peaks = segments[name].peaks
            peaks[phase] = max(peaks.get(phase, 0), bytes_)
    for place, work in recorder.operations.items():
        for name in around(place.name, segments):
            segments[name].work.setdefault(place.phase, Counter()).update(work)
    for place, moved in recorder.moved.items():
        segments[place.name].moved[place.phase] += moved
    computed = [record for record in alive_at_backward if record.kind is None]
    for record in computed:
        for name in around(record.place.name, segments):
            segments[name].saved_bytes += record.bytes
    static = {
        kind: sum(record.bytes for record in recorder.records if record.kind == kind and record.freed is None)
        for kind in STATIC
    }
    outline, marks = _outline(recorder, segments)
    return Trace(
        peak_bytes=peak,
        peak_at=str(_place_at(recorder, moment, segments)),
        peak_kinds=_kinds_at(recorder, moment, set(map(id, computed))),
        static_kinds=static,
        segments=segments,
        live=outline,
        marks=marks,
        held=held,
    )


def held_by(recorder: Recorder, noted: Noted) -> Held:
    """Who holds what, with storages by number."""
    index: dict[int, int] = {}
    records: list[Record] = []

    def numbers(table: Mapping[str, list[Record]]) -> dict[str, set[int]]:
        result: dict[str, set[int]] = {}
        for name, found in table.items():
            result[name] = set()
            for record in found:
                if record.kind is None:
                    if id(record) not in index:
                        index[id(record)] = len(records)
                        records.append(record)
                    result[name].add(index[id(record)])
        return result

    attention: dict[str, list[Record]] = {}
    for record in recorder.attention:
        attention.setdefault(record.place.name, []).append(record)
    saved, inputs, fixed_inputs, made = (
        numbers(table) for table in (noted.saved, noted.inputs, noted.fixed_inputs, attention)
    )
    return Held(
        bytes=[record.bytes for record in records],
        born=[record.place.name for record in records],
        saved=saved,
        inputs=inputs,
        fixed_inputs=fixed_inputs,
        attention=made,
        arguments=noted.arguments,
    )


def _place_at(recorder: Recorder, moment: int, names: Mapping[str, object]) -> Place:
    place = Place("input", "forward")
    for index, mark in recorder.marks:
        if index > moment:
            break
        place = mark
    return Place(outermost_of(place.name, names), place.phase)


def _kinds_at(recorder: Recorder, moment: int, kept: set[int]) -> dict[str, int]:
    kinds = dict.fromkeys(KINDS, 0)
    for record in recorder.records:
        if record.born > moment or (record.freed is not None and record.freed <= moment):
            continue
        kind = record.kind
        if kind is None:
            recomputed = record.place.phase == "recompute"
            kind = "activations" if id(record) in kept or recomputed else "temporaries"
        kinds[kind] += record.bytes
    return kinds


def _outline(recorder: Recorder, names: Mapping[str, object]) -> tuple[list[int], list[tuple[int, str, str]]]:
    """Live memory with each stretch thinned to its largest values, and where the stretches begin."""
    live = recorder.live
    outline: list[int] = []
    marks: list[tuple[int, str, str]] = []
    stretches = _stretches(
        [(index, outermost_of(place.name, names), place.phase) for index, place in recorder.marks]
    )
    ends = [start for start, _, _ in stretches[1:]] + [len(live)]
    for (start, name, phase), end in zip(stretches, ends, strict=True):
        if end > start:
            marks.append((len(outline), name, phase))
            size = -(-(end - start) // _POINTS)
            outline += [max(live[at : min(at + size, end)]) for at in range(start, end, size)]
    return outline, marks


def _stretches(marks: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """The marks that begin something new: no returns to code between segments, no taking of turns."""
    first = {(name, phase): index for index, (_, name, phase) in reversed(list(enumerate(marks)))}
    last_new = {phase: index for (_, phase), index in sorted(first.items(), key=lambda item: item[1])}
    kept: list[tuple[int, str, str]] = []
    turns: set[str] = set()  # the names that share the latest stretch
    for index, (moment, name, phase) in enumerate(marks):
        between = name == "loss" and phase == "forward" and index < last_new[phase]
        if between or (kept and kept[-1][2] == phase and name in turns):
            continue
        if len(kept) > 1 and kept[-2][1:] == (name, phase) and kept[-1][2] == phase:
            turns = {name, kept.pop()[1]}
            continue
        kept.append((moment, name, phase))
        turns = {name}
    return kept
