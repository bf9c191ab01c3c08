"""The allocation tape: which storages are alive, by the rules of autograd."""

from services.shared.memory.planning.allocation_tape import Gradient, Tape, rounded

_MIB = 2**20


def test_an_allocation_counts_in_blocks_of_512_bytes() -> None:
    assert [rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_an_output_is_freed_with_its_last_reference() -> None:
    tape = Tape(saving=True)
    out = tape.op("scale", _MIB)
    assert tape.live_bytes == _MIB
    tape.drop(out)
    assert tape.live_bytes == 0


def test_what_backward_needs_outlives_its_references() -> None:
    tape = Tape(saving=True)
    x = tape.external(_MIB, "x")
    wide = tape.op("up", 4 * _MIB, [Gradient(x, _MIB)], saves=[x])
    out = tape.op("act", 4 * _MIB, [Gradient(wide, 4 * _MIB)], saves=[wide])
    tape.drop(wide, out)
    assert tape.live_bytes == 4 * _MIB


def test_nothing_is_kept_without_backward() -> None:
    tape = Tape(saving=False)
    x = tape.external(_MIB, "x")
    wide = tape.op("up", 4 * _MIB, [Gradient(x, _MIB)], saves=[x])
    tape.drop(wide)
    assert tape.live_bytes == 0


def test_backward_frees_what_was_saved_and_leaves_the_input_s_gradient() -> None:
    tape = Tape(saving=True)
    x = tape.external(_MIB, "x")
    out = tape.op("up", 4 * _MIB, [Gradient(x, _MIB)], saves_out=True, weight_bytes=[2 * _MIB])
    tape.drop(out)
    tape.play_backward(out, tape.op("gradient", 4 * _MIB))
    assert tape.weight_gradient_bytes == 2 * _MIB
    assert tape.live_bytes == _MIB + 2 * _MIB


def test_two_gradients_of_one_value_are_summed_in_a_third_tensor() -> None:
    tape = Tape(saving=True)
    x = tape.external(_MIB, "x")
    left = tape.op("left", _MIB, [Gradient(x, _MIB)])
    right = tape.op("right", _MIB, [Gradient(x, _MIB)])
    out = tape.op("add", _MIB, [Gradient(left, alias=True), Gradient(right, alias=True)])
    tape.drop(left, right, out)
    tape.reset_records()
    tape.play_backward(out, tape.op("gradient", _MIB))
    assert max(moment.live_bytes for moment in tape.records) == 3 * _MIB
    assert tape.live_bytes == _MIB


def test_views_allocate_nothing_until_their_gradients_are_concatenated() -> None:
    tape = Tape(saving=True)
    x = tape.external(_MIB, "x")
    fused = tape.op("fused", 3 * _MIB, [Gradient(x, _MIB)], saves=[x])
    parts = tape.split("parts", fused, [_MIB] * 3)
    tape.drop(fused)
    assert tape.live_bytes == 3 * _MIB
    out = tape.op("mix", _MIB, [Gradient(part, _MIB) for part in parts])
    tape.drop(*parts, out)
    assert tape.live_bytes == 0
    tape.reset_records()
    tape.play_backward(out, tape.op("gradient", _MIB))
    assert max(moment.live_bytes for moment in tape.records) == 6 * _MIB


def test_records_rise_and_end_at_the_maximum() -> None:
    tape = Tape(saving=False)
    for size in (3, 1, 4, 1, 5):
        tape.drop(tape.op("x", size * _MIB))
    assert [moment.live_bytes // _MIB for moment in tape.records] == [3, 4, 5]


def test_gradients_added_in_place_do_not_accumulate_memory() -> None:
    tape = Tape(saving=True, adding=True)
    x = tape.external(_MIB, "x")
    out = tape.op("up", _MIB, [Gradient(x, _MIB)], weight_bytes=[2 * _MIB])
    tape.drop(out)
    tape.play_backward(out, tape.op("gradient", _MIB))
    assert tape.live_bytes == _MIB
