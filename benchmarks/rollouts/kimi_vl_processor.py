"""A processor of Kimi-VL's images, for kimi_vl.py: patches of 14 pixels, four of them a token.

In: images. Out: pixel_values (patches, 3, 14, 14) and image_grid_hws (images, 2), in patches. An image of more patches
than in_token_limit is scaled down, then padded to whole tokens, as vLLM counts them (models/kimi_vl.py). Runs as code
of the model's own, with transformers 4.57.
"""

import math

import numpy as np
import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import make_flat_list_of_images, to_numpy_array
from transformers.processing_utils import ProcessorMixin


class KimiVLImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values", "image_grid_hws"]  # noqa: RUF012

    def __init__(self, patch_size=14, merge_kernel_size=(2, 2), in_token_limit=4096, **kwargs):
        super().__init__(**kwargs)
        self.patch_size, self.merge_kernel_size, self.in_token_limit = patch_size, merge_kernel_size, in_token_limit

    def preprocess(self, images, return_tensors=None, **kwargs):
        found = [self._patches(image) for image in make_flat_list_of_images(images)]
        values = torch.cat([patches for patches, _ in found])
        return BatchFeature({"pixel_values": values, "image_grid_hws": torch.tensor([grid for _, grid in found])})

    def _patches(self, image):
        """(patches, (rows, columns))."""
        side, width, height = self.patch_size, *image.size
        count = (width // side) * (height // side)
        if count > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / count)
            width, height = int(width * scale), int(height * scale)
            image = image.resize((width, height))
        rows, columns = (
            -(-pixels // (side * kernel)) * kernel
            for pixels, kernel in zip((height, width), self.merge_kernel_size, strict=True)
        )
        whole = np.zeros((rows * side, columns * side, 3), dtype=np.float32)
        whole[:height, :width] = to_numpy_array(image.convert("RGB")) / 127.5 - 1
        patches = torch.from_numpy(whole).view(rows, side, columns, side, 3).permute(0, 2, 4, 1, 3)
        return patches.reshape(-1, 3, side, side), (rows, columns)


class KimiVLProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012
    image_processor_class, tokenizer_class = "AutoImageProcessor", "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token = "<|media_pad|>"
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, return_tensors=None, **kwargs):
        texts = [text] if isinstance(text, str) else list(text)
        if images is None:
            return BatchFeature(self.tokenizer(texts, return_tensors=return_tensors))
        seen, whole = self.image_processor(images), []
        kernel = math.prod(self.image_processor.merge_kernel_size)
        counts = iter([int(grid.prod()) // kernel for grid in seen["image_grid_hws"]])
        for one in texts:
            first, *others = one.split(self.image_token)
            whole.append(first + "".join(self.image_token * next(counts) + other for other in others))
        return BatchFeature({**self.tokenizer(whole, return_tensors=return_tensors), **seen})
