"""Rows for a dataset that is not there, in the columns that it is known or guessed to have.

In: a call of ``datasets.load_dataset`` that found nothing, a length in tokens. Out: a Dataset, or a DatasetDict. Every
row is as long as every other and has at least that many tokens: as many short words, each a token in nearly every
tokenizer. What is there, or fails for another reason, is the library's own affair.
"""

import inspect
import os
import re
import sys

from vramprobe_values.imports import instead_of

from . import media

#: Columns of images: one, or a list of one.
IMAGES = ("image", "images")
#: Columns of videos: the path of a file, or a list of one.
VIDEOS = ("video", "videos")
AUDIO = "audio"
#: Tokens of a transcript, at most: Whisper's decoder reads 448, its marks among them.
_TRANSCRIPT = 400
#: Words of a caption, at most: CLIP's text encoder reads 77 tokens.
_CAPTION = 75
NUM_ROWS, NUM_OTHER_ROWS = 512, 64
#: From this length on there are fewer rows, which a program tokenizes all before its first step: an eighth, at least.
LONG_ROW_TOKENS, FEWEST = 16_384, 8
SPLITS = ("train", "test", "validation")
_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_NOT_THERE = {
    "DatasetNotFoundError", "ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError",
    "RepositoryNotFoundError", "HfHubHTTPError", "FileNotFoundError", "DataFilesNotFoundError",
}  # fmt: skip


def serve(module, run):
    """datasets.load."""

    @instead_of(module, "load_dataset")
    def load_dataset(plain, path, *words, **options):
        try:
            return plain(path, *words, **options)
        except Exception as error:
            options = inspect.signature(plain).bind(path, *words, **options).arguments
            if not _is_missing(path, options, error):
                raise
            made, said = _made(path, options, run)
        run.replaced("dataset", path, said)
        return made


def serve_existence(module, run):
    """huggingface_hub._snapshot_download: a program that asks for no file of a data set asks whether there is one."""

    @instead_of(module, "snapshot_download")
    def snapshot_download(plain, repo_id, *words, **options):
        try:
            return plain(repo_id, *words, **options)
        except Exception as error:
            wants_none = options.get("repo_type") == "dataset" and "*" in (options.get("ignore_patterns") or ())
            if not wants_none or not _is_missing(repo_id, {}, error):
                raise
            folder = os.path.join(run.folder, "hub", "asked")
            os.makedirs(folder, exist_ok=True)
            return folder


def _is_missing(path, options, error):
    """A name of the hub's that it, or its cache, does not give."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if not isinstance(path, str) or not _ID.fullmatch(path) or path in _PACKAGED_DATASETS_MODULES:
        return False
    if os.path.exists(path) or options.get("data_files") or options.get("data_dir"):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _NOT_THERE) or "Couldn't find cache for" in str(error)


def _made(path, options, run):
    from datasets import Audio, Dataset, DatasetDict, Image, IterableDatasetDict

    asked = run.asked
    of_path = asked["datasets"].get(path.lower(), {})
    known = of_path.get(str(options.get("name") or ""), of_path.get(""))
    form, why = (known["format"], "the columns that it is known for") if known else (guessed(path), "guessed columns")
    row, length = row_of(form, asked["seq_len"]), asked["seq_len"]
    said = f"{num_rows(NUM_ROWS, length)} rows of {length:,} tokens, {why}: {', '.join(row)}"
    pictured = [column for column in row if column in IMAGES]
    if pictured:
        width, height = asked["image_size"]
        picture = {"bytes": media.png(width, height), "path": None}
        row |= {column: [picture] if isinstance(row[column], list) else picture for column in pictured}
        said += f"; one image of {width} × {height} pixels a row (--image-size)"
    for column in (column for column in row if column in VIDEOS):
        size = asked["video_size"]
        path = media.gray(run.folder, size)
        row[column] = [path] if isinstance(row[column], list) else path
        said += f"; one video of {size[0]} frames of {size[1]} × {size[2]} pixels a row (--video-size), by its path"
    if AUDIO in row:
        seconds = asked["audio_seconds"]
        row[AUDIO] = {"bytes": None, "path": media.silence(run.folder, seconds)}
        said += f"; {seconds:g} s of silence a row (--audio-seconds), its text at most {_TRANSCRIPT} tokens"

    def split(name):
        count = num_rows(NUM_ROWS if name.startswith("train") else NUM_OTHER_ROWS, length)
        made = Dataset.from_dict({column: [value] * count for column, value in row.items()})
        for column in pictured:
            made = made.cast_column(column, [Image()] if isinstance(row[column], list) else Image())
        if AUDIO in row:
            made = made.cast_column(AUDIO, Audio())
        return made.to_iterable_dataset() if options.get("streaming") else made

    wanted = options.get("split")
    if wanted is None:
        kind = IterableDatasetDict if options.get("streaming") else DatasetDict
        return kind({name: split(name) for name in (known or {}).get("splits") or SPLITS}), said
    if isinstance(wanted, (list, tuple)):
        return [split(str(one)) for one in wanted], said
    return split(str(wanted)), said


def num_rows(most, length):
    """Rows of ``length`` tokens where ``most`` of a short length are made."""
    return min(most, max(most // FEWEST, most * LONG_ROW_TOKENS // length))


def guessed(path):
    """A format by the dataset's name and the program's."""
    name = f"{path} {os.path.basename(sys.argv[0])}".lower()
    if "kto" in name:
        return "kto"
    if re.search(r"dpo|orpo|cpo|prefer|feedback|hh-rlhf|reward|binarized", name):
        return "preference"
    if re.search(r"grpo|rloo|ppo|prompt", name):
        return "prompt"
    if re.search(r"text_to_image|dreambooth|controlnet|diffus", name):
        return "image_text"
    if "video" in name:
        return "messages_videos" if re.search(r"llava|vsft|chat|instruct", name) else "video_text"
    if re.search(r"vlm|llava|vsft|-vl-|vqa", name):
        return "messages_images"
    if re.search(r"speech|whisper|voice|librispeech|asr|fleurs|audio", name):
        return "audio_text"
    if re.search(r"nli|msmarco|embed|retriev|pairs?\b|sentence", name):
        return "pair"
    if re.search(r"alpaca|dolly", name):
        return "alpaca"
    return "messages" if re.search(r"chat|instruct|conversation|capybara|messages", name) else "text"


def row_of(form, length):
    """One row of ``length`` tokens, a quarter of them a question where there is one. Raises KeyError for no format."""
    asked, answered = _words(length // 4), _words(length - length // 4)
    question, answer = {"role": "user", "content": asked}, {"role": "assistant", "content": answered}
    return {
        "text": {"text": _words(length)},
        "messages": {"messages": [question, answer]},
        "conversations": {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]},
        "alpaca": {"instruction": asked, "input": "", "output": answered, "text": _words(length)},
        "dolly": {"instruction": asked, "context": "", "response": answered, "category": "a"},
        "prompt_completion": {"prompt": asked, "completion": answered},
        "question_answer": {"question": asked, "answer": answered},
        "preference": {"prompt": asked, "chosen": answered, "rejected": answered},
        "preference_messages": {"chosen": [question, answer], "rejected": [question, answer]},
        "preference_prompt_messages": {
            "prompt": asked,
            "chosen": [question, answer],
            "rejected": [question, answer],
            "messages": [question, answer],
        },
        "chosen_rejected": {"chosen": _words(length), "rejected": _words(length)},
        "kto": {"prompt": asked, "completion": answered, "label": True},
        "prompt": {"prompt": _words(length)},
        "prompt_messages": {"prompt": [{"role": "user", "content": _words(length)}], "solution": "a"},
        "labelled": {"text": _words(length), "label": 0},
        "pair": {"anchor": _words(length), "positive": _words(length)},
        "triplet": {"anchor": _words(length), "positive": _words(length), "negative": _words(length)},
        "pair_class": {"premise": _words(length), "hypothesis": _words(length), "label": 0},
        "pair_score": {"sentence1": _words(length), "sentence2": _words(length), "score": 0.5},
        "query_answer": {"query": _words(length), "answer": _words(length)},
        "messages_images": {"messages": [_seen(asked), _said(answered)], "images": [None]},
        "messages_videos": {"messages": [_seen(asked, "video"), _said(answered)], "videos": [None]},
        "prompt_completion_images": {"images": [None], "prompt": [question], "completion": [answer]},
        "preference_images": {
            "images": [None],
            "prompt": [_seen(asked)],
            "chosen": [_said(answered)],
            "rejected": [_said(answered)],
        },
        "audio_text": {"audio": None, "text": _words(min(length, _TRANSCRIPT))},
        "audio_sentence": {"audio": None, "sentence": _words(min(length, _TRANSCRIPT)), "locale": "en"},
        "video_text": {"video": None, "text": _words(length)},
        "image_text": {"image": None, "text": _words(min(length, _CAPTION))},
        "image_prompt": {"image": None, "prompt": _words(min(length, _CAPTION))},
        "problem_image": {"image": None, "problem": asked, "solution": answered},
    }[form]


def _seen(text, kind="image"):
    """A question about an image or a video, in parts as llava-instruct-mix-vsft has them."""
    parts = [{"index": None, "text": text, "type": "text"}, {"index": 0, "text": None, "type": kind}]
    return {"content": parts, "role": "user"}


def _said(text):
    return {"content": [{"index": None, "text": text, "type": "text"}], "role": "assistant"}


def _words(count):
    return " ".join(["a"] * max(count, 1))
