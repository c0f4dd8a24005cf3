"""Functions that transformers imports for rows of varying length, which the published runs have none of."""


def _no_padding(*args):
    raise NotImplementedError("rows of varying length")


index_first_axis = pad_input = unpad_input = _no_padding
