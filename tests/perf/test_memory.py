import pytest
import torch

from ans_core import precision
from ans_core.checkpoints.published import build_meta
from ans_core.model import adapters
from ans_core.model.footprint import MicroBatch, TextShape, flops, kept_bytes, layer_bytes
from ans_core.model.needs import Needs, needs
from ans_core.model.packing import Packed
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from tests import tiny


def test_bytes_follow_from_the_three_counts():
    """P 100, F 10, A 6, 8 GPUs: 2*90 + 4*16 + 16*16/8 = 276 on each."""
    need = Needs(parameters=100, full=10, adapters=6, gpus=8)
    assert (need.trained, need.base, need.delta, need.training_state, need.per_gpu) == (16, 200, 64, 192, 276)


def test_trained_parameters_of_the_1b():
    """Qwen2.5-0.5B: a layer's linears are q and o 896 -> 896, k and v 896 -> 128, gate and up 896 -> 4864, down back."""
    layer = 128 * ((896 + 896) * 2 + (896 + 128) * 2 + (896 + 4864) * 3)
    need = needs(build_meta("sa2va-1b"), rank=128, gpus=8)
    assert need.adapters == 24 * layer
    projector = 2 * 4096 + (4096 * 896 + 896) + (896 * 896 + 896)
    seg_head = (896 * 896 + 896) + (896 * 256 + 256)
    assert need.full == 2 * 151679 * 896 + projector + seg_head + sum(
        p.numel() for p in build_meta("sa2va-1b").sam2.sam_mask_decoder.parameters()
    )


@pytest.mark.parametrize(("half", "dropout"), [(False, 0.0), (False, 0.1), (True, 0.0), (True, 0.1)])
def test_what_a_layer_keeps_is_what_the_formula_says(half: bool, dropout: float, monkeypatch: pytest.MonkeyPatch):
    """The difference of three layers and one, as autograd keeps it. bf16 also keeps copies of LoRA's weights, which are no activations."""
    monkeypatch.setattr(precision, "FEW", 0)  # the fused kernel alone, as on a GPU
    monkeypatch.setattr(precision, "FUSED", torch.bfloat16 if half else torch.float32)

    def kept(layers: int) -> tuple[int, TextShape]:
        language = {"hidden": 64, "layers": layers, "heads": 4, "kv_heads": 2, "mlp": 160}
        vision = {"image_size": 16, "patch_size": 8, "hidden": 32, "layers": 1, "heads": 2, "mlp": 64}
        words = build_tokenizer(tiny.TEXTS * 5, vocabulary=300)
        config = tiny_config(
            vision=vision, language=language, grounding=tiny.GROUNDING, tokenizer=words, template="qwen_chat", video_frames=2
        )
        model = build_tiny(config, words, seed=0)
        if half:
            model.internvl.bfloat16()
        adapters.prepare_sft(model, adapters.lora_config(rank=8, alpha=8, dropout=dropout), seed=0)
        branch = torch.tensor([[0] * 100 + [1] * 60 + [2] * 40] * 2)
        ids = torch.randint(5, 100, branch.shape)
        packed = Packed(input_ids=ids, position_ids=torch.arange(200).expand_as(ids), branch=branch, loss_mask=branch > 0)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            return kept_bytes(lambda: model.hidden_states(packed, [None] * 2), own), TextShape.of(model)

    (one, _), (three, text) = kept(1), kept(3)
    batch = MicroBatch(rows=2, tokens=200, learned=100, tiles=0, masks=0)
    formula = layer_bytes(text, batch, rank=8, dropout=bool(dropout), half=half, dropout_mask=4)
    copies = 2 * 8 * (4 * (64 + 64) - 2 * 32 + 3 * (64 + 160)) if half else 0
    assert formula + copies == (three - one) // 2


@pytest.mark.slow
def test_operations_of_a_step_are_those_of_its_parts():
    """Text alone without masks: 2 a weight and token forward, 2 backward for inputs, 2 more for LoRA; the head 6 a learned token."""
    model = build_meta("sa2va-1b")
    layer = (896 + 896) * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    lora = 128 * ((896 + 896) * 2 + (896 + 128) * 2 + (896 + 4864) * 3)
    batch = MicroBatch(rows=2, tokens=1000, learned=50, tiles=0, masks=0)
    attention = 24 * 2 * 896 * 1000  # scores and values: 4 L H a token, half of it masked
    language = 2000 * (24 * (4 * (layer + lora) + 2 * lora) + 3 * attention)
    assert sum(flops(model, batch, rank=128, checkpointing=False).values()) == pytest.approx(language + 100 * 6 * 151679 * 896, rel=1e-9)
    again = 2000 * (24 * 2 * (layer + lora) + attention)
    assert sum(flops(model, batch, rank=128, checkpointing=True).values()) == pytest.approx(
        language + again + 100 * 6 * 151679 * 896, rel=1e-9
    )
