"""The cells of late 2026: each row is one of them, and a recipe of it took what the whole run took."""

from scripts import script


def test_rows_are_cells_whose_recipes_repeat_their_runs() -> None:
    late = script("truth.late_2026")
    known = {(gpu, spec.cell_id) for _, gpu, spec in late.cells()}
    rows = late.read_csv(late.CSV)
    assert len({(row["gpu"], row["cell"]) for row in rows} & known) == len(rows) > 9
    for row in rows:  # an error is the library's own, in the recording as in the run
        assert row["outcome"] == "ok" or (row["outcome"] == "error" and not row["recipe_allocated_bytes"]), row
        for tier in ("allocated", "reserved"):
            is_equal = row[f"recipe_{tier}_bytes"] == row[f"run_{tier}_bytes"]
            assert is_equal or row["cell"] in late.DIFFERING, row["cell"]
    assert late.PAGE.read_text(encoding="utf-8") == late.page(rows)


def test_a_row_that_differs_shows_how_far() -> None:
    late = script("truth.late_2026")
    assert late._difference("2000", "1000") == "+100.0000 %"
    assert late._difference("", "1000") == "–"
