"""agent_sft: the base and the traces (of `cota`, or own ones) in; the agent's adapter out (the base is
referred to by its hash).

    dvc repro agent/dvc.yaml:agent_sft@tools

`row` is tools (calls, then the answer) or direct (the same questions and steps, answered at once: what tools
must beat). Trained: LoRA on the language model (or copies of its layers), projector, and rows of the tokens
that are said. The rest is frozen, and with the adapter off the model is the base. Several processes share a
step's rows, and the questions that parts are checked on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from ans_core import data, dist
from ans_core.agent import rows, tokens
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import costs, operations_told, outcome_of, request_of
from ans_core.agent.ocr import check_reader
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import play
from ans_core.agent.policy import AgentPolicy, add_call_tokens, warn_of_other_reader
from ans_core.agent.world import FAMILIES, Question, draw_question
from ans_core.agent.world.trace_file import Trace, read_traces, readers_of
from ans_core.checkpoints import checkpoint
from ans_core.config import Config
from ans_core.config.agent import AgentSft
from ans_core.data import conversation
from ans_core.data.collate import Batch, batch_of, read_row
from ans_core.data.mixture import Mixture
from ans_core.model.checkpointing import layers_again
from ans_core.model.lora_ranks import rank_pattern
from ans_core.model.network import Network
from ans_core.model.parts import check_moved, hashes
from ans_core.model.supervised import Supervised, layout_of
from ans_core.stages.launch import (
    last_means,
    machine_of,
    schedule_of,
    show_ranks,
    weights_dtype,
    write_records,
)
from ans_core.stages.operations import base_of, toolbox_of
from ans_core.train import loop
from ans_core.train.loop import Curves, Machine
from ans_core.types import Log

DIFFICULTIES = ("simple", "medium", "hard")
"""Parts of the curriculum; each also has the traces of those before it."""
CHECKED_FROM = 1_000_000
"""Index of the first question that parts are checked on: the stage `agent_evaluate` asks others."""


def run(
    cfg: Config, *, row: str, inputs: dict[str, Path], out: Path, scratch: Path, log: Log
) -> dict[str, float]:
    """Run the stage. inputs: data, model, agent/cota. Writes the trained tensors (delta), curves.csv,
    moved.json and curriculum.json."""
    check_reader(cfg.agent.reader)
    settings = cfg.agent.sft
    settings.check_shares(processes=dist.world_size())
    # an adapter's optimizer is small
    machine = replace(machine_of(cfg.launch, settings.dtype, log=log), deepspeed_stage=0)
    loop.let_processes_talk(machine)  # they check parts together
    folder = Path(settings.traces) if settings.traces else inputs["agent/cota"] / "train"
    traces = rows.lessons(read_traces(folder))
    if row == "direct":
        traces = [rows.direct(trace) for trace in traces]
    readers = readers_of(traces)
    warn_of_other_reader(readers, here=cfg.agent.reader, what=f"the traces in {folder} were made")
    policy = new_policy(cfg, inputs["model"], traces, machine, log)
    before = hashes(policy.model)
    # losses of masks are means over the rows that have some: by their share, over all rows
    share = settings.referring
    module = Supervised(
        policy.model,
        mask_weight=share * cfg.sft.mask_weight,
        dice_weight=share * cfg.sft.dice_weight,
        points=cfg.sft.mask_points,
    )
    schedule = schedule_of(settings.optim)
    curves: Curves = []
    judged: list[dict[str, object]] = []
    with toolbox_of(cfg, policy.model, adapters_off=policy.base) as toolbox:
        maker = TraceBatches(cfg, policy, toolbox, inputs, folder, row)
        maker.check(traces)
        for part in curriculum(traces, settings.curriculum, settings.optim.steps):
            with judged_part(cfg, policy, toolbox, row, part) as judgement:
                part_curves = loop.train(
                    module, maker.of(part), name=part.name, schedule=replace(schedule, steps=part.steps),
                    machine=machine, seed=cfg.seed, scratch=scratch, log=log,
                )  # fmt: skip
            judged.append(judgement)
            curves += [(part.first + step, name, value) for step, name, value in part_curves]
    moved = check_moved(before, policy.model)
    if dist.rank() == 0:
        policy.operations_told = cfg.agent.episode.operations_told and row == "tools"
        policy.operations = list(OPERATIONS)
        policy.ocr = readers.pop() if len(readers) == 1 else None
        about = {"stage": "agent_sft", "row": row, "seed": cfg.seed}
        policy.save(out, base_hash=checkpoint.weights_hash(inputs["model"]), about=about)
        write_records(out, scratch, {"agent_sft": curves}, moved)
        (out / "curriculum.json").write_text(json.dumps(judged, indent=1))
    dist.wait_for_all()
    return last_means(curves) | {
        "traces": float(len(traces)),
        "taken_back": float(sum(bool(j["taken_back"]) for j in judged)),
    }


def new_policy(cfg: Config, base: Path, traces: Sequence[Trace], machine: Machine, log: Log) -> AgentPolicy:
    """Return the base with a new adapter, which can learn to say these traces."""
    settings = cfg.agent.sft
    # as large as the model, and gone with this function
    tuned = tuned_weights(Path(settings.lora_ranks_from), base=base) if settings.lora_ranks_from else None
    model = base_of(cfg, base, device=machine.device, dtype=weights_dtype(machine.dtype))
    trained = set(add_call_tokens(model, OPERATIONS))
    if settings.rows == "said":
        texts = [turn.text for trace in traces for turn in trace.turns if turn.trainable]
        trained |= tokens.said_with(model, texts)
    lora = lora_of(settings, model, tuned)
    show_ranks(lora, log)
    model.checkpointing = layers_again(settings.checkpointing)
    return AgentPolicy(model, lora=lora, rows=sorted(trained), seed=dist.seed_of(cfg.seed, "agent lora"))


@contextmanager
def judged_part(
    cfg: Config, policy: AgentPolicy, toolbox: Toolbox, row: str, part: Part
) -> Iterator[dict[str, object]]:
    """Inside, the part is learned; afterwards it is taken back if it cost too much of what came before it. Yields
    the record of that, filled in at the end."""
    adapter, adapters = policy.adapters.names[0], policy.adapters
    right_before = _right(cfg, policy, toolbox, row, part.before)
    start = {name: tensor.clone() for name, tensor in adapters.tensors(adapter).items()}
    judgement: dict[str, object] = {"part": part.name, "steps": part.steps}
    yield judgement
    reached = _right(cfg, policy, toolbox, row, part.before)
    judgement["before"] = fmean(right_before) if right_before else None
    judgement["after"] = fmean(reached) if reached else None
    judgement["taken_back"] = costs(right_before, reached, cfg.agent.sft.allowed_loss)
    if judgement["taken_back"]:
        adapters.load(adapter, start)


def tuned_weights(folder: Path, *, base: Path) -> dict[str, Tensor]:
    """Load what full fine-tuning made of the base, by the base's names: a whole model, or an agent's copies
    of layers. Raises ValueError for an agent of another base and for one trained with LoRA."""
    if not (folder / checkpoint.DELTA).is_file():
        return dict(checkpoint.load(folder).named_parameters())
    tensors, config = checkpoint.load_delta(folder, base_hash=checkpoint.weights_hash(base))
    if config.get("lora") is not None:
        raise ValueError(
            f"agent.sft.lora_ranks_from: {folder} was trained with LoRA, whose change has no more than "
            "LoRA's own rank; name a full "
            "fine-tuning of the base, or an agent trained with agent.sft.whole=true"
        )
    return {name.replace(".modules_to_save.*.", "."): tensor for name, tensor in tensors.items()}


def lora_of(settings: AgentSft, base: Network, tuned: Mapping[str, Tensor] | None) -> dict[str, Any] | None:
    """Return the adapter's ranks: `lora.rank`, or what each layer's change in full fine-tuning needs. None =
    copies of the layers."""
    if settings.whole:
        return None
    ranks = {} if tuned is None else {"rank_pattern": rank_pattern(base, tuned, energy=settings.lora_energy)}
    return settings.lora.model_dump() | ranks


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the curriculum."""

    name: str
    traces: tuple[Trace, ...]
    before: tuple[str, ...]
    """Families that the parts before it held."""
    first: int
    """Steps before it."""
    steps: int


def curriculum(traces: Sequence[Trace], shares: Sequence[float], steps: int) -> Iterator[Part]:
    """Yield a part for every difficulty that there are traces of and that has steps; the last one takes what
    is left of them."""
    there = {trace.difficulty for trace in traces}
    names = [
        name
        for name, share in zip(DIFFICULTIES, shares, strict=True)
        if name in there and (share or name == DIFFICULTIES[-1])
    ]
    names = names or [max(there, key=DIFFICULTIES.index)]
    first = 0
    families: tuple[str, ...] = ()
    for name in names:
        easier = DIFFICULTIES[: DIFFICULTIES.index(name) + 1]
        part_traces = tuple(trace for trace in traces if name == names[-1] or trace.difficulty in easier)
        end = steps if name == names[-1] else first + round(shares[DIFFICULTIES.index(name)] * steps)
        if end > first:
            yield Part(name=name, traces=part_traces, before=families, first=first, steps=end - first)
            first = end
            families = tuple(dict.fromkeys(t.family for t in part_traces if t.family in FAMILIES))


class TraceBatches:
    """Traces and pictures with expressions, mixed; decided by (seed, part, step) alone."""

    def __init__(
        self,
        cfg: Config,
        policy: AgentPolicy,
        toolbox: Toolbox,
        inputs: dict[str, Path],
        folder: Path,
        row: str,
    ) -> None:
        settings = cfg.agent.sft
        self.model, self.batch, self.seed = policy.model, settings.optim.batch, cfg.seed
        self.micros = settings.optim.accumulate
        self.referring = settings.referring_rows
        self.picture_share = None if settings.traces else cfg.agent.source_share
        self.folder, self.max_length = folder, cfg.agent.episode.tokens
        self.limits = cfg.agent.episode
        self.operations = operations_told(toolbox, cfg.agent.episode.operations_told and row == "tools")
        self.layout = layout_of(self.model, mask_size=cfg.sft.mask_size, max_length=cfg.agent.episode.tokens)
        self.mixture = None
        if self.referring:
            shares = {"referring": 1.0, "extra": 1.0}
            self.mixture = Mixture(
                data.sources(inputs["data"], "train", list(shares)),
                shares,
                questions=cfg.sft.questions_per_image,
                frames=1,
                seed=cfg.seed,
                turn=conversation.turn,
            )

    def check(self, traces: Sequence[Trace]) -> None:
        """Raise ValueError where a trace can't be learned from, and warn where it can't be played, before
        work is spent."""
        rows.check_lengths(
            self.model, traces, self.folder, question=self._question, max_length=self.max_length
        )
        if dist.rank() == 0:
            rows.warn_of_limits(self.model, traces, self.folder, self.limits)

    def _question(self, trace: Trace) -> str:
        return tokens.first_question(trace.question, self.operations)

    def of(self, part: Part) -> Callable[[int, int], Batch]:
        order = rows.TraceOrder(
            part.traces, picture_share=self.picture_share, seed=dist.seed_of(self.seed, part.name)
        )
        each = self.batch - self.referring

        def make(step: int, micro: int) -> Batch:
            of_step = [order.number(number) for number in range(step * each, (step + 1) * each)]
            place, places = micro * dist.world_size() + dist.rank(), self.micros * dist.world_size()
            read = [
                rows.read_trace(
                    self.model, trace, self.folder, question=self._question(trace), max_length=self.max_length
                )
                for trace in shared_out(of_step, place, places)
            ]
            # several questions each: the longest rows
            if self.mixture is not None and micro == self.micros - 1:
                referring_rows = self.mixture.rows(part.first + step, 0, batch=self.referring, micros=1)
                read += [read_row(row, self.model.tokenizer, self.layout) for row in referring_rows]
            return batch_of(read, self.model.tokenizer, self.layout)

        return make


def shared_out(traces: Sequence[Trace], part: int, parts: int) -> list[Trace]:
    """Return the traces of a step that micro-batch `part` of `parts`, on all processes, holds: the shortest
    in the first, the longest in the last, since all rows of one are padded alike."""
    ordered = sorted(traces, key=lambda trace: sum(len(turn.text) for turn in trace.turns))
    return ordered[len(ordered) * part // parts : len(ordered) * (part + 1) // parts]


def _right(
    cfg: Config, policy: AgentPolicy, toolbox: Toolbox, row: str, families: Sequence[str]
) -> list[bool]:
    """Return which held-out questions of these families are answered right, the same ones every time."""
    episode, each = cfg.agent.episode, cfg.agent.sft.checked
    if not families or not each:
        return []
    policy.model.eval()
    draw = partial(draw_question, seed=cfg.seed, split="val", tile=toolbox.tile)
    # families take turns, so that a batch has some of each
    questions = [draw(family, index=CHECKED_FROM + i) for i in range(each) for family in families]
    operations = operations_told(toolbox, episode.operations_told and row == "tools")
    forbidden = tokens.call_openers(policy.model) if row == "direct" else ()

    def right(some: Sequence[Question]) -> Iterator[bool]:
        requests = [request_of(question, operations) for question in some]
        played = play(
            policy.model,
            toolbox,
            requests,
            limits=episode,
            forbidden=forbidden,
        )
        return (outcome_of(question, rollout).right for question, rollout in zip(some, played, strict=True))

    return dist.by_turns(questions, episode.batch, right)
