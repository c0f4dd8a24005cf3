"""Names of other makers' chips, machines of clouds and providers: what they are, and what to give in their place."""

import re

import pytest

from vramprobe.catalog import find_gpu
from vramprobe.catalog.gpu_hints import gpu_hint
from vramprobe.catalog.gpus import gpu_or_size, list_gpus
from vramprobe.catalog.shipped import csv_rows
from vramprobe.errors import UnknownName

ROWS = csv_rows("gpu_hints.csv")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["example"])
def test_each_row_answers_its_example(row: dict[str, str]) -> None:
    with pytest.raises(UnknownName, match=re.escape(row["hint"])) as refused:
        gpu_or_size(row["example"])
    assert "Nearest" not in str(refused.value)
    assert "a size such as 12GiB will do" in str(refused.value)
    named = re.findall(r"\b(?:[ABHLV]\d+[A-Z]*|T4|P100|MI300X)(?:-\w+)*", row["hint"])
    assert all(find_gpu(name) for name in named)
    assert named or "give that name" not in row["hint"]
    assert re.search(r"\bgeneral knowledge$|\b(?:github\.com|huggingface\.co)/\S+", row["source"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("M4 Ultra", "An Apple chip"),
        ("m1", "An Apple chip"),
        ("MacBook Pro", "An Apple chip"),
        ("v5e-8", "A TPU"),
        ("B580", "A GPU of Intel"),
        ("MI250X", "A GPU of AMD"),
        ("g5.48xlarge", "A10G"),
        ("Standard_ND96isr_H100_v5", "eight H100-SXM"),
        ("7900 XT", "A GPU of AMD"),
        ("A800", ""),
        ("B100", ""),
        ("RTX 6000", ""),
        ("Tesla M40", ""),
        ("GTX 1080", ""),
        ("RTX 4099", ""),
        ("", ""),
    ],
)
def test_a_row_takes_its_kind_alone(name: str, said: str) -> None:
    assert (said in gpu_hint(name)) if said else not gpu_hint(name)


def test_no_row_takes_a_gpu_of_the_catalog() -> None:
    for gpu in list_gpus():
        for name in (gpu.name, gpu.short_name, *gpu.aliases):
            assert find_gpu(name) == gpu
