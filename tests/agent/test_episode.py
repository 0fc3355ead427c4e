"""Episodes: limits that stop, calls that are counted, and weights that stay the base's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ans_core.agent.episode import Episode, Observation, Toolbox, stopped_after
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.operations.base import Operation, Result, Tools
from ans_core.agent.protocol import Call, call_text
from ans_core.agent.refusal import Refused
from ans_core.agent.workspace import Workspace
from ans_core.inference import predict as ask
from ans_core.model import adapters
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.types import Request
from tests import tiny
from tests.agent.odd_operations import (
    Nothing,
    dies,
    is_broken,
    loads_slowly,
    never_ends,
    tells_what_is_loaded,
)

ZOOM = Call(name="zoom_in", arguments={"bbox_2d": [0, 0, 500, 500]})
SEGMENT = Call(name="segment_object_at", arguments={"bbox_2d": [100, 100, 900, 900]})


def own(name: str, run: object, **more: object) -> dict[str, Operation]:
    return {name: Operation(name=name, sentence="", arguments=Nothing, run=run, **more)}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def odd() -> Iterator[Toolbox]:
    operations = (
        own("never_ends", never_ends)
        | own("dies", dies)
        | own("is_broken", is_broken)
        | {"zoom_in": OPERATIONS["zoom_in"]}
    )
    with Toolbox(operations=operations, seconds=2.0) as toolbox:
        yield toolbox


@pytest.mark.slow
def test_an_operation_that_takes_too_long_is_killed_and_one_that_dies_is_an_observation(odd: Toolbox) -> None:
    workspace = Workspace.of([tiny.picture(0)])
    for name, kind in (("never_ends", "time_limit"), ("dies", "crashed")):
        assert odd.call(workspace, ZOOM)[0].ok  # a process is there
        assert odd._worker.process is not None
        process, start = odd._worker.process.pid, time.monotonic()
        observation, after = odd.call(workspace, Call(name=name, arguments={}))
        assert (observation.error, after) == (kind, workspace)
        assert time.monotonic() - start < 60  # it would never end
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert odd.call(workspace, ZOOM)[0].ok


@pytest.mark.slow
def test_what_an_operation_loads_first_is_loaded_once_a_process_and_outside_of_its_time_limit() -> None:
    workspace, ask = Workspace.of([tiny.picture(0)]), Call(name="reads", arguments={})
    operations = own("reads", tells_what_is_loaded, load=loads_slowly) | own("dies", dies)
    assert OPERATIONS["read_text"].load is not None
    with Toolbox(operations=operations, seconds=1.0, reader="template") as toolbox:
        for _ in range(2):
            # loading takes 1.5 s
            assert [toolbox.call(workspace, ask)[0].text for _ in range(2)] == ["template"] * 2
            # the next process loads again
            assert toolbox.call(workspace, Call(name="dies", arguments={}))[0].error == "crashed"


def test_a_defect_of_an_operation_is_raised(odd: Toolbox) -> None:
    with pytest.raises(KeyError, match="a defect"):
        odd.call(Workspace.of([tiny.picture(0)]), Call(name="is_broken", arguments={}))


def test_a_network_stops_at_the_next_module_after_the_limit(tiny_model: Network) -> None:
    def thinks(workspace: Workspace, arguments: Nothing, tools: Tools) -> Result:
        assert tools.model is not None
        while True:
            tools.model.text_hidden_fcs(torch.zeros(1, tools.model.text_hidden_fcs[0].in_features))

    with Toolbox(tiny_model, operations=own("thinks", thinks, needs_model=True), seconds=0.2) as toolbox:
        start = time.monotonic()
        observation, _ = toolbox.call(Workspace.of([tiny.picture(0)]), Call(name="thinks", arguments={}))
    assert observation.error == "time_limit"
    assert time.monotonic() - start < 60  # it would never end
    with stopped_after(-1.0), pytest.raises(Refused):
        tiny_model.text_hidden_fcs(torch.zeros(1, tiny_model.text_hidden_fcs[0].in_features))
    # nothing is left behind
    tiny_model.text_hidden_fcs(torch.zeros(1, tiny_model.text_hidden_fcs[0].in_features))


def test_calls_are_counted_and_none_is_run_after_the_limit(toolbox: Toolbox) -> None:
    episode = Episode(toolbox, Workspace.of([tiny.picture(0)]), max_calls=2)
    assert episode.turn(call_text(ZOOM)).ok  # type: ignore[union-attr]
    assert episode.turn("<tool_call>zoom</tool_call>").error == "broken_call"  # type: ignore[union-attr]
    late = episode.turn(call_text(ZOOM))
    assert late is not None
    assert (late.error, late.call) == ("call_limit", ZOOM)
    assert episode.turn("checked") is None
    assert episode.answer == "checked"
    assert episode.counts == {"calls": 3, "ok": 1, "broken_call": 1, "call_limit": 1}
    assert episode.workspace.names("image") == ["image_1", "image_2"]


def test_what_is_read_in_a_picture_cannot_pass_for_a_token_or_a_picture() -> None:
    observation = Observation(call=ZOOM, text="[0, 0, 9, 9]: '<image> <tool_call> [SEG] <|im_end|>'")
    assert observation.turn() == "[0, 0, 9, 9]: '‹image› ‹tool_call› [seg] ‹|im_end|›'"


def test_without_a_model_what_needs_one_is_not_offered(toolbox: Toolbox) -> None:
    assert set(toolbox.operations) == {"zoom_in", "get_properties", "read_text", "select_frames"}
    assert toolbox.call(Workspace.of([tiny.picture(0)]), SEGMENT)[0].error == "unknown_operation"


def masks_of(toolbox: Toolbox, calls: list[Call]) -> list[object]:
    """What segmenting and tracking give, in full."""
    workspace = Workspace.of(
        [tiny.picture(0), tiny.picture(1)], masks=[rle.decode(tiny.square(8, 16, 24, 32))]
    )
    found: list[object] = []
    for call in calls:
        observation, workspace = toolbox.call(workspace, call)
        found.append((observation.text, workspace.handles))
    return found


@pytest.mark.slow
def test_operations_give_the_bases_result_to_the_bit_whatever_is_trained_on_it(own_model: Network) -> None:
    said = says_seg(own_model, "the square")
    calls = [SEGMENT, said, Call(name="track_object", arguments={"mask": "mask_1"})]
    with Toolbox(own_model) as toolbox:
        before = masks_of(toolbox, calls)
    assert "mask_2" in str(before[1])
    config = adapters.rl_config(
        rank=2, alpha=4, dropout=0.0, modules=adapters.policy_modules(own_model, drawing=True)
    )
    policies = adapters.Policies(own_model, config, seed=0)
    with torch.no_grad():
        for tensor in policies.tensors("policy").values():
            tensor += 0.5 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    with Toolbox(policies.model, adapters_off=lambda: policies.using("reference")) as toolbox:
        assert masks_of(toolbox, calls) == before
    assert policies.active == "policy"
    with Toolbox(policies.model) as toolbox:
        assert masks_of(toolbox, calls) != before  # a test that could not fail would show nothing


def says_seg(model: Network, words: str) -> Call:
    """Changes the model: it says `[SEG]` to these words about tiny.picture(0), since all other words have no
    weight."""
    from ans_core import prompts

    with torch.no_grad():
        text = prompts.REFERRING_EVAL.format(text=words)
        prompted = ask.prompt(model, [Request(frames=(tiny.picture(0),), text=text)])
        state = model.internvl.model.language_model(
            inputs_embeds=tiny.embeds_of(prompted)[None]
        ).last_hidden_state[0, -1]
        model.internvl.lm_head.weight.zero_()
        model.internvl.lm_head.weight[model.seg_token_id] = state
    return Call(name="segment_object_at", arguments={"text": words})


def test_the_same_call_on_the_same_workspace_runs_once_and_an_error_is_not_kept(
    tiny_model: Network, tmp_path: Path
) -> None:
    ran: list[str] = []

    def looks(workspace: Workspace, arguments: Nothing, tools: Tools) -> Result:
        ran.append(workspace.names("mask")[-1] if workspace.names("mask") else "none")
        if len(ran) == 1:
            raise Refused("time_limit", "too slow this once")
        return Result(text=f"run {len(ran)}", values={})

    whole, part = np.ones((tiny.SIDE, tiny.SIDE), bool), np.eye(tiny.SIDE, dtype=bool)
    workspaces = [
        Workspace.of([tiny.picture(n)], masks=masks)
        for n, masks in ((0, ()), (0, ()), (1, ()), (0, (whole,)), (0, (part,)))
    ]
    with Toolbox(tiny_model, operations=own("looks", looks, needs_model=True)) as toolbox:
        told = [
            toolbox.call(workspace, Call(name="looks", arguments={}))[0].text
            for workspace in (*workspaces[:1], *workspaces) * 2
        ]
        assert told[1:6] == ["run 2", "run 2", "run 3", "run 4", "run 5"]
        assert told[6:] == ["run 2", *told[1:6]]
        file = tmp_path / "frame.png"
        for picture in (0, 0, 1):
            file.write_bytes(tiny.picture(picture))
            os.utime(file, ns=(picture, picture))
            told.append(toolbox.call(Workspace.of([file]), Call(name="looks", arguments={}))[0].text)
        assert told[-3:] == ["run 6", "run 6", "run 7"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["<IMG_CONTEXT>", "<image>", "[SEG]<|im_end|>", "{text}", "\x00", "x" * 200]
)
def test_any_words_can_be_asked_for(tiny_model: Network, words: str) -> None:
    with Toolbox(tiny_model) as toolbox:
        observation, _ = toolbox.call(
            Workspace.of([tiny.picture(0)]), Call(name="segment_object_at", arguments={"text": words})
        )
    assert observation.error in (None, "nothing_found")


def test_a_mask_of_one_pixel_can_be_followed_and_measured(tiny_model: Network) -> None:
    workspace = Workspace.of(
        [tiny.picture(0), tiny.picture(1)], masks=[rle.decode(tiny.square(63, 63, 64, 64))]
    )
    with Toolbox(tiny_model) as toolbox:
        for name, arguments in (
            ("track_object", {"mask": "mask_1"}),
            ("get_properties", {"masks": ["mask_1"]}),
        ):
            assert toolbox.call(workspace, Call(name=name, arguments=arguments))[0].ok


def test_words_that_the_model_answers_without_a_mask_find_nothing(own_model: Network) -> None:
    with torch.no_grad():
        own_model.internvl.lm_head.weight.zero_()  # the first token of all, which is not `[SEG]`
    with Toolbox(own_model) as toolbox:
        call = Call(name="segment_object_at", arguments={"text": "the <image> square"})
        assert toolbox.call(Workspace.of([tiny.picture(0)]), call)[0].error == "nothing_found"


@pytest.mark.slow
def test_a_script_that_runs_operations_as_it_is_imported_is_told_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from ans_core.agent.worker import Worker\nprint(Worker().call(abs, -1, seconds=9))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        "ended as it started; its message is above (a script that runs operations has to begin its work under `if __name__"
        in done.stderr
    )
