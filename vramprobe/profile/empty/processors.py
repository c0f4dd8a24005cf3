"""Processors of vision-language models: image settings, special tokens and a chat template that places images.

In: a config of transformers', as its class and as the file says it. Out: ``preprocessor_config.json``,
``processor_config.json`` and ``chat_template.jinja`` as the family's own repositories have them, and what the tokenizer
must hold. Where torchvision is missing, which transformers needs for videos, processors are made without videos.
"""

import json
import os

from vramprobe_values.imports import instead_of

from . import counts, loading
from .replacements import write_json


def _read_families():
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "data", "processors.json")
    with open(file, encoding="utf-8") as rows:
        known = json.load(rows)
    return {kind: {**known.get(row.get("like"), {}), **row} for kind, row in known.items()}


#: By model_type: what stands for an image or a video in a text, special tokens at the ids of keys of the config
#: (``placed``) or anywhere (``words``: vLLM looks up Gemma 3's blank lines, between which an image stands), those that
#: the tokenizer names (``named``: LeRobot's SmolVLA asks for SmolVLM's first three), the processor's class, ``hears``.
FAMILIES = _read_families()
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_SCALED = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}


def of(config):
    """The family of a config.json that has a vision tower, or hears; None for one that has not, or is not known."""
    family = FAMILIES.get(config.get("model_type"), {})
    return family if "hears" in family or (family and config.get("vision_config") is not None) else None


def write(folder, config, read):
    """Into ``folder``; ``read``: the config as transformers' class, whose defaults stand in. -> what it is."""
    family = of(config)
    if "hears" in family:
        return _write_speech(folder, family, getattr(read, "audio_config", read))
    images, processor = _settings(config["model_type"], read)
    images["processor_class"] = family["processor"]
    files = {"preprocessor_config.json": images, "processor_config.json": processor}
    if videos := _video_settings(config["model_type"], images):
        files["video_preprocessor_config.json"] = videos
    for name, content in files.items():
        write_json(folder, name, {"processor_class": family["processor"], **content})
    with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as out:
        out.write(chat(family))
    return f"{family['processor']} with the image settings that its family publishes"


def tokens(config, read):
    """(id → word, other words, attribute → word) that the tokenizer must have; ``read`` as in :func:`write`."""
    family = of(config) or {}
    if config.get("model_type") == "whisper":
        return _whisper_tokens(read), [], {}
    ids = {config.get(key, getattr(read, key, None)): word for key, word in family.get("placed", {}).items()}
    placed = {number: word for number, word in ids.items() if isinstance(number, int)}
    return placed, family.get("words", []), family.get("named", {})


def _write_speech(folder, family, read):
    """A feature extractor of Whisper's, with the settings of openai/whisper-large-v3 (stored file 9937374558)."""
    sounds = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": read.num_mel_bins}
    sounds |= {"sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "chunk_length": 30, "padding_value": 0.0}
    sounds |= {"processor_class": family["processor"], "return_attention_mask": "placed" in family}
    write_json(folder, "preprocessor_config.json", sounds)
    return f"{family['processor']}, 30 s to a window, {read.num_mel_bins} bands"


def _whisper_tokens(read):
    """The ids after the text's: its end, the transcript's begin, languages, tasks, times (openai's tokenizer.py)."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    first, tasks = read.eos_token_id, ("translate", "transcribe", "startoflm", "startofprev", "nocaptions")
    number = read.vocab_size - first - len(tasks) - 1504  # its end, the begin, no times, and 1,501 times
    names = ["endoftext", "startoftranscript", *list(LANGUAGES)[:number], *tasks, "notimestamps"]
    names += [f"{hundredth / 100:.2f}" for hundredth in range(0, 3001, 2)]
    return {first + at: f"<|{name}|>" for at, name in enumerate(names)}


def chat(family):
    """tokenizer.CHAT for messages whose content is a text, or parts of texts, images and videos."""
    parts = "{% if part['type'] == 'image' %}{{ '" + family["image"] + "' }}"
    if "video" in family:
        parts += "{% elif part['type'] == 'video' %}{{ '" + family["video"] + "' }}"
    parts += "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    content = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}" + parts + "{% endfor %}{% endif %}"
    )
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}" + content + "{{ '</s>' }}{% endgeneration %}"
        "{% else %}" + content + "{{ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def _settings(model_type, read):
    """preprocessor_config.json and processor_config.json, as public copies of the families' have them."""
    vision = read.vision_config
    match model_type:
        case "qwen2_vl" | "qwen2_5_vl":  # stored file 69393411951: Qwen/Qwen2.5-VL-7B-Instruct
            images = {"min_pixels": 3136, "max_pixels": 12845056, **_CLIP, **_patches(vision)}
            return {"image_processor_type": "Qwen2VLImageProcessor", **images}, {}
        case "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe":  # stored file 52457624213: Qwen3-VL-2B-Instruct
            images = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, **_HALVES, **_patches(vision)}
            return {"image_processor_type": "Qwen2VLImageProcessor", **images}, {}
        case "idefics3" | "smolvlm":  # stored files 68306089702 (SmolVLM2-500M) and 71028674112 (SmolVLM)
            side, per_side = vision.image_size, vision.image_size // vision.patch_size
            images = {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}, "resample": 1}
            kind = "Idefics3ImageProcessor" if model_type == "idefics3" else "SmolVLMImageProcessor"
            images |= {"image_processor_type": kind, "do_image_splitting": True, "do_pad": True, **_HALVES, **_SCALED}
            if model_type == "smolvlm":
                sampled = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": side}}
                images |= {"video_sampling": sampled}
            return images, {"image_seq_len": per_side**2 // read.scale_factor**2}
        case "gemma3":  # stored file 59948925733: google/gemma-3-4b-it
            images = {"size": {"height": vision.image_size, "width": vision.image_size}, "resample": 2, **_HALVES}
            images |= {"image_processor_type": "Gemma3ImageProcessor", "image_seq_length": read.mm_tokens_per_image}
            return {**images, **_SCALED, "do_convert_rgb": None, "do_pan_and_scan": None}, {
                "image_seq_length": read.mm_tokens_per_image
            }
        case "gemma4" | "gemma4_unified":  # the classes' own defaults, which cite google/gemma-4-E2B-it
            name = "Gemma4" if model_type == "gemma4" else "Gemma4Unified"
            images = {"image_processor_type": f"{name}ImageProcessor", "patch_size": vision.patch_size}
            images |= {"max_soft_tokens": 280, "pooling_kernel_size": vision.pooling_kernel_size}
            return images | {"feature_extractor_type": f"{name}AudioFeatureExtractor"}, {"image_seq_length": 280}
        case "mistral3":  # stored file 59544285694: Magistral-Small-2509, tuned from it
            images = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": vision.image_size}}
            images |= {"patch_size": vision.patch_size, "resample": 3, **_CLIP, **_SCALED}
            return images, {"patch_size": vision.patch_size, "spatial_merge_size": read.spatial_merge_size}
        case _:  # llama4: the class's own defaults, with the config's sizes
            images = {"image_processor_type": "Llama4ImageProcessorFast", **_HALVES}
            images |= {"size": {"height": vision.image_size, "width": vision.image_size}}
            ratio = vision.pixel_shuffle_ratio
            return images, {"patch_size": vision.patch_size, "pixel_shuffle_ratio": ratio}


def _video_settings(model_type, images):
    """video_preprocessor_config.json, where a family publishes one; Qwen2.5-VL and SmolVLM2 read that of images."""
    if model_type not in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        return {}
    size = {"longest_edge": 25165824, "shortest_edge": 4096}  # stored file 52457624213: Qwen/Qwen3-VL-2B-Instruct
    shared = {name: value for name, value in images.items() if name != "image_processor_type"}
    return {**shared, "video_processor_type": "Qwen3VLVideoProcessor", "size": size}


def _patches(vision):
    return {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }


# -- in the command's processes ----------------------------------------------------------------------------------------


def serve(module, run):
    """transformers.processing_utils: local folders that lack a processor; tokens of an image or video, counted once."""
    kind = module.ProcessorMixin
    loading.serve_folders(module, run, "ProcessorMixin")

    @instead_of(kind, "from_pretrained")
    def from_pretrained(plain, cls, *words, **options):
        found = plain(cls, *words, **options)
        name = run.repositories.name_of(str([*words, options.get("pretrained_model_name_or_path")][0]))
        counts.tell(found, name, run)
        return found

    if hasattr(kind, "check_argument_for_proper_class"):  # releases before 4.50 check in __init__

        @instead_of(kind, "check_argument_for_proper_class")
        def check_argument(check, self, name, argument):
            return None if getattr(argument, "processes_no_videos", False) else check(self, name, argument)


def serve_videos(module, run):
    """transformers.models.auto.video_processing_auto: none where torchvision is missing, said once."""

    @instead_of(module.AutoVideoProcessor, "from_pretrained")
    def from_pretrained(plain, cls, name, *words, **options):
        try:
            return plain(cls, name, *words, **options)
        except ImportError as error:
            if "torchvision" not in str(error).lower():
                raise
            run.replaced("video processor", str(name), "none: torchvision is not installed; images need none")
            return _no_videos()


def _no_videos():
    """Make the object that a processor holds in the place of its video processor: saved as nothing."""
    from transformers.utils import PushToHubMixin

    def refuse(self, *words, **options):
        raise ImportError("videos need torchvision where the command runs: pip install torchvision, and run it again")

    about = {"processes_no_videos": True, "_auto_class": None, "model_input_names": []}
    about |= {"to_dict": lambda self: {}, "__call__": refuse}
    return type("NoVideos", (PushToHubMixin,), about)()
