"""Count the tokens of an image or a video with the model's own processor.

In: a processor of transformers', sizes. Out: numbers, and lines of replacements.py. Those around an image are not
counted.
"""

from . import media


def tell(processor, name, run):
    """Record the number of tokens of an image of the rows' size, and of a video if requested, by the processor."""
    if getattr(processor, "image_processor", None) is None or not getattr(processor, "chat_template", None):
        return
    width, height = run.asked["image_size"]
    _say_count(
        "image", f"{width} × {height} pixels", processor, name, run, lambda: tokens_per_image(processor, width, height)
    )
    if not run.asked["counts_videos"]:
        return
    frames, width, height = run.asked["video_size"]
    size = f"{frames} frames of {width} × {height} pixels"
    reader = getattr(processor, "video_processor", None)
    if reader is None:
        run.missing(
            f"{name}: its {type(processor).__name__} reads no videos; give --image-size instead of --video-size"
        )
    elif getattr(reader, "processes_no_videos", False):
        run.missing(
            f"{name}: videos need torchvision where the command runs; pip install torchvision, and run it again"
        )
    else:
        _say_count("video", size, processor, name, run, lambda: tokens_per_video(processor, run.asked["video_size"]))


def _say_count(kind, size, processor, name, run, count):
    try:
        said = f"{count():,} for {size}, counted by {type(processor).__name__}"
    except Exception as error:  # of a processor that is made otherwise; the command goes on
        said = f"not counted: {type(error).__name__}: {error}"
    run.replaced(f"{kind} tokens", name, said)


def tokens_per_image(processor, width, height):
    """Tokens at which the model reads the image, those around it not counted."""
    from PIL import Image

    return _marks(processor, "image", images=[Image.new("RGB", (width, height))])


def tokens_per_video(processor, size):
    """Number of tokens of a video of ``size``, frames that are sampled as its processor does."""
    frames, about = media.read(size)
    return _marks(processor, "video", videos=[frames], video_metadata=[about], return_tensors="pt")


def _marks(processor, kind, **seen):
    """Tokens of a text with one of ``kind`` at which the model reads it; some families write their image's for both."""
    text = processor.apply_chat_template([{"role": "user", "content": [{"type": kind}]}], tokenize=False)
    ids = processor(text=[text], **seen)["input_ids"][0]
    marks = getattr(processor, "image_token_ids", None) or [processor.image_token_id]
    if patch := getattr(processor, "img_patch_token", None):  # Llama 4's, whose image token stands once in a text
        marks = [processor.tokenizer.convert_tokens_to_ids(patch)]
    marks = [*marks, getattr(processor, "video_token_id", None)]
    return sum(int(one) in marks for one in ids)
