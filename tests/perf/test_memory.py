from ans_core.checkpoints.published import build_meta
from perf.memory import Needs, needs


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
