"""The page of the largest batch of rows of real lengths: made of its profiles, which agree."""

from scripts import script


def test_the_page_is_made_of_profiles_that_agree() -> None:
    page = script("truth.data_lengths")
    profiles = page.profiles()
    seconds = {row["name"]: row for row in page.read_csv(page.SECONDS)}
    assert page.PAGE.read_text(encoding="utf-8") == page.markdown(profiles, seconds)
    chosen, whole = profiles["100,000 rows"], profiles[page.WHOLE]
    batches = chosen.ranks[0].batches
    assert whole.ranks[0].num_steps == batches.num_batches
    assert abs(page.difference(chosen, whole)) < 0.01


def test_the_page_of_reserved_memory_is_made_of_its_steps() -> None:
    page = script("truth.data_creep")
    table = page.read_csv(page.TABLE)
    assert page.PAGE.read_text(encoding="utf-8") == page.markdown(table)
    plain = [row for row in table if row["name"] == "RTX-4090"]
    assert len(plain) > page.CASES["RTX-4090"].num_steps / 2
    assert all(row["predicted_bytes"] == row["emulated_bytes"] for row in plain)
    one_off = [plain[0] | {"predicted_bytes": "0"}, *plain[1:]]
    assert page.summary("RTX-4090", one_off)["steps that differ"] == "1"
