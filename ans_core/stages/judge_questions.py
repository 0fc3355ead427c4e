"""judge_questions: the true captions that RL trains on in, the judge's questions about them out
(questions.jsonl). None if `rl` judges nothing: an endpoint may cost money for every caption."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ans_core import data
from ans_core.config import Config
from ans_core.data.regions import is_region
from ans_core.judge.base import Judge, self_checked
from ans_core.judge.choose import is_judged, judge_of
from ans_core.judge.questions import Questions, write_questions
from ans_core.types import Log

FILE = "questions.jsonl"
CHUNK = 64
"""Captions between two checks whether the judge still answers."""
CHUNK_DEADLINE_S = 1800.0
"""No training step waits for this, so slow endpoints may take their time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """The questions written for one caption."""

    questions: Questions
    drafted: int


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: data. Equal captions share their questions. After a failure the judge's cache
    has what was done, so `scratch` stays empty. Raises RuntimeError if the endpoint fails."""
    judged = is_judged(cfg.rl.loops, loop1=cfg.rl.use_llm_judge, loop2=cfg.rl.use_llm_judge_loop2)
    sources = data.sources(inputs["data"], "train") if judged else ()
    samples = [s for source in sources for s in source.samples if is_region(s)]
    captions = list(dict.fromkeys(sample.text for sample in samples))
    written: dict[str, _Written] = {}
    with (
        closing(judge_of(cfg, deadline_s=CHUNK_DEADLINE_S)) as judge,
        tqdm(total=len(captions), desc="questions") as bar,
    ):
        for start in range(0, len(captions), CHUNK):
            chunk = captions[start : start + CHUNK]
            records = write_chunk(judge, chunk, positives=cfg.judge.positives, negatives=cfg.judge.negatives)
            written |= dict(zip(chunk, records, strict=True))
            stats = judge.stats()
            log({f"judge/{name}": value for name, value in stats.items()}, start + len(chunk))
            if stats["failed"]:
                raise RuntimeError(
                    f"the judge's endpoint gave no answer {stats['failed']:.0f} times; the log file says "
                    "why. Run again to go on from here"
                )
            bar.update(len(chunk))
    write_questions(
        out / FILE, {(sample.dataset, sample.sample_id): written[sample.text].questions for sample in samples}
    )
    return _metrics(len(samples), list(written.values()))


def write_chunk(judge: Judge, captions: Sequence[str], *, positives: int, negatives: int) -> list[_Written]:
    """Write questions for a chunk of captions; unreadable drafts count as no questions."""
    drafted = [
        draft or () for draft in judge.write(captions, positives=positives, negatives=negatives).result()
    ]
    checked = self_checked(judge, captions, drafted)
    return [
        _Written(questions=questions, drafted=len(draft))
        for questions, draft in zip(checked, drafted, strict=True)
    ]


def _metrics(samples: int, written: Sequence[_Written]) -> dict[str, float]:
    """Return means over different captions. A caption without questions is rewarded by METEOR alone."""
    drafted, passed = sum(w.drafted for w in written), sum(len(w.questions) for w in written)
    return {
        "samples": float(samples),
        "captions": float(len(written)),
        "captions_without_questions": float(sum(not w.questions for w in written)),
        "questions_per_caption": passed / len(written) if written else 0.0,
        "dropped_by_self_check": 1 - passed / drafted if drafted else 0.0,
    }
