"""`ans data questions SET`: annotated photographs -> questions whose answers are right by construction, and
traces of looking at them."""

from __future__ import annotations

from pathlib import Path

from ans_core import data
from ans_core.agent.episode import Toolbox
from ans_core.agent.world import annotated
from ans_core.agent.world.bank import QuestionBank, write_questions
from ans_core.agent.world.trace_file import check_new
from ans_core.agent.world.traces import write_synthetic_traces
from ans_core.data.formats import SPLITS


def questions(name: str, path: Path, form: str, split: str | None, *, seed: int, out: Path) -> str:
    """Write questions.jsonl and the traces of one split (None: train) into a new folder; return what is in
    it, line by line. Raises ValueError for a split that is not there, a set without referring samples of
    single pictures, and where nothing can be asked about its pictures without ambiguity."""
    data.existing(form, path, name=name)
    wanted = split or "train"
    if wanted not in (splits := SPLITS[form](path)):
        raise ValueError(f"{path} has no split {wanted!r}; name one with --split: {', '.join(splits)}")
    samples = data.read_samples(format=form, path=path, name=name, split=wanted)
    pictures = annotated.pictures(samples)
    if not pictures:
        raise ValueError(
            f"{path} has no pictures with words and masks in {wanted}; questions need `referring` records"
        )
    check_new(out)
    families = write_questions(pictures, out, seed=seed)
    if not families:
        raise ValueError(
            f"nothing can be asked about the {len(pictures)} pictures of {path}: their things are small "
            "(under "
            f"{annotated.SMALLEST_SIDE} pixels), thin, or crowds; docs/agent.md says what each family needs"
        )
    with Toolbox(reader="template", seconds=60.0) as toolbox:  # zooms alone: no text is read
        bank = QuestionBank((), {wanted: out}, seed=seed, tile=toolbox.tile)
        written = write_synthetic_traces(
            out, bank, families, split=wanted, toolbox=toolbox, provenance={"set": name}
        )
    return "\n".join(
        [
            f"{len(pictures)} pictures, {families.total()} questions: "
            + ", ".join(f"{family} {count}" for family, count in families.items()),
            f"{written.kinds.total()} traces: "
            + ", ".join(f"{kind} {count}" for kind, count in written.kinds.items()),
            *(f"dropped: {why} {count}" for why, count in written.dropped.items()),
            f"{out}; `agent.sources` has an agent learn from a set's questions and asks it about them "
            "(docs/agent.md)",
        ]
    )
