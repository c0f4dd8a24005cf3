"""Expected: a record -> what is predicted of its cell without a fit; records -> the fit that learns from that.

In: RunRecords. Out: a Prediction, by a recipe at hand for the record's GPU, or one that is recorded now where the
caller allows; a CardFit. Never looks at what was measured.
"""

from collections.abc import Callable, Iterable

from vramprobe.catalog import Gpu, gpu_seen
from vramprobe.errors import VramprobeError
from vramprobe.model.card_fit import CardFit
from vramprobe.model.fit import Expected, fit
from vramprobe.predict.at_hand import NoRecipe, replay_at_hand, require_recordable
from vramprobe.predict.prediction import Prediction
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec

#: Predicts a record's cell without a fit; raises VramprobeError where nothing does.
Expect = Callable[[RunRecord], Prediction]


def predict_at_hand(spec: CellSpec, gpu: Gpu | None, model: CardFit | None = None, *, near: bool = False) -> Prediction:
    """Predict a cell by a recipe at hand, else, if ``near``, by the nearest that ships. Raises NoRecipe without one,
    and for the CPU.
    """
    from vramprobe.predict.recorded import predict_replay

    replay = replay_at_hand(spec, gpu=gpu, near=near)
    if replay is None:
        require_recordable(spec, gpu)
        raise NoRecipe("no recipe of the cell is at hand: vramprobe predict with its options records one")
    return predict_replay(replay, spec, gpu=gpu, model=model)


def expected(record: RunRecord) -> Prediction:
    """Return the prediction by a recipe at hand; raises as :func:`predict_at_hand`."""
    return predict_at_hand(record.spec, gpu_seen(record.environment.device_name))


def recording(say: Callable[[str], None] = lambda words: None) -> Expect:
    """Return :func:`expected` for where a recipe that is missing is recorded, seconds each, of which ``say`` hears."""
    from vramprobe.predict import recorded

    def expect(record: RunRecord) -> Prediction:
        try:
            return expected(record)
        except NoRecipe:
            say(f"recording {record.cell_id}")
            return recorded.predict(record.spec, gpu=gpu_seen(record.environment.device_name), say=say)

    return expect


def once(expect: Expect) -> Expect:
    """Return ``expect``, which is asked of each attempt once."""
    answers: dict[str, Prediction | VramprobeError] = {}

    def answer(record: RunRecord) -> Prediction:
        if record.attempt_id not in answers:
            try:
                answers[record.attempt_id] = expect(record)
            except VramprobeError as error:
                answers[record.attempt_id] = error
        found = answers[record.attempt_id]
        if isinstance(found, VramprobeError):
            raise found
        return found

    return answer


def fit_records(records: Iterable[RunRecord], expect: Expect = expected) -> CardFit:
    """The fit of these records; raises as :func:`vramprobe.model.fit.fit`."""

    def both(record: RunRecord) -> Expected:
        found = expect(record)
        reserved = found.reserved_bytes
        return Expected(found.peak_allocated_bytes.value, reserved.value if reserved else None)

    return fit(records, both)
