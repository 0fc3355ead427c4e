"""params.yaml -> a frozen, validated Config. Only stages read it; below them functions take plain values."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DataSource(Section):
    """One annotated data set on disk, in one of the formats of ans_core/data/formats."""

    name: str
    format: str
    path: str
    split: str = "train"
    repeats: Positive = 1
    files: str = ""
    """Fingerprint of the files as `ans run` saw them last, which writes it: by this DVC notices that they changed."""


class Prepare(Section):
    """Draws the embedded world (unless scenes = 0) and checks every data set before anything is trained."""

    scenes: Count = 6000
    """Still training scenes to draw; 0 draws none (full-size runs on real data)."""
    val_scenes: Count = 300
    test_scenes: Count = 100
    clips: Count = 300
    val_clips: Count = 60
    clip_frames: Positive = 8
    image_size: Positive = 128
    """Pixels on a side of a drawn scene."""
    sources: tuple[DataSource, ...] = ()
    """Real data sets beside (or instead of) the drawn ones: trained on together, evaluated apart."""


class Vision(Section):
    """InternViT + projector. Sizes are those of the profile's own tiny model; published weights bring their own config.json."""

    image_size: Positive = 96
    patch_size: Positive = 8
    hidden: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    mlp: Positive = 384


class Language(Section):
    hidden: Positive = 160
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 2
    mlp: Positive = 448


class Sam(Section):
    """SAM2. The decoder's width stays 256: its 8 heads are hard-coded and narrower ones did not learn (LOG)."""

    image_size: Positive = 128
    embed: Positive = 32
    heads: Positive = 1
    stages: tuple[int, int, int, int] = (1, 2, 3, 1)
    global_blocks: tuple[int, ...] = (4,)
    windows: tuple[int, int, int, int] = (8, 4, 8, 4)
    width: Positive = 256
    memory_layers: Positive = 2
    memory_width: Positive = 64
    max_object_pointers: Positive = 16


class Optim(Section):
    """AdamW, linear warm-up, cosine to zero."""

    steps: Positive
    batch: Positive
    """Images (or clips) per optimizer step, over all processes."""
    lr: Rate
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    warmup: Share = 0.05
    clip_grad: Rate = 1.0
    accumulate: Positive = 1
    save_every: Positive = 100
    """Steps between resumable training states."""


class Base(Section):
    """The model that SFT starts from: published weights, or a tiny one pre-trained here from random weights."""

    source: Literal["scratch", "published"] = "scratch"
    internvl: str = ""
    """published: hub id or local folder in the hub's layout of InternVL2.5 (or of a whole Sa2VA release, then `sam2` stays empty)."""
    sam2: str = ""
    """published: hub id, folder or file of SAM2 weights (sam2_hiera_large.pt)."""
    template: Literal["qwen_chat", "internlm2_chat", "phi3_chat"] = "qwen_chat"
    vision: Vision = Vision()
    language: Language = Language()
    sam: Sam = Sam()
    vision_words: Optim = Optim(steps=1600, batch=32, lr=2e-3)
    """Vision tower alone: the words of region captions from the regions' features."""
    alignment: Optim = Optim(steps=300, batch=32, lr=3e-3, weight_decay=0.01)
    """Word embeddings and projector: image tokens near the words for what they show."""
    sam_images: Optim = Optim(steps=600, batch=16, lr=8e-4, weight_decay=0.01)
    sam_clips: Optim = Optim(steps=300, batch=4, lr=2e-4, weight_decay=0.01)
    """Clips a step; twice as many pictures come beside them."""
    language_text: Optim = Optim(steps=600, batch=16, lr=1e-3)
    questions_per_image: Positive = 8
    mixture: dict[str, Annotated[float, Field(ge=0)]] = {"referring": 0.6, "region_caption": 0.3, "grounded_caption": 0.1}
    """Shares of the language side's pre-training: places and boxes of expressions, captions of regions and of pictures."""
    attention_weight: Annotated[float, Field(ge=0)] = 4.0
    """Of supervised attention beside the language side's text loss: looking at what a question names (LOG)."""
    box_weight: Annotated[float, Field(ge=0)] = 4.0
    """Of the box head beside it: where that is."""
    click_weight: Annotated[float, Field(ge=0)] = 4.0
    """Of the warm-up of text_hidden_fcs beside it: where SAM2 would have to be clicked. 0 leaves it untrained."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of the language side's forward pass (autocast): half the time on a CPU or GPU with bf16 instructions, slower without; weights are
    fp32. The other phases run in fp32: on a CPU their convolutions are faster so (LOG)."""


class Lora(Section):
    rank: Positive = 16
    alpha: Positive = 32
    dropout: Share = 0.0


class Sft(Section):
    """Supervised fine-tuning on the mixture: text cross-entropy + mask losses, as the family trains (LOG, README)."""

    optim: Optim = Optim(steps=1200, batch=16, lr=7e-4)
    decoder_lr: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the learning rate of SAM2's mask decoder. Upstream: 1, at a rate 25 times smaller than a tiny model's."""
    lora: Lora = Lora()
    questions_per_image: Positive = 5
    frames: Positive = 4
    """Frames of a clip that the language model sees."""
    mixture: dict[str, Annotated[float, Field(ge=0)]] = {
        "referring": 0.5, "region_caption": 0.25, "grounded_caption": 0.1, "video": 0.1, "extra": 0.1,
    }  # fmt: skip
    """Shares by kind of data, or by name for data sets of prepare.sources; kinds without data do not count."""
    mask_weight: float = 2.0
    dice_weight: float = 0.5
    mask_points: Positive = 12544
    mask_size: Positive = 256
    """Side of the mask targets that points are sampled from (upstream: 256)."""
    max_length: Positive = 8192
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of the forward pass (autocast); trained tensors are fp32 in any case. fp32 also casts a base in half precision up."""


LoopName = Literal["caption", "mask", "describe", "vqa"]
RewardName = Literal["iou", "soft_iou", "meteor", "meteor_nltk", "format", "confidence", "cider"]
TextRewardName = Literal["meteor", "meteor_nltk", "format", "cider"]


class Rl(Section):
    """Dual-loop GRPO from the merged SFT model, with an EMA teacher as the inverse model."""

    optim: Optim = Optim(steps=150, batch=8, lr=2e-4, weight_decay=0.0, save_every=25)
    modules_lr: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the learning rate of what is trained whole (projector, text_hidden_fcs, SAM2's mask decoder): LoRA stands a higher one."""
    lora: Lora = Lora()
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of the forward pass, rollouts included (autocast); log-probabilities and trained tensors are fp32 in any case."""
    loops: Annotated[dict[LoopName, Rate], Field(min_length=1)] = {"caption": 1.0, "mask": 1.0}
    """Weights. caption: mask -> caption -> mask' (loop 1). mask: caption -> mask -> caption' (loop 2), whose gradient is the noisier: a
    tiny model loses by it at equal weight what SFT learned of expressions (LOG). describe: picture -> caption. vqa: question -> answer."""
    adaptive_loops: Annotated[float, Field(ge=0)] = 0.0
    """Power with which a loop's weight follows what it still misses of its best reward; 0 = fixed weights."""
    expressions: Share = 0.5
    """Of loop 2's samples, the share asked for by a referring expression of the same thing, where the data has one, not by the caption."""
    curriculum: Literal["none", "area", "length", "objects"] = "none"
    """Easy samples first: large masks, short captions, or pictures with few regions."""
    curriculum_start: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the samples, the easiest, that it begins with ..."""
    curriculum_until: Share = 0.5
    """... and share of the steps after which all take part."""
    group: Annotated[int, Field(ge=2)] = 6
    """Rollouts of one sample (G). One alone has no baseline."""
    oversample: Annotated[float, Field(ge=0)] = 0.0
    """Share of further candidates that are rolled out; groups whose rewards are all equal give way to theirs (DAPO's dynamic sampling)."""
    inner_steps: Positive = 1
    """Optimizer steps on the same rollouts (mu)."""
    temperature: Rate = 1.0
    max_tokens: Positive = 24
    logit_guard: Literal["guard", "clip"] = "guard"
    """guard: logits that are not finite are replaced and counted. clip: all are also clamped to +-30, in sampling and learning."""
    objective: Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo"] = "dapo"
    clip_low: Rate = 0.2
    clip_high: Rate = 0.28
    kl: Annotated[float, Field(ge=0)] = 0.02
    kl_words: Annotated[float, Field(ge=0)] = 1.0
    """Of the words around `[SEG]` in loop 2, to the reference (exact, summed over an answer): they are given, so no reward holds them, and
    without it what is asked for is more often said not to be there (LOG)."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean entropy of the tokens said, as a bonus."""
    mask_truncated: bool = False
    """Leaves answers out of the loss that max_tokens cut off."""
    combine_rewards: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    scale_rewards: Literal["group", "batch", "within", "none"] = "within"
    """What advantages are divided by: the deviation of the group, of all rewards, of all rewards around their group's mean, or 1."""
    std_floor: Rate = 0.02
    inverse: Literal["teacher", "policy", "reference"] = "teacher"
    """Who closes the loops. policy: itself. reference: the SFT model, for good."""
    ema: Share = 0.99
    """Decay of the teacher towards the policy, by update."""
    ema_warmup: bool = True
    """Decays of the first updates are smaller, (1 + n) / (10 + n): the teacher follows closely from the start. Over a short run it then is
    the policy of some steps ago, and the two agree on captions that nobody else reads better (LOG); without, it stays near SFT."""
    rewards_caption: Annotated[dict[RewardName, float], Field(min_length=1)] = {"iou": 1.0, "meteor": 1.0}
    rewards_mask: Annotated[dict[RewardName, float], Field(min_length=1)] = {"meteor": 1.0, "iou": 0.5}
    rewards_text: Annotated[dict[TextRewardName, float], Field(min_length=1)] = {"meteor": 1.0}
    """Of the loops describe and vqa."""
    use_llm_judge: bool = False
    """Loop 1's captions are also judged by questions (section `judge`): its part `meteor` becomes METEOR and judgement together."""
    use_llm_judge_loop2: bool = False
    """The same for loop 2."""
    mask_policy: Literal["grid_gaussian", "seg_gaussian", "bernoulli", "multimask", "token"] = "grid_gaussian"
    """Where loop 2's randomness lies (ans_core/rl/mask_policy.py)."""
    mask_grid: Positive = 8
    """grid_gaussian: cells on a side of the grid that mask actions live on."""
    mask_sigma: Rate = 0.5
    """Width that exploration starts with; it is then steered so that a group's masks overlap by 0.75 to 0.92."""
    mask_weight: Annotated[float, Field(ge=0)] = 0.25
    """Of the supervised mask loss beside loop 2."""
    stop_identical: Count = 50
    """Updates in a row in which every group of loop 2 has one mask only, after which the run stops; 0 = never."""
    monitor_every: Count = 10
    """Steps between gradient norms by part of the model; 0 = never."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.0
    """A part's gradient norm, before clipping, at which a monitored step stops the run; 0 = never."""
    samples_every: Count = 25
    """Rollouts between pictures of what was tried and what it earned; 0 = none."""

    @model_validator(mode="after")
    def _possible(self) -> Rl:
        if self.lora.dropout:
            raise ValueError(f"lora.dropout is {self.lora.dropout:g}: what samples would be another policy than what learns; it must be 0")
        for name in ("rewards_caption", "rewards_mask", "rewards_text"):
            if not any(getattr(self, name).values()):
                raise ValueError(f"{name}: all weights are 0, so nothing is rewarded")
        return self


class Judge(Section):
    """Rewards captions by questions about the true one: the stage `judge_questions` writes them, RL asks them."""

    model: str = ""
    """Name at the endpoint; empty = by rules, without a language model (made for the drawn world)."""
    base_url: str = ""
    """Of any OpenAI-compatible endpoint, as in http://127.0.0.1:8000/v1; empty = OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, which stands nowhere else."""
    positives: Positive = 4
    """Questions per caption about details that are there, at most."""
    negatives: Count = 3
    """And about details that are not."""
    concurrency: Positive = 16
    """Calls at a time, over all processes."""
    timeout_s: Rate = 30.0
    """Of one attempt."""
    deadline_s: Rate = 60.0
    """Of all judgements of a step, retries and pauses included; what is not there by then counts as failed."""
    retries: Count = 3
    price_in: Annotated[float, Field(ge=0)] = 0.0
    """USD per million tokens."""
    price_out: Annotated[float, Field(ge=0)] = 0.0
    max_cost_usd: Annotated[float, Field(ge=0)] = 0.0
    """From then on nothing is asked any more, in this run of the stage, over all processes; 0 = no limit."""
    meteor_weight: Annotated[float, Field(ge=0)] = 0.25
    judge_weight: Annotated[float, Field(ge=0)] = 0.75
    on_failure: Literal["meteor", "drop"] = "meteor"
    """Where one judgement of a group is missing, the whole group is paid by METEOR alone, or left out."""
    cache: str = ".ans/judge.sqlite"
    """Replies by what was asked; on a local disk."""

    @model_validator(mode="after")
    def _possible(self) -> Judge:
        address = urlsplit(self.base_url)
        if address.username or address.password or address.query:
            raise ValueError("base_url holds a user, a password or a query, which would stand in logs; give a key by judge.api_key_env")
        if self.base_url and not self.model:
            raise ValueError("base_url is set and model is empty: name the model at that endpoint")
        if self.max_cost_usd and not (self.price_in or self.price_out):
            raise ValueError("max_cost_usd needs price_in and price_out: without prices nothing costs anything")
        if self.timeout_s > self.deadline_s:
            raise ValueError(f"timeout_s ({self.timeout_s:g}) is longer than deadline_s ({self.deadline_s:g})")
        if not self.meteor_weight + self.judge_weight:
            raise ValueError("meteor_weight and judge_weight are both 0")
        return self


class Convert(Section):
    max_shard: str = "5GB"


class Evaluate(Section):
    benchmarks: tuple[str, ...] = ("referring", "region_caption", "grounded_caption", "video", "loops")
    split: str = "val"
    limit: Count = 0
    """Samples per benchmark; 0 = all."""
    loop_samples: Positive = 300
    """Regions that the two loops are measured on."""
    video_mode: Literal["auto", "sa2va", "sa2va-i"] = "auto"
    """How masks go through clips; auto = sa2va-i where the model keeps SAM2's original mask decoder."""
    batch: Positive = 32
    max_tokens: Positive = 48
    overlays: Count = 24
    sources: tuple[DataSource, ...] = ()
    """Evaluated only, never trained on (format `videos`, `regions`, ...)."""


class Report(Section):
    overlays: Count = 12


class Launch(Section):
    """How training stages start. Not a dependency of any stage: it changes where things run, not what is computed."""

    processes: Positive = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deepspeed_stage: Literal[0, 1, 2, 3] = 0
    deterministic: bool = True
    threads: Count = 0
    """CPU threads; 0 = all."""
    workers: Count = 0
    """Processes that prepare batches ahead."""


class Config(Section):
    profile: str
    seed: int = 0
    prepare: Prepare = Prepare()
    base: Base = Base()
    sft: Sft = Sft()
    rl: Rl = Rl()
    judge: Judge = Judge()
    convert: Convert = Convert()
    evaluate: Evaluate = Evaluate()
    report: Report = Report()
    launch: Launch = Launch()


PROFILES = Path("profiles")
FREE_TABLES = frozenset({"mixture", "loops", "rewards_caption", "rewards_mask", "rewards_text"})


class ConfigError(ValueError):
    """A setting that is unknown, mistyped or impossible. The message names the file, the line, the key and the remedy."""


def load(path: Path) -> Config:
    """Reads a complete params.yaml. Every key must be there: what ran is what is written, defaults fill in nothing."""
    values = _read(path)
    config = _validate(values, source=path)
    missing = sorted(set(_flat(config.model_dump(mode="json"))) - set(_flat(values)))
    if missing:
        raise ConfigError(
            f"{path}: lacks {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}: write it anew with `ans profile {config.profile}`"
        )
    return config


def resolve(profile: Path, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Defaults + profiles/NAME.yaml + `key=value` words (dotted keys, YAML values): the validated, plain values of params.yaml."""
    if not profile.is_file():
        names = sorted(path.stem for path in profile.parent.glob("*.yaml"))
        raise ConfigError(f"no profile named {profile.stem!r}{_nearest(profile.stem, names)}; {profile.parent} has {names}")
    values = _merge(Config(profile=profile.stem).model_dump(mode="json"), _read(profile))
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is no setting: write key=value, as in rl.kl=0.05")
        *sections, leaf = key.split(".")
        at = values
        for section in sections:
            if not isinstance(at.get(section), dict):
                raise ConfigError(f"{word!r}: there is no section {section!r}{_nearest(section, list(at))}")
            at = at[section]
        at[leaf] = yaml.safe_load(text)
    return _validate(values, source=profile).model_dump(mode="json")


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key; a free-form table (a mixture, rewards) is one value and replaced whole."""
    merged = dict(values)
    for key, change in changes.items():
        is_section = isinstance(change, dict) and isinstance(values.get(key), dict) and key not in FREE_TABLES
        merged[key] = _merge(values[key], change) if is_section else change
    return merged


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there: write it with `ans profile tiny`") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, it holds {type(values).__name__}")
    return values


def _validate(values: dict[str, Any], source: Path) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault, source) for fault in error.errors())) from None


def _explain(fault: Any, source: Path) -> str:
    location = [str(part) for part in fault["loc"]]
    where = f"{source}{_line(source, location)}: {'.'.join(location)}"
    if fault["type"] == "extra_forbidden":
        known = _keys(location[:-1])
        return f"{where}: unknown setting{_nearest(location[-1], known)}; there are {known}"
    if isinstance(fault["input"], dict):  # a whole section: what is wrong stands in the message, and the rest may be long, or a secret
        return f"{where}: {fault['msg'].removeprefix('Value error, ')}"
    return f"{where} = {fault['input']!r}: {fault['msg']}"


def _keys(sections: list[str]) -> list[str]:
    """Names that are valid in a section, given as the path of keys that leads there (list positions among them)."""
    model: Any = Config
    for section in sections:
        if section.isdigit():
            continue
        annotation = model.model_fields[section].annotation
        inner = [part for part in get_args(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        model = inner[0] if inner else annotation
    return list(model.model_fields)


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _line(path: Path, keys: list[str]) -> str:
    """`:12`, the line of a key in a YAML file, or nothing where the file does not have it (an override, a default)."""
    node = yaml.compose(path.read_text(encoding="utf-8"))
    line = None
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            found = [(name, value) for name, value in node.value if name.value == key]
        elif isinstance(node, yaml.SequenceNode) and key.isdigit() and int(key) < len(node.value):
            found = [(node.value[int(key)], node.value[int(key)])]
        else:
            found = []
        if not found:
            return ""
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return f":{line}" if line else ""


def _flat(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all leaves; the free-form tables (mixtures, rewards) count as one leaf."""
    names = []
    for key, value in values.items():
        is_section = isinstance(value, dict) and bool(value) and key not in FREE_TABLES
        names += _flat(value, f"{prefix}{key}.") if is_section else [prefix + key]
    return names
