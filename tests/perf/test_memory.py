"""Memory and operations by formula, against what autograd keeps and torch counts."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ans_core import precision
from ans_core.checkpoints.published import build_meta
from ans_core.data.branches import branch_places
from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.model import adapters
from ans_core.model.footprint import (
    MicroBatch,
    Operations,
    Parameters,
    TextShape,
    Work,
    activation_bytes,
    held_bytes,
    layer_bytes,
    parameters_of,
    peak_flops,
    recomputed_layers,
    saved_bytes,
)
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from perf import activations
from tests import tiny


def test_bytes_follow_from_the_three_counts():
    """P 100, F 10, A 6: weights 2*90 + 4*16 = 244, gradients 4*16, AdamW 8*16. ZeRO-2 on 8 GPUs: (4*16,
    12*16) / 8. ZeRO-3: all / 8."""
    counts = Parameters(total=100, full=10, adapters=6)
    assert (counts.trained, counts.base, counts.delta, counts.training_state) == (16, 200, 64, 192)
    for stage, parts in ((0, (244, 64, 128)), (2, (244, 8, 24)), (3, (30.5, 8, 24))):
        assert tuple(counts.held(deepspeed_stage=stage, gpus=8).values()) == parts
    with_teacher = held_bytes(frozen=200, trained=16, deepspeed_stage=0, gpus=8, teacher=True)
    assert with_teacher == {"weights": 200 + 2 * 64, "gradients": 64, "optimizer": 128}


@pytest.mark.slow
def test_trained_parameters_of_the_1b():
    """Qwen2.5-0.5B: a layer's linears are q and o 896 -> 896, k and v 896 -> 128, gate and up 896 -> 4864,
    down back."""
    layer = 128 * ((896 + 896) * 2 + (896 + 128) * 2 + (896 + 4864) * 3)
    counts = parameters_of(build_meta("sa2va-1b"), rank=128)
    assert counts.adapters == 24 * layer
    projector = 2 * 4096 + (4096 * 896 + 896) + (896 * 896 + 896)
    seg_head = (896 * 896 + 896) + (896 * 256 + 256)
    assert counts.full == 2 * 151679 * 896 + projector + seg_head + sum(
        p.numel() for p in build_meta("sa2va-1b").sam2.sam_mask_decoder.parameters()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["internvl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("half", "dropout"), [(False, 0.0), (False, 0.1), (True, 0.0), (True, 0.1)])
def test_what_a_layer_keeps_is_what_the_formula_says(
    kind: str, half: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
):
    """The difference of three layers and one, as autograd keeps it. bf16 also keeps copies of LoRA's weights,
    which are no activations."""
    monkeypatch.setattr(precision, "FEW", 0)  # the fused kernel alone, as on a GPU
    monkeypatch.setattr(precision, "FUSED", torch.bfloat16 if half else torch.float32)

    def kept(layers: int) -> tuple[int, TextShape]:
        language = {"hidden": 64, "layers": layers, "heads": 4, "kv_heads": 2, "mlp": 160}
        vision = {"image_size": 16, "patch_size": 8, "hidden": 32, "layers": 1, "heads": 2, "mlp": 64}
        words = build_tokenizer(tiny.TEXTS * 5, vocabulary=300, kind=kind)
        config = tiny_config(
            kind=kind,
            vision=vision,
            language=language,
            grounding=tiny.GROUNDING,
            tokenizer=words,
            template="qwen_chat",
            video_frames=2,
        )
        model = build_tiny(config, words, seed=0)
        if half:
            model.vlm.bfloat16()
        adapters.prepare_sft(model, adapters.lora_config(rank=8, alpha=8, dropout=dropout), seed=0)
        branch = torch.tensor([[0] * 100 + [1] * 60 + [2] * 40] * 2)
        ids = torch.randint(5, 100, branch.shape)
        packed = Packed(
            input_ids=ids, position_ids=torch.arange(200).expand_as(ids), branch=branch, loss_mask=branch > 0
        )
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            return saved_bytes(lambda: model.hidden_states(packed, [None] * 2), own), TextShape.of(model)

    (one, _), (three, text) = kept(1), kept(3)
    batch = MicroBatch(rows=2, tokens=200, learned=100)
    formula = layer_bytes(text, batch, rank=8, dropout=bool(dropout), half=half, dropout_mask=4)
    copies = 2 * 8 * (4 * (64 + 64) - 2 * 32 + 3 * (64 + 160)) if half else 0
    assert formula + copies == (three - one) // 2


@pytest.mark.slow
def test_operations_of_a_step_are_those_of_its_parts():
    """Text alone without masks: 2 a weight and token forward, 2 backward for inputs, 2 more for LoRA; the
    head 6 a learned token."""
    counted = Operations(build_meta("sa2va-1b"), rank=128)
    layer = (896 + 896) * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    lora = 128 * ((896 + 896) * 2 + (896 + 128) * 2 + (896 + 4864) * 3)
    work = Work.planned(MicroBatch(rows=2, tokens=1000, learned=50))
    attention = 24 * 2 * 896 * 1000  # scores and values: 4 L H a token, half of it masked
    language = 2000 * (24 * (4 * (layer + lora) + 2 * lora) + 3 * attention)
    assert sum(counted.of(work).values()) == pytest.approx(language + 100 * 6 * 151679 * 896, rel=1e-9)
    for recomputed, share in ((None, 1.0), (6, 0.25)):
        again = share * 2000 * (24 * 2 * (layer + lora) + attention)
        assert sum(counted.of(work, recomputed=recomputed).values()) == pytest.approx(
            language + again + 100 * 6 * 151679 * 896, rel=1e-9
        )


def counted_by_torch(model: Network, grids: tuple[tuple[int, int], ...], tokens: int) -> tuple[int, int]:
    """Count the vision tower forward, and the language model forward and backward, on the meta device."""
    with FlopCounterMode(display=False) as seen, torch.no_grad():
        if model.config.kind == "internvl":
            model.backbone.features(torch.zeros(len(grids), 3, 448, 448, device="meta"), grids)
        else:
            vision, patches = (
                model.vlm.config.vision_config,
                sum(rows * columns for rows, columns in grids) * 4,
            )
            tower = model.vlm.model.visual
            # its table is real
            tower.rotary_pos_emb.register_forward_pre_hook(lambda module, args: (torch.zeros(1), *args[1:]))
            tower.rotary_pos_emb.register_forward_hook(lambda module, args, out: [x.to("meta") for x in out])
            pixels = torch.zeros(
                patches, 3 * vision.temporal_patch_size * vision.patch_size**2, device="meta"
            )
            tower(pixels, grid_thw=torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids]))
    places = torch.arange(tokens, device="meta").expand(
        *(() if model.config.kind == "internvl" else (3,)), 1, -1
    )
    embeds = torch.zeros(
        1, tokens, model.vlm.config.text_config.hidden_size, device="meta", requires_grad=True
    )
    allowed = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="meta")
    with FlopCounterMode(display=False) as read:
        out = model.vlm.model.language_model(
            inputs_embeds=embeds, position_ids=places, attention_mask=allowed, use_cache=False
        )
        out.last_hidden_state.sum().backward()
    return seen.get_total_flops(), read.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "grids"), [("sa2va-1b", ((16, 16),) * 3), ("sa2va-qwen25-3b", ((18, 25), (9, 12)))]
)
def test_operations_are_those_that_torch_counts(name: str, grids: tuple[tuple[int, int], ...]):
    """Vision tower with its merger, windows that are cut off too, and the language model with LoRA, at
    published sizes. torch counts the masked half of the scores."""
    model = build_meta(name)
    adapters.prepare_sft(model, adapters.lora_config(rank=16, alpha=16, dropout=0.0), seed=0)
    work = Work(tokens=300, pairs=300.0**2, learned=0, grids=grids)
    formula = Operations(model).of(work)
    seen, read = counted_by_torch(model, grids, 300)
    assert formula["frozen encoders"] == pytest.approx(seen, rel=1e-9)
    assert formula["language"] + formula["attention"] == pytest.approx(read, rel=1e-9)
    assert Operations(build_meta(name), rank=16).of(work) == formula


def test_a_batch_is_counted_as_it_is_read():
    """A prefix of 3, branches of 4 and 5 tokens, padding of 2: 7 tokens causal, then 5 after the prefix."""
    row = tiny.row(
        Turn(question="Describe region1.", answer="a red circle.", regions=(tiny.square(0, 0, 40, 40),))
    )
    model = tiny.build()
    batch = collate([row], model.tokenizer, tiny.layout(model))
    branch = torch.tensor([[0] * 3 + [1] * 4 + [2] * 5 + [-1] * 2])
    padded = torch.nn.functional.pad(branch, (0, batch.branch.shape[1] - branch.shape[1]), value=-1)
    work = Work.of(replace(batch, branch=padded, places=branch_places(branch)))
    assert (work.tokens, work.pairs) == (12, 7**2 / 2 + 5 * 3 + 5**2 / 2)
    assert (work.frames, work.masks, work.learned) == (0, 0, batch.learned.shape[1])
    assert work.grids == batch.views[0].grids


@pytest.mark.slow
def test_as_few_layers_are_computed_again_as_fit():
    model = build_meta("sa2va-1b")
    batch = MicroBatch(rows=2, tokens=4096, learned=300, grids=((16, 16),) * 13, masks=5)

    def peak(recomputed: int | None) -> int:
        return sum(
            activation_bytes(model, batch, rank=128, dropout=True, half=True, recomputed=recomputed).values()
        )

    def chosen(room: int) -> int:
        return recomputed_layers(model, [batch], room=room, rank=128, dropout=True, half=True)

    peaks = [peak(count) for count in range(25)]
    assert peaks[:23] == sorted(peaks[:23], reverse=True)
    # two are computed again at once: of the last two nothing is saved
    assert min(peaks) == peaks[22] < peaks[24] == peak(None)
    assert [chosen(peaks[0]), chosen(peaks[7]), chosen(peaks[7] - 1), chosen(0)] == [0, 7, 8, 22]


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA Nothing", None),
    ],
)
def test_a_gpus_peak_is_found_by_its_name(card: str, peak: float | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "half", "layers"])
def test_the_peak_of_a_step_is_near_the_formula(checkpointing: str):
    """All tensors that live, counted as they are made. half: 4 of 8 layers. Where all are recomputed the
    formula is cautious."""
    formula, counted = activations.measure(128, 352, 8, 2, 512, checkpointing)
    assert counted == pytest.approx(formula, rel=0.35 if checkpointing == "layers" else 0.06)
    assert counted <= 1.06 * formula
