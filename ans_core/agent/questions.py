"""`ans data questions SET`: annotated photographs and clips -> questions whose answers are right by
construction, and traces of looking at the photographs."""

from __future__ import annotations

from pathlib import Path

from ans_core import data
from ans_core.agent import ocr
from ans_core.agent.episode import Toolbox
from ans_core.agent.world import annotated_clips, things
from ans_core.agent.world.annotated import READS_TEXT
from ans_core.agent.world.bank import QuestionBank, write_questions
from ans_core.agent.world.question_sets import QuestionedPicture
from ans_core.agent.world.things import AnnotatedPicture
from ans_core.agent.world.traces import Written, write_synthetic_traces
from ans_core.data.formats import SPLITS


def questions(name: str, path: Path, form: str, split: str | None, *, seed: int, out: Path) -> str:
    """Write questions.jsonl and the traces of one split (None: train) into a new folder; return what is in
    it, line by line. Raises ValueError for a split that is not there, a set without referring samples of
    single pictures or clips, and where nothing can be asked about these without ambiguity."""
    data.existing(form, path, name=name)
    wanted = split or "train"
    if wanted not in (splits := SPLITS[form](path)):
        raise ValueError(f"{path} has no split {wanted!r}; name one with --split: {', '.join(splits)}")
    samples = data.read_samples(format=form, path=path, name=name, split=wanted)
    pictures: list[AnnotatedPicture | QuestionedPicture] = list(things.pictures(samples))
    pictures += annotated_clips.clips(samples, name=name, seed=seed)
    if not pictures:
        raise ValueError(
            f"{path} has no pictures with words and masks in {wanted}; questions need `referring` records"
        )
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"{out} is not empty; give a new folder, or remove it")
    missing = ocr.not_installed()
    families = write_questions(pictures, out, seed=seed, reader=None if missing else READS_TEXT)
    if not families:
        raise ValueError(
            f"nothing can be asked about the {len(pictures)} pictures of {path}: their things are small "
            "(under "
            f"{things.SMALLEST_SIDE} pixels), thin, or crowds; docs/agent.md says what each family needs"
        )
    of_photographs = {
        family: count for family, count in families.items() if family not in annotated_clips.FAMILIES_OF_CLIPS
    }
    written = Written()
    if of_photographs:
        with Toolbox(reader="template" if missing else READS_TEXT, seconds=60.0) as toolbox:
            bank = QuestionBank((), {wanted: out}, seed=seed, tile=toolbox.tile)
            written = write_synthetic_traces(
                out, bank, of_photographs, split=wanted, toolbox=toolbox,
                provenance={"set": name, "ocr": READS_TEXT},
            )  # fmt: skip
    return "\n".join(
        [
            f"{len(pictures)} pictures and clips, {families.total()} questions: "
            + ", ".join(f"{family} {count}" for family, count in families.items()),
            f"{written.kinds.total()} traces: "
            + ", ".join(f"{kind} {count}" for kind, count in written.kinds.items()),
            *(f"dropped: {why} {count}" for why, count in written.dropped.items()),
            *(
                ["no trace of a clip: a model must follow its things, as in the stage cota"]
                if of_photographs != families
                else []
            ),
            *(
                [f"not asked what is written: {', '.join(missing)} not installed (`pip install -e '.[ocr]'`)"]
                if missing
                else []
            ),
            f"{out}; `agent.sources` has an agent learn from a set's questions and asks it about them "
            "(docs/agent.md)",
        ]
    )
