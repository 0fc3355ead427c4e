"""The agent's adapter over a frozen base, and the rows that it learns from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from ans_core.agent import rows, tokens
from ans_core.agent.crops import CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import request_of
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.operations.zoom_in import ZOOM_IN
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.policy import (
    AGENT,
    AgentPolicy,
    add_call_tokens,
    load_base,
    load_policy,
    reader_of,
    set_resolution,
    warn_of_other_reader,
)
from ans_core.agent.protocol import Call, call_text, call_tokens
from ans_core.agent.world import draw_question
from ans_core.agent.world.bank import QuestionBank
from ans_core.agent.world.trace_file import Trace, read_traces
from ans_core.agent.world.traces import write_synthetic_traces
from ans_core.checkpoints import checkpoint
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.data.views import Patches
from ans_core.inference.predict import predict
from ans_core.inference.sa2va import Sa2VA
from ans_core.model import quantization
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.rl.rollout import Group, exact_head, pack
from ans_core.types import Request
from tests import tiny
from tests.golden import GOLDEN
from tests.model.test_quantization import quantizes

LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}
ASKED = [
    Request(frames=(tiny.picture(i),), text="<image>\nPlease segment the red square in this image.")
    for i in range(3)
]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, toolbox: Toolbox) -> tuple[Path, list[Trace]]:
    folder = tmp_path_factory.mktemp("traces")
    write_synthetic_traces(
        folder,
        QuestionBank(("easy", "pattern", "text"), seed=3, tile=toolbox.tile),
        dict.fromkeys(["easy", "pattern", "text"], 10),
        split="train",
        toolbox=toolbox,
        provenance={},
    )
    return folder, read_traces(folder)


def asked(trace: Trace) -> str:
    return tokens.first_question(trace.question)


@pytest.mark.slow
def test_what_is_learned_is_what_should_be_said(own_model: Network, traces: tuple[Path, list[Trace]]) -> None:
    add_call_tokens(own_model, OPERATIONS)
    folder, known = traces
    assert {trace.kind for trace in known} == {"golden", "trap", "self_correction"}
    assert {trace.kind for trace in rows.lessons(known)} == {"golden", "self_correction"}
    for trace in known:
        for taught in (trace, rows.direct(trace)):
            read = rows.read_trace(
                own_model, taught, folder, question=tokens.first_question(taught.question), max_length=1000
            )
            packed = read.packed
            said = "".join(turn.text + "<|im_end|>" for turn in taught.turns if turn.trainable)
            learned = [
                number for number, is_learned in zip(packed.ids, packed.learned, strict=True) if is_learned
            ]
            assert own_model.tokenizer.decode(learned) == said
            assert own_model.tokenizer.decode(packed.ids).count("assistant\n") == len(taught.turns) // 2
            slots = packed.ids.count(own_model.image_token_id)
            assert slots == sum(read.views.tokens) == 16 * sum(len(turn.pictures) for turn in taught.turns)
    with pytest.raises(ValueError, match=r"trace .* tokens > max_length 20"):
        rows.read_trace(own_model, known[0], folder, question=asked(known[0]), max_length=20)
    longest = max(
        len(rows.read_trace(own_model, t, folder, question=asked(t), max_length=1000).packed.ids)
        for t in known
    )
    rows.check_lengths(own_model, known, folder, question=asked, max_length=longest)
    with pytest.raises(
        ValueError,
        match=rf"traces are longer than agent.episode.tokens, {longest - 1}: .*\({longest} tokens\)",
    ):
        rows.check_lengths(own_model, known, folder, question=asked, max_length=longest - 1)


def test_traces_that_no_episode_can_repeat_are_named_before_they_are_learned(
    own_model: Network, traces: tuple[Path, list[Trace]], caplog: pytest.LogCaptureFixture
) -> None:
    add_call_tokens(own_model, OPERATIONS)
    folder, known = traces
    (call, seen), answer = known[12].turns[1:3], known[12].turns[-1]
    assert (call.role, seen.role, len(seen.pictures)) == ("assistant", "user", 1)
    golden = known[12].model_copy(
        update={"trace_id": "fits", "turns": (known[12].turns[0], call, seen, answer)}
    )
    words = golden.model_copy(
        update={
            "trace_id": "words",
            "turns": (*golden.turns[:3], answer.model_copy(update={"text": "so " * 60})),
        }
    )
    calls = golden.model_copy(
        update={"trace_id": "calls", "turns": (golden.turns[0], *(call, seen) * 3, answer)}
    )
    unlearned = words.model_copy(
        update={
            "trace_id": "unlearned",
            "turns": (*golden.turns[:3], words.turns[3].model_copy(update={"trainable": False})),
        }
    )
    limits = EpisodeSettings(calls=2, pictures=16, turn_tokens=48)
    rows.warn_of_limits(own_model, [golden, unlearned], folder, limits)
    assert caplog.text == ""
    rows.warn_of_limits(own_model, [golden, words, calls, unlearned], folder, limits)
    length = len(tokens.turn_ids(own_model, words.final_answer))
    assert (
        f"no episode can repeat 2 of 4 traces within the limits of agent.episode: words (turn 3 has {length} tokens, of 48)"
        in caplog.text
    )
    assert "calls (3 calls, of 2)" in caplog.text
    assert rows.beyond(own_model, calls, EpisodeSettings(calls=3, pictures=3)) == "4 pictures, of 3"
    assert rows.beyond(own_model, rows.direct(calls), limits) is None


def test_traps_alone_teach_nothing_and_are_refused(traces: tuple[Path, list[Trace]]) -> None:
    traps = [trace for trace in traces[1] if trace.kind == "trap"]
    with pytest.raises(
        ValueError, match=rf"all of {len(traps)} traces are traps, of which nothing is learned"
    ):
        rows.lessons(traps)


def test_a_played_plan_is_read_as_its_trace_is(
    own_model: Network, traces: tuple[Path, list[Trace]], toolbox: Toolbox
) -> None:
    add_call_tokens(own_model, OPERATIONS)
    folder, known = traces
    trace = next(t for t in known if t.family == "text" and t.kind == "self_correction")
    index = int(trace.trace_id.rpartition("/")[2])
    question = draw_question("text", seed=3, split="train", index=index)
    plan = [turn.text for turn in trace.turns if turn.role == "assistant"]
    (played,) = play(own_model, toolbox, [request_of(question)], limits=EpisodeSettings(), plans=[plan])
    read = rows.read_trace(
        own_model, trace, folder, question=tokens.first_question(trace.question), max_length=1000
    )
    assert [*played.prefix, *(i for segment in played.rollout for i in segment.ids)] == read.packed.ids
    assert torch.equal(torch.cat([crop.views(own_model).pixels for crop in played.crops]), read.views.pixels)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "copies"])
def test_the_base_is_the_base_to_the_bit_and_an_adapter_comes_back_from_its_file(
    tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    model = tiny.build()
    before = predict(model, ASKED, max_tokens=8, batch=3)
    checkpoint.save(model, tmp_path / "base", metadata={})
    count = model.vocabulary
    new = add_call_tokens(model, OPERATIONS)
    assert len(new) == len(call_tokens(OPERATIONS)) == model.vocabulary - count
    assert (
        len(model.vlm.lm_head.weight)
        == model.config.backbone["text_config"]["vocab_size"]
        == model.vocabulary
    )
    assert predict(model, ASKED, max_tokens=8, batch=3) == before
    taught = sorted({*new, *tokens.said_with(model, ["red"])})
    policy = AgentPolicy(model, lora=lora, rows=taught, seed=1)
    parameters = policy.adapters.parameters(AGENT)
    assert sum("q_proj" in name and name.endswith("weight") for name in parameters) == len(
        model.vlm.model.language_model.layers
    ) * (2 if lora else 1)
    assert {p for p in model.parameters() if p.requires_grad} == set(parameters.values())
    assert sum("trainable_tokens_delta" in name for name in parameters) == 2
    for number, p in enumerate(parameters.values()):
        p.data += torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    after = predict(model, ASKED, max_tokens=8, batch=3)
    assert after != before
    with policy.base():
        assert predict(model, ASKED, max_tokens=8, batch=3) == before
    assert all(p.requires_grad for p in parameters.values())
    policy.save(tmp_path / "agent", base_hash=checkpoint.weights_hash(tmp_path / "base"), about={})
    again = load_policy(tmp_path / "base", tmp_path / "agent", operations=OPERATIONS)
    assert predict(again.model, ASKED, max_tokens=8, batch=3) == after
    with again.base():
        assert predict(again.model, ASKED, max_tokens=8, batch=3) == before


def _read(policy: AgentPolicy, episodes: Sequence[PlayedEpisode]) -> Float[Tensor, "M V"]:
    """Return the logits of what was said in episodes."""
    model, features = policy.model, CropFeatures(policy.model)
    logits = []
    for episode in episodes:
        packed = Packed(**pack([Group(prefix=episode.prefix, rollouts=(episode.rollout,))], pad_id=0)[0])
        with torch.no_grad(), model.inference_autocast():
            image = ImageFeatures.joined(
                [model.project(of) for of in features.of([episode.overviews[0], *episode.crops[1:]])]
            )
            at, place = packed.loss_mask.nonzero(as_tuple=True)
            logits.append(model.logits(model.hidden_states(packed, [image])[at, place - 1]).float())
    return torch.cat(logits)


@quantizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "copies"])
def test_an_agent_in_8_bits_says_what_it_says_in_full_and_its_base_is_the_base_in_8_bits(
    tmp_path: Path, lora: dict[str, Any] | None, dtype: torch.dtype, toolbox: Toolbox
) -> None:
    """What the one in full says after a look is read by both. Measured: logits of spread 1.7 move by .057 to
    .075, and .90 to .98 of the tokens stay the most likely ones of a model that knows nothing."""
    base = tmp_path / "base"
    checkpoint.save(tiny.build().to(dtype), base, metadata={})
    model = load_base(base, operations=OPERATIONS)
    policy = AgentPolicy(model, lora=lora, rows=add_call_tokens(model, OPERATIONS), seed=1)
    for number, p in enumerate(policy.adapters.parameters(AGENT).values()):
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    policy.save(tmp_path / "agent", base_hash=checkpoint.weights_hash(base), about={})
    whole, eighth = (
        load_policy(base, tmp_path / "agent", operations=OPERATIONS, quantize=kind) for kind in (None, "int8")
    )
    changed = {name for name, p in eighth.model.named_parameters() if quantization.is_quantized(p)}
    assert len(changed) == 14 * (1 if lora else 2)  # linear layers of the language model, and their copies
    assert all("language_model.layers" in name and "lora" not in name for name in changed)
    look = call_text(Call(name="zoom_in", arguments={"bbox_2d": [0, 0, 500, 500]}))
    played = play(whole.model, toolbox, ASKED, limits=EpisodeSettings(turn_tokens=24), plans=[[look]] * 3)
    full, eight = _read(whole, played), _read(eighth, played)
    assert 0.0 < (full - eight).pow(2).mean().sqrt() < 0.06 * full.std()
    assert (full.argmax(1) == eight.argmax(1)).float().mean() > 0.85
    with eighth.base():
        found = predict(eighth.model, ASKED, max_tokens=8, batch=3)
    plain = load_base(base, operations=OPERATIONS, quantize="int8")
    assert found == predict(plain, ASKED, max_tokens=8, batch=3)
    assert found == predict(Sa2VA.from_pretrained(base, quantize="int8"), ASKED, max_tokens=8, batch=3)


@pytest.mark.slow
@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference outputs")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_an_agent_on_qwen_is_its_base_with_the_adapter_off(kind: str) -> None:
    model = load_base(GOLDEN / kind, operations=OPERATIONS, tiles=(2, 20))
    assert isinstance(model.backbone.cutter, Patches)
    assert (model.backbone.cutter.min_pixels, model.backbone.cutter.max_pixels) == (401408, 4014080)
    small = replace(model.config, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 16)
    model.backbone.cutter = model.backbone.cutter_of(model.backbone.native.config, small)
    before = predict(model, ASKED[:1], max_tokens=4, batch=1)
    policy = AgentPolicy(model, lora=LORA, rows=add_call_tokens(model, OPERATIONS), seed=1)
    for number, p in enumerate(policy.adapters.parameters(AGENT).values()):
        p.data += torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    assert predict(model, ASKED[:1], max_tokens=4, batch=1) != before
    with policy.base():
        assert predict(model, ASKED[:1], max_tokens=4, batch=1) == before


def test_what_is_known_of_an_agent_beside_its_tensors_goes_to_every_place_that_it_is_kept_in(
    own_model: Network,
) -> None:
    """The tiling that it was trained with, and how it was asked; a head that computes in fp32 is not wrapped
    twice."""
    policy = AgentPolicy(own_model, lora={"rank": 2, "alpha": 4, "dropout": 0.0}, rows=[3], seed=0)
    assert policy.about()["tiles"] == []
    set_resolution(policy.model, tiles=(2, 4))
    policy.operations_told = True
    policy.operations = ["zoom_in"]
    token = own_model.tokenizer.convert_ids_to_tokens(3)
    assert policy.about() == {
        "lora": policy.lora, "rows": [3], "tokens": [token], "tiles": [2, 4], "pixels": [],
        "operations_told": True, "operations": ["zoom_in"],
    }  # fmt: skip
    exact_head(policy.model)
    kind = type(policy.model.vlm.lm_head)
    exact_head(policy.model)
    assert type(policy.model.vlm.lm_head) is kind


@pytest.mark.slow
def test_an_agent_keeps_its_tokens_where_operations_are_added_and_is_refused_where_they_changed(
    tmp_path: Path,
) -> None:
    """New tokens have numbers in the order of their names, so those of an operation that comes first would
    move all others."""
    checkpoint.save(tiny.build(), tmp_path / "base", metadata={})
    model = tiny.build()
    policy = AgentPolicy(model, lora=LORA, rows=add_call_tokens(model, OPERATIONS), seed=1)
    policy.operations = list(OPERATIONS)
    policy.save(tmp_path / "agent", base_hash=checkpoint.weights_hash(tmp_path / "base"), about={})
    named = {"count": replace(ZOOM_IN, name="count")} | OPERATIONS
    again = load_policy(tmp_path / "base", tmp_path / "agent", operations=named)
    assert again.model.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    assert again.operations == list(OPERATIONS)
    lacking = {name: operation for name, operation in OPERATIONS.items() if name != "zoom_in"}
    with pytest.raises(
        ValueError, match=r"was trained with operations that are gone \(zoom_in\); train it again"
    ):
        load_policy(tmp_path / "base", tmp_path / "agent", operations=lacking)
    changed = OPERATIONS | {"zoom_in": replace(ZOOM_IN, call_pieces=('{"around": [', "]}"))}
    with pytest.raises(
        ValueError, match="was trained on other tokens: an operation's call_pieces have changed since"
    ):
        load_policy(tmp_path / "base", tmp_path / "agent", operations=changed)


def test_without_another_wish_an_agent_reads_with_what_it_was_trained_with(tmp_path: Path) -> None:
    for name, config in (("read", {"ocr": "template"}), ("unknown", {})):
        checkpoint.save_delta({"weight": torch.ones(1)}, tmp_path / name, base_hash="base", config=config)
    assert [reader_of(tmp_path / "read", asked) for asked in (None, "rapidocr")] == ["template", "rapidocr"]
    assert [reader_of(tmp_path / "unknown", asked) for asked in (None, "template")] == [
        "rapidocr",
        "template",
    ]
    with pytest.raises(ValueError, match=r"holds no delta\.json"):
        reader_of(tmp_path, None)


@pytest.mark.slow
def test_an_agent_that_learned_from_another_reader_is_told_of(
    tmp_path: Path, own_model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What READ_TEXT read is kept with the adapter, and handed on. Without it, as in older ones, nothing is
    said."""
    checkpoint.save(own_model, tmp_path / "base", metadata={})
    base = checkpoint.weights_hash(tmp_path / "base")
    policy = AgentPolicy(own_model, lora=LORA, rows=add_call_tokens(own_model, OPERATIONS)[:2], seed=0)
    for name, known in (("read", "rapidocr"), ("unknown", None)):
        policy.ocr = known
        policy.save(tmp_path / name, base_hash=base, about={})

    def told(name: str, here: str) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loaded = load_policy(tmp_path / "base", tmp_path / name, operations=OPERATIONS, reader=here)
        assert loaded.ocr == loaded.about().get("ocr") == {"read": "rapidocr", "unknown": None}[name]
        return [str(one.message) for one in found if "READ_TEXT" in str(one.message)]

    assert told("read", "rapidocr") == told("unknown", "template") == []
    assert told("read", "template") == [
        f"the agent in {tmp_path / 'read'} was trained with what READ_TEXT read by rapidocr; now it reads by template, so the"
        " same text may be read otherwise. Set the reader to rapidocr (agent.reader; --reader), or make traces and agent anew."
    ]
    with pytest.warns(
        match=r"the traces were made with .* by rapidocr and template; now it reads by rapidocr, .*\. Set the reader to template"
    ):
        warn_of_other_reader({"rapidocr", "template"}, here="rapidocr", what="the traces were made")
